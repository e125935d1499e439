"""The ranks of one replica as a group that exchanges tensors: over gloo on CPUs, over NCCL on GPUs.

What lives here: opening a group and its collectives, each with a time limit and typed errors. What does not:
what is exchanged (`columns`, `linears`), processes and liveness (`pdserve.ranks`).

Addresses: the ranks meet in a file in the replica's private directory, so that no store listens anywhere.
gloo binds where its device is told, which is the replica's own address (loopback by default); without a
device of ours it would take the address that the host's name resolves to, or GLOO_SOCKET_IFNAME's.

A group that failed once stays broken: some of its ranks may have gone on with other data.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from pdserve.errors import ConfigError, WorkerLost

TIMEOUT_S = 30.0
"""A collective that takes longer is over: far more than any step, far less than a lease of hours."""
_torch: Any = dist  # its stubs leave some of its public names out
_GONE = "a rank of this replica is gone; it starts again"
LATE = "a rank of this replica did not answer in time; it starts again"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """How a rank finds the others. meeting: a file that only they know, in a private directory, not there
    yet. host: the replica's own address. timeout_s: of meeting, and of every collective; seconds.
    """

    rank: int
    size: int
    meeting: Path
    host: str = "127.0.0.1"
    timeout_s: float = TIMEOUT_S
    backend: str = "gloo"


@dataclass(slots=True)
class Traffic:
    """What collectives took so far. num_bytes: of this rank's own tensors, not the wire apart; of an
    all-to-all only what went to others.
    """

    num_calls: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


class Group(Protocol):
    """What parallel layers need of their group. Every rank makes the same calls in the same order, from one
    thread; each call blocks. All raise WorkerLost when a rank is gone or too late.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def kind(self) -> str:
        """Names how sums are ordered; part of the numerics id where ranks add."""
        ...

    def add(self, x: torch.Tensor) -> None:
        """Replaces x, contiguous, by the sum over all ranks. The order of adding may depend on the place in x
        where there are more than two ranks."""
        ...

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's x, [size, *x.shape], on all of them. x: contiguous, of one shape and dtype."""
        ...

    def gather_first(self, x: torch.Tensor) -> torch.Tensor | None:
        """The same on rank 0 alone; None on the others."""
        ...

    def all_to_all(self, x: torch.Tensor, counts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Rows change ranks. counts[r][s]: rows that rank r sends to rank s, the same on all ranks.

        x: [rows to rank 0, rows to rank 1, …] in that order, contiguous, with rows of one shape and dtype on
        all ranks. Returns [rows from rank 0, rows from rank 1, …].
        """
        ...


def row_bytes(x: torch.Tensor) -> int:
    """Bytes of one row, whether or not there is any."""
    return math.prod(x.shape[1:]) * x.itemsize


def sent_away(counts: Sequence[Sequence[int]], rank: int) -> int:
    """Rows of an all-to-all that the rank sends to others."""
    return sum(counts[rank]) - counts[rank][rank]


def received(x: torch.Tensor, counts: Sequence[Sequence[int]], rank: int) -> torch.Tensor:
    """Room for what an all-to-all brings the rank."""
    assert x.is_contiguous()
    assert x.shape[0] == sum(counts[rank])
    return x.new_empty(sum(of_rank[rank] for of_rank in counts), *x.shape[1:])


class TorchGroup:
    """A `Group` over torch.distributed. Nothing global is set up: several can live in one process."""

    def __init__(self, backend: Any, config: GroupConfig) -> None:
        """backend: a process group of torch with the limit already in it; see `open_group`."""
        self.traffic = Traffic()
        self._backend = backend
        self._config = config
        self._broken = False

    @property
    def rank(self) -> int:
        return self._config.rank

    @property
    def size(self) -> int:
        return self._config.size

    @property
    def kind(self) -> str:
        return self._config.backend

    def add(self, x: torch.Tensor) -> None:
        """See Group."""
        self._run(x.nbytes, lambda: self._backend.allreduce([x]))

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """See Group. Bytes are moved: any dtype goes."""
        raw = _raw(x)
        out = raw.new_empty(self.size * raw.shape[0])
        self._run(x.nbytes, lambda: self._backend._allgather_base(out, raw))
        return out.view(x.dtype).view(self.size, *x.shape)

    def gather_first(self, x: torch.Tensor) -> torch.Tensor | None:
        """See Group."""
        raw = _raw(x)
        options = dist.GatherOptions()
        options.rootRank = 0
        parts = raw.new_empty(self.size, raw.shape[0]) if self.rank == 0 else None
        outputs = [] if parts is None else [list(parts.unbind())]
        self._run(x.nbytes, lambda: self._backend.gather(outputs, [raw], options))
        return None if parts is None else parts.view(x.dtype).view(self.size, *x.shape)

    def all_to_all(self, x: torch.Tensor, counts: Sequence[Sequence[int]]) -> torch.Tensor:
        """See Group. Nobody is asked where no rank has a row for another."""
        out = received(x, counts, self.rank)
        if not any(sent_away(counts, rank) for rank in range(self.size)):
            return out.copy_(x)
        row = row_bytes(x)
        gives = [row * count for count in counts[self.rank]]
        gets = [row * of_rank[self.rank] for of_rank in counts]
        away = sent_away(counts, self.rank) * row
        self._run(away, lambda: self._backend.alltoall_base(_raw(out), _raw(x), gets, gives))
        return out

    def close(self) -> None:
        """Leaves the group; peers that still wait for us get an error."""
        self._broken = True
        self._backend = None

    def _run(self, num_bytes: int, start: Any) -> None:
        if self._broken:
            raise WorkerLost(_GONE)
        began = time.perf_counter()
        try:
            start().wait()
        except RuntimeError as error:
            self._broken = True
            late = "timed out" in str(error).lower()
            raise WorkerLost(LATE if late else _GONE) from error
        self.traffic.num_calls += 1
        self.traffic.num_bytes += num_bytes
        self.traffic.seconds += time.perf_counter() - began


def _raw(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).view(torch.uint8)


def open_group(config: GroupConfig) -> TorchGroup:
    """Meets the other ranks; blocks until all are there. Raises WorkerLost if they do not come in time, and
    ConfigError for a backend that this torch does not have."""
    if config.backend not in _BACKENDS:
        raise ConfigError(f"parallel backend {config.backend!r} is not known; use {' or '.join(_BACKENDS)}")
    limit = datetime.timedelta(seconds=config.timeout_s)
    store = _torch.FileStore(str(config.meeting), config.size)
    store.set_timeout(limit)
    try:
        return TorchGroup(_BACKENDS[config.backend](store, config, limit), config)
    except RuntimeError as error:
        raise WorkerLost("the ranks of this replica did not meet in time; it starts again") from error


def _gloo(store: Any, config: GroupConfig, limit: datetime.timedelta) -> Any:
    gloo = _torch.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=config.host)]
    options._timeout = limit
    options._threads = 1  # collectives follow one another: more threads would only wait
    return gloo(store, config.rank, config.size, options)


def _nccl(store: Any, config: GroupConfig, limit: datetime.timedelta) -> Any:
    if not dist.is_nccl_available():
        raise ConfigError("parallel backend 'nccl' needs a torch that was built with CUDA; use gloo")
    nccl = _torch.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = limit
    return nccl(store, config.rank, config.size, options)


_BACKENDS = {"gloo": _gloo, "nccl": _nccl}
