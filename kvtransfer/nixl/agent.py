"""The one place that knows the `nixl` package: loading it, how its UCX back end is set up, and a typed agent.

What lives here: registered memory, descriptors built from plain numbers, posted reads. What does not:
sockets of ours, who may read what, and when a read is over for the host (`server`, `reader`).

Nothing that came from a peer is unpickled: NIXL's own (de)serialised descriptors are pickles and are not
used. An agent's metadata is opaque to Python, and NIXL's C++ crashes on damaged ones: it must be checked to
be the peer's own before `add_peer`.

Quiet memory: giving a posted read's handle back does not end it (the library only asks UCX to cancel). What
does end every access is to destroy the agent, UCX worker and registrations with it: `close`. So each reader
has an agent of its own, and ends reads only when NIXL says they are done or when its agent is gone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from pdserve.config.addresses import is_loopback
from pdserve.errors import ConfigError

_PACKAGES = ("nixl_cu12", "nixl_cu13")  # one wheel for each CUDA version; both move host memory without CUDA
_MISSING = "transport: nixl needs the extra of that name; pip install 'pdserve[nixl]', or choose another one."
_NO_TCP = (
    "transport: nixl does not run over UCX's tcp, where a reader that dies takes the source's process along; "
    "list transports in UCX_TLS without it."
)
_NO_RDMA = (
    "transport: nixl beyond this machine needs RDMA; list its transports in UCX_TLS (such as rc,ud,sm) "
    "and its devices in UCX_NET_DEVICES."
)
_PROGRESS_US = 10_000
_LOOPBACK = "127.0.0.1"
_HOST_MEMORY = 0  # device id


class NixlError(Exception):
    """NIXL could not do what was asked; the text is its own name for why."""


def available() -> bool:
    """Whether the package is installed. Loads nothing."""
    return any(importlib.util.find_spec(name) is not None for name in _PACKAGES)


def require() -> None:
    """Raises ConfigError where the package is missing. Loads nothing."""
    if not available():
        raise ConfigError(_MISSING)


@functools.cache
def load() -> ModuleType:
    """NIXL's bindings. Raises ConfigError where the package is missing.

    They are used directly: the package's Python class fixes a progress thread that never sleeps.
    """
    # Both libraries write to our standard streams; what matters is reported by exceptions.
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    require()
    name = next(name for name in _PACKAGES if importlib.util.find_spec(name) is not None)
    nixl = importlib.import_module(f"{name}._bindings")
    # A process's first agent loads UCX (0.4 s): at start, not within the first request.
    with _errors():
        nixl.nixlAgent("start", nixl.nixlAgentConfig()).createBackend("UCX", backend_options(_LOOPBACK))
    return nixl


def backend_options(host: str) -> dict[str, str]:
    """How UCX is set up for an agent whose peers are reached at `host`; UCX_* of the environment win.

    On loopback: shared memory and the kernel's copy between processes, and no network at all. Elsewhere the
    operator names RDMA transports and devices. UCX's tcp is refused: it authenticates nobody, and its reads
    are messages that the source answers in software, where it crashes when a reader dies. Raises ConfigError.
    """
    transports = os.environ.get("UCX_TLS", "")
    if transports and _allows_tcp(transports):
        raise ConfigError(_NO_TCP)
    if is_loopback(host):
        return {"ucx_error_handling_mode": "none", "engine_config": "NET_DEVICES=lo,TLS=sm"}
    if not (transports and os.environ.get("UCX_NET_DEVICES")):
        raise ConfigError(_NO_RDMA)
    return {"ucx_error_handling_mode": "peer"}


def _allows_tcp(transports: str) -> bool:
    listed = {part.strip() for part in transports.lstrip("^").split(",")}
    return "tcp" not in listed if transports.startswith("^") else bool(listed & {"tcp", "all"})


def address_of(memory: memoryview) -> int:
    """Where contiguous memory lies in this process."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


class Agent:
    """A NIXL agent with the UCX back end. All methods raise NixlError; they are for one thread, and the
    source's agent does its part in a thread of its own, which sleeps while nothing comes."""

    def __init__(self, name: str, host: str, *, is_source: bool) -> None:
        self._nixl: Any = load()
        self._regions: dict[tuple[int, int], Any] = {}
        self._handles: set[int] = set()
        options = backend_options(host)
        config = self._nixl.nixlAgentConfig()
        config.useProgThread, config.useListenThread, config.captureTelemetry = is_source, False, False
        config.pthrDelay = _PROGRESS_US
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        with _errors():
            self._agent: Any = self._nixl.nixlAgent(name, config)
            self._agent.createBackend("UCX", options)

    def register(self, address: int, size_bytes: int) -> None:
        """Registers memory for reads out of it and into it; mapped at least until `unregister` or `close`."""
        region = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(address, size_bytes, _HOST_MEMORY, "")])
        with _errors():
            self._agent.registerMem(region)
        self._regions[address, size_bytes] = region

    def unregister(self, address: int, size_bytes: int) -> None:
        """Takes a registration back."""
        with _errors():
            self._agent.deregisterMem(self._regions.pop((address, size_bytes)))

    def metadata(self) -> bytes:
        """What a peer's `add_peer` takes: our UCX address and the keys of what is registered now."""
        with _errors():
            return bytes(self._agent.getLocalMD())

    def add_peer(self, metadata: bytes) -> str:
        """Makes a peer's registered memory readable; returns the name it calls itself."""
        with _errors():
            return str(self._agent.loadRemoteMD(metadata), "utf-8", "replace")

    def post_read(self, peer: str, pairs: Sequence[tuple[int, int]], size_bytes: int) -> tuple[int, bool]:
        """Posts one transfer that reads `size_bytes` for each (remote address, local address), all of them in
        registered memory. Returns its handle and whether it is done already."""
        remote = [(there, size_bytes, _HOST_MEMORY) for there, _ in pairs]
        local = [(here, size_bytes, _HOST_MEMORY) for _, here in pairs]
        nixl = self._nixl
        with _errors():
            handle = self._agent.createXferReq(
                nixl.NIXL_READ,
                nixl.nixlXferDList(nixl.DRAM_SEG, local),
                nixl.nixlXferDList(nixl.DRAM_SEG, remote),
                peer,
            )
            self._handles.add(handle)
            return handle, self._agent.postXferReq(handle) == nixl.NIXL_SUCCESS

    def is_done(self, handle: int) -> bool:
        """Whether a posted transfer is done: all bytes are there and nothing touches the memory any more."""
        with _errors():
            return bool(self._agent.getXferStatus(handle) == self._nixl.NIXL_SUCCESS)

    def release(self, handle: int) -> None:
        """Gives the handle of a transfer that is done back."""
        self._handles.discard(handle)
        with _errors():
            self._agent.releaseXferReq(handle)

    def close(self) -> None:
        """Destroys the agent. When it returns, nothing of it touches any memory, whatever was posted."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        for handle in self._handles:
            _quietly(agent.releaseXferReq, handle)
        for region in self._regions.values():
            _quietly(agent.deregisterMem, region)
        self._handles.clear()
        self._regions.clear()


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """NIXL's own exceptions share no base class; their names say what went wrong, their texts add nothing."""
    try:
        yield
    except Exception as error:
        raise NixlError(type(error).__name__) from error


def _quietly(call: Callable[[Any], object], argument: object) -> None:
    # The agent is about to be destroyed, which does all of this, whether or not it was possible one by one.
    with contextlib.suppress(Exception):
        call(argument)
