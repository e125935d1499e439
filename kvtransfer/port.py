"""What a role's driver needs of the worker process it lives in, so that roles do not import the host.

What lives here: the `WorkerPort` protocol and the shape of a role driver. What does not: any implementation
(`pdserve.worker.host` is the one in production).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from kvtransfer.effects import Effect
from kvtransfer.session.guard import RoleContext
from pdserve.kvcache.layout import PageLayout
from pdserve.kvcache.manager import PageManager
from pdserve.kvcache.pool import KVPool
from pdserve.obs.catalogue.kinds import Metric
from pdserve.obs.work import Works
from pdserve.rpc.server import RpcServer
from pdserve.sched.plan import StepPlan, StepResult
from pdserve.sched.scheduler import StepScheduler
from pdserve.structured.worker import WorkerGrammars
from pdserve.tls import TlsSource
from pdserve.types import PeerRef

BETWEEN_RANKS = ";"
"""Between the endpoints of several ranks in a PeerRef."""

E = TypeVar("E", bound=Effect)
Input = Callable[[float], list[Effect]]
AfterStep = Callable[[StepPlan, StepResult], Input]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """The parts of a worker that all its roles share. Pages and scheduler belong to the control thread.

    pools: of every rank, by rank, with the same page ids; all are mapped here. layout, pool: rank 0's. works:
    what is told of calls that are over.
    """

    context: RoleContext
    pools: tuple[KVPool, ...]
    pages: PageManager
    scheduler: StepScheduler
    transports: tuple[str, ...]
    host: str
    host_id: str
    run_dir: str
    grammars: WorkerGrammars
    tls: TlsSource | None = None
    works: Works = field(default_factory=Works)

    @property
    def pool(self) -> KVPool:
        """Our own pool, rank 0's."""
        return self.pools[0]

    @property
    def layout(self) -> PageLayout:
        """How its pages are laid out."""
        return self.pools[0].layout

    @property
    def page_bytes(self) -> int:
        """Payload of a page, over all ranks."""
        return sum(pool.layout.page_bytes for pool in self.pools)


class WorkerPort(Protocol):
    """The worker process as its role drivers see it."""

    @property
    def parts(self) -> WorkerParts:
        """Shared parts; constant."""
        ...

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The control thread's loop."""
        ...

    @property
    def lock(self) -> threading.Lock:
        """Held while the core changes; other threads take it for a moment to pin a page."""
        ...

    def feed(self, make: Input) -> None:
        """Runs an input of the core now and carries its effects out. Control thread only."""
        ...

    def feed_soon(self, make: Input) -> None:
        """The same from any thread, in the order of the calls."""
        ...

    def count(self, name: str, amount: int = 1) -> None:
        """Adds to a counter: nothing is dropped silently. Control thread only."""
        ...

    def measure(self, metric: Metric, value: float = 1.0, labels: tuple[str, ...] = ()) -> None:
        """What the effect `Measure` does, at once. Control thread only."""
        ...

    def on(self, effect: type[E], handler: Callable[[E], None]) -> None:
        """Names the one handler of an effect type. Handlers must not block and must not call feed."""
        ...

    def after_step(self, hook: AfterStep) -> None:
        """Calls hook on the compute thread after each step, before anybody hears of it: its time is the next
        step's. What it returns is an input right before the step's result; what it raises is logged."""
        ...


class RoleDriver(Protocol):
    """One role of a worker, with its gRPC services and its side of the data plane."""

    @property
    def role(self) -> Any:
        """The pure role (pdserve.worker.core.Role)."""
        ...

    def services(self, server: RpcServer) -> tuple[str, ...]:
        """Adds its servicers before the server starts; returns their full names."""
        ...

    async def start(self, control: str) -> dict[str, str]:
        """Starts data-plane ends; control is host:port of our gRPC. Returns endpoints by transport."""
        ...

    async def stop(self) -> None:
        """Closes everything it opened. No page is touched when it returns."""
        ...


def pick_transport(
    ours: tuple[str, ...], host_id: str, peer: PeerRef, *, rank: int = 0, num_ranks: int = 1
) -> tuple[str, str] | None:
    """(name, endpoint) of the first of our transports that the peer offers and that can reach it, or None.

    rank, num_ranks: whose end it is, where the peer has several ranks.
    """
    offered = {"shm": peer.shm if peer.host_id == host_id else "", "tcp": peer.tcp, "nixl": peer.nixl}
    for name in ours:
        if ends := offered.get(name):
            found = ends.split(BETWEEN_RANKS) if num_ranks > 1 else [ends]
            return (name, found[rank]) if len(found) == num_ranks else None
    return None
