"""What a data-plane transport is: interfaces, their data, and the registry by name (protocol.md §1).

What lives here: `PageServer` (at the source), `PageReader` (at the destination), what the host supplies to
them, and lazy factories for "shm", "tcp" and "nixl". What does not: any socket or mapping (`kvtransfer.shm`,
`kvtransfer.tcp`, `kvtransfer.nixl`), and any decision about what to read (`kvtransfer.session`).

The transfer token that a reader shows on the data plane is the router's ticket itself (`kvtransfer.ticket`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from pdserve.errors import ConfigError
from pdserve.types import Key, PageName

if TYPE_CHECKING:
    from pdserve.tls import TlsSource


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """A registered page pool. layout: fingerprint. page_bytes: payload of a page. stride_bytes: distance of
    two pages. fd: the pool's descriptor, which shm hands out read-only; -1 where there is none."""

    pool_id: int
    layout: str
    num_pages: int
    page_bytes: int
    stride_bytes: int
    fd: int = -1


class PageSource(Protocol):
    """What the host of a source pool supplies. Servers call every method from their own threads.

    `pin` and `authorise` are on the hot path of each page: they must not wait for the control thread's turn.
    """

    @property
    def facts(self) -> PoolFacts:
        """The pool. Constant."""
        ...

    def authorise(self, ticket: bytes, key: Key) -> bool:
        """Whether `ticket` is genuine, unexpired, for `key` and for this worker. Changes nothing."""
        ...

    def payload(self, page: int) -> memoryview:
        """The payload bytes of a page of the pool. Changes nothing."""
        ...

    def generation(self, page: int) -> int:
        """The page's generation now. Changes nothing."""
        ...

    def pin(self, page: int, generation: int, key: Key, pin_id: str) -> bool:
        """Takes an I/O pin if the page still has that generation and is held for this key's transfer; one
        atomic step. So a ticket opens the pages of its own request only."""
        ...

    def unpin(self, pin_id: str) -> None:
        """Drops the pin, if there is one. Must not block."""
        ...


class PageServer(Protocol):
    """One transport's source end of one pool. Methods are for the control thread; none waits for a peer."""

    def start(self) -> None:
        """Listens. Raises OSError if the address is taken or not ours."""
        ...

    def endpoint(self) -> str:
        """Where readers dial, after `start`."""
        ...

    def counters(self) -> Mapping[str, int]:
        """What happened so far, by name: connections, pages, refusals, violations. Any thread."""
        ...

    def close(self) -> None:
        """Closes every connection and returns when no thread touches the pool any more and no pin is left."""
        ...


class ReadStatus(StrEnum):
    """How a read ended. Only GOOD leaves bytes that mean anything in the target."""

    GOOD = "good"
    STALE = "stale"
    MISMATCH = "mismatch"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """One page to read. read_id: unique among the reader's pending reads. index, valid_rows, digest: as
    announced. target: the destination page's payload, writable, page_bytes long; the host keeps it pinned
    until `done`."""

    read_id: int
    key: Key
    ticket: bytes
    source: PageName
    index: int
    valid_rows: int
    digest: bytes
    target: memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadDone:
    """The end of a read. digest: of the target's bytes, empty unless GOOD or MISMATCH. detail: one or two
    words for logs, such as "cancelled", "peer lost", "denied". arrived_s, verified_s: when all bytes were in
    the target, and when their digest was compared; None unless GOOD or MISMATCH."""

    read_id: int
    status: ReadStatus
    digest: bytes = b""
    detail: str = ""
    arrived_s: float | None = None
    verified_s: float | None = None


Done = Callable[[ReadDone], None]


class PageReader(Protocol):
    """One transport's destination end, for one peer's pool. No method waits for the peer, except that
    `close` waits for a page under way to end, one stall limit at most."""

    def read(self, request: ReadRequest, done: Done) -> None:
        """Starts a read. `done` is called exactly once, from any thread, and after it the target is quiet.

        Raises ValueError for a target of the wrong size or a read_id that is pending.
        """
        ...

    def cancel(self, read_id: int) -> None:
        """Drops a read that has not begun (`done` with FAILED, "cancelled"); one under way just ends."""
        ...

    def counters(self) -> Mapping[str, int]:
        """What happened so far, by name. Any thread."""
        ...

    def close(self) -> None:
        """Ends every pending read with FAILED. When it returns, no target is touched any more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How a server listens.

    directory: for sockets in the file system; made with mode 0700. host, port: for tcp and nixl; port 0 takes
    a free one. max_connections: more are closed at once. stall_s: seconds in which a hello, or any frame once
    begun, must be through. idle_s: seconds after which a connection without a request is closed.
    max_queued: requests that may wait on one connection. tls: as host; readers must show a certificate.
    """

    directory: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    max_connections: int = 64
    stall_s: float = 10.0
    idle_s: float = 600.0
    max_queued: int = 4096
    tls: TlsSource | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderConfig:
    """What a reader needs to know of its peer.

    endpoint: of the peer's server. pool_id, layout, page_bytes: of the peer's pool. layer_first, layer_last,
    shard: what its pages hold (see `kvtransfer.digest`). stall_s: seconds in which the peer must answer, and
    in which a frame once begun must be through. idle_s: a quiet connection older than this is dialled anew;
    keep it below the server's. tls: for tcp and nixl; the peer must show a certificate for its endpoint's
    host. local: the memory all targets lie in, if they do, for transports that register it; not needed.
    """

    endpoint: str
    pool_id: int
    layout: str
    page_bytes: int
    layer_first: int
    layer_last: int
    shard: int = 0
    stall_s: float = 10.0
    idle_s: float = 300.0
    tls: TlsSource | None = None
    local: memoryview | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """A transport's two factories. Neither connects or listens."""

    server: Callable[[PageSource, ServerConfig], PageServer]
    reader: Callable[[ReaderConfig], PageReader]


def _shm() -> Transport:
    from kvtransfer import mover
    from kvtransfer.shm.reader import ShmPageReader
    from kvtransfer.shm.server import ShmPageServer

    mover.library()  # built now, not at the first page
    return Transport(server=ShmPageServer, reader=ShmPageReader)


def _tcp() -> Transport:
    from kvtransfer import mover
    from kvtransfer.tcp.reader import TcpPageReader
    from kvtransfer.tcp.server import TcpPageServer

    mover.library()
    return Transport(server=TcpPageServer, reader=TcpPageReader)


def _nixl() -> Transport:
    from kvtransfer.nixl.agent import load
    from kvtransfer.nixl.reader import NixlPageReader
    from kvtransfer.nixl.server import NixlPageServer

    load()
    return Transport(server=NixlPageServer, reader=NixlPageReader)


_REGISTRY: dict[str, Callable[[], Transport]] = {"shm": _shm, "tcp": _tcp, "nixl": _nixl}


def register(name: str, factory: Callable[[], Transport]) -> None:
    """Adds a transport; `factory` runs when it is first asked for. Raises ValueError for a taken name."""
    if name in _REGISTRY:
        raise ValueError(f"transport {name} is registered already")
    _REGISTRY[name] = factory


def names() -> tuple[str, ...]:
    """The registered transports."""
    return tuple(_REGISTRY)


def transport(name: str) -> Transport:
    """The transport of that name. Raises ConfigError: it lists the names, or names a missing extra."""
    if name not in _REGISTRY:
        raise ConfigError(f"transport: there is no {name!r}; choose one of {', '.join(_REGISTRY)}.")
    return _REGISTRY[name]()
