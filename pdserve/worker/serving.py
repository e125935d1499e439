"""What runs on a worker's control thread: core and driver, roles, gRPC server, membership.

What lives here: wiring and life cycle on the loop. What does not: threads and process (`host`), decisions.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

from kvtransfer.port import RoleDriver
from pdserve.api import ExpertReport
from pdserve.config.addresses import is_loopback
from pdserve.kvcache.allocator import PageState
from pdserve.messages import Report
from pdserve.obs.tally import Sums
from pdserve.obs.vllm import VllmFacts
from pdserve.parallel.coverage import Coverage
from pdserve.ranks.rebalancing import Rebalancing
from pdserve.ranks.runner import ParallelRunner
from pdserve.rpc.convert import WorkerState
from pdserve.rpc.guard import AccessGuard
from pdserve.rpc.server import RpcServer, ServerOptions
from pdserve.rpc.v1 import cluster_pb2_grpc
from pdserve.types import REBALANCE_OUTCOMES, Key, PeerRef, WorkerLoad, WorkerRecord
from pdserve.worker.core import WorkerCore
from pdserve.worker.driver import Driver
from pdserve.worker.engine import Engine
from pdserve.worker.expert_keeper import ExpertKeeper
from pdserve.worker.experts import ExpertWatch
from pdserve.worker.front import Front
from pdserve.worker.membership import Membership
from pdserve.worker.metrics import Figures, WorkerMetrics
from pdserve.worker.roles import load_roles
from pdserve.worker.services import SERVICE, WorkerServicer

STUCK_AFTER_S = 5.0
"""A step that takes longer makes the worker unready (reliability.md, health)."""
MAX_MESSAGE_BYTES = 16 << 20
LOOK_EVERY_S = 10.0
"""Between two looks at the loads of ranks and experts, which take a moment."""


class Serving:
    """A worker's event-loop side. All methods belong to the control thread."""

    def __init__(
        self,
        engine: Engine,
        compute: ThreadPoolExecutor,
        on_fatal: Callable[[BaseException], None],
        on_retire: Callable[[str], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        parts = engine.parts
        self._engine = engine
        self._driver = Driver(loop, parts, engine.runner, compute, on_fatal, on_retire)
        self._roles: tuple[RoleDriver, ...] = load_roles(engine.config.role, self._driver)
        self._core = WorkerCore(
            parts.pages, parts.scheduler, [r.role for r in self._roles], max_gap_s=parts.context.gap_s
        )
        self._driver.core = self._core
        options = ServerOptions(
            host=parts.host,
            insecure=parts.tls is None and not is_loopback(parts.host),  # the fleet has checked it
            max_message_bytes=MAX_MESSAGE_BYTES,
            tls=parts.tls,
        )
        self._server = RpcServer(options, interceptors=[AccessGuard(parts.context.secret)])
        self._compute = compute
        self._experts = _watch(engine)
        self._keeper = ExpertKeeper(
            parts.context.worker_id, self._experts, _rebalancing(engine), self._idle_step,
            least_gain=engine.config.rebalance_gain,
        )  # fmt: skip
        self._imbalance, self._loss, self._looked_at = 0.0, 0.0, float("-inf")
        self._membership: Membership | None = None
        self._front = Front.of(engine.config, parts)
        names = _vllm_facts(engine) if engine.config.vllm_metrics else None
        self._metrics = WorkerMetrics(engine.config.role, self._figures, loop, names)
        self.record: WorkerRecord = self._record("", {})

    async def start(self) -> None:
        """Listens, opens the data plane and dials the routers."""
        parts, config = self._engine.parts, self._engine.config
        scraped = ""
        if config.metrics_port is not None:
            scraped = self._metrics.start(parts.host, config.metrics_port)
        names = [name for role in self._roles for name in role.services(self._server)]
        servicer = WorkerServicer(
            self._engine.model.tokenizer, self.state, self.drain, self.report,
            self._expert_report, lambda: self._keeper.rebalance(self._driver.loop.time()),
        )  # fmt: skip
        cluster_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, self._server.server)
        await self._server.start(*names, SERVICE)
        endpoints: dict[str, str] = {}
        for role in self._roles:
            endpoints |= await role.start(self._server.address)
        self.record = replace(self._record(self._server.address, endpoints), metrics=scraped)
        own = () if self._front is None else (await self._front.start(),)
        self._membership = Membership(
            (*config.routers, *own), parts.context.secret, self.record, self.load, parts.tls
        )
        self._membership.start()
        self._keeper.start()
        self._driver.feed(lambda now: [])  # from here on a silence of our own is noticed

    async def drain(self, timeout_s: float) -> int:
        """Refuses new requests; returns how many live ones are left at the limit. Pages that a peer still
        reads count as one more: they must be out before this process ends."""
        if self._front is not None:
            self._front.drain()
        self._core.drain()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._driver.until(lambda: self._core.drained), timeout_s)
        return 0 if self._core.drained else max(1, self._core.num_live)

    async def stop(self) -> None:
        """Leaves the routers, ends calls, closes the data plane."""
        await asyncio.gather(self._keeper.stop(), self._metrics.stop())
        if self._membership is not None:
            await self._membership.stop()
        if self._front is not None:
            await self._front.stop()
        await self._server.stop()
        for role in self._roles:
            await role.stop()
        self._driver.close()
        await asyncio.to_thread(self._engine.parts.works.close)

    def load(self) -> WorkerLoad:
        """What the heartbeat says."""
        pages, scheduler = self._engine.parts.pages, self._engine.parts.scheduler
        counts, evictable = pages.counts(), pages.num_evictable
        now = self._driver.loop.time()
        self._look_at_experts(now)
        stuck = self._core.busy and now - self._driver.last_step_at > STUCK_AFTER_S
        with self._driver.lock:
            ages = pages.ages(now)
        return WorkerLoad(
            num_pages=pages.num_pages,
            free_pages=counts[PageState.FREE],
            evictable_pages=evictable,
            reserved_pages=counts[PageState.RESERVED],
            filling_pages=counts[PageState.FILLING],
            sealed_pages=counts[PageState.SEALED] - evictable,  # a page counts in one state only
            retiring_pages=counts[PageState.RETIRING],
            quarantined_pages=counts[PageState.QUARANTINED],
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            waiting_tokens=scheduler.waiting_tokens,
            draining=self._core.draining,
            page_ages=ages,
            transfer_pages=pages.allocator.transfer_pages,
            peak_transfer_pages=pages.allocator.peak_transfer_pages,
            ready=not stuck and not self._core.over_quarantine,
            expert_balance_loss=self._loss,
            **self._rebalances(now),
        )

    def _figures(self) -> tuple[Figures, list[Sums]]:
        """What a scrape of the metrics tells."""
        parts = self._engine.parts
        leases = [role.role.leases for role in self._roles]
        figures = Figures(
            load=self.load(), page_bytes=parts.page_bytes, num_evicted=parts.pages.num_evicted,
            leases=sum(keys for keys, _ in leases), credits=sum(pages for _, pages in leases),
        )  # fmt: skip
        return figures, self._driver.sums.copy()

    def _look_at_experts(self, now: float) -> None:
        self._experts.note(now)
        if not (self._loss and self._imbalance) or now >= self._looked_at + LOOK_EVERY_S:
            self._imbalance, self._looked_at = self._experts.imbalance(now), now
            self._loss = self._experts.balance_loss(now)

    def _rebalances(self, now: float) -> dict[str, Any]:
        """Those fields of the load that tell of experts."""
        status = self._keeper.status
        if status is None:
            return {}
        return {
            **{f"rebalances_{name}": status.outcomes.get(name, 0) for name in REBALANCE_OUTCOMES},
            "expert_copied_bytes": status.copied_bytes,
            "expert_imbalance": self._imbalance,
            "lost_ranks": len(self._lost()),
        }

    def _lost(self) -> frozenset[int]:
        """Ranks that the worker goes on without; known before its next step."""
        runner = self._engine.runner
        return runner.lost if isinstance(runner, ParallelRunner) else frozenset()

    def _expert_report(self) -> ExpertReport:
        status = self._keeper.status
        if status is not None:
            now = Coverage(table=status.table, lost=self._lost())
            self._experts.moved(now.masked if now.lost and not now.uncovered else status.served)
        report = self._experts.report(self._driver.loop.time())
        last = "" if status is None else status.last
        return replace(report, rebalancing=self._keeper.busy, last_rebalance=last)

    async def _idle_step(self) -> None:
        runner = self._engine.runner
        if not self._core.busy and isinstance(runner, ParallelRunner):
            await asyncio.wrap_future(self._compute.submit(runner.idle_step))

    def report(self, key: Key) -> Report | None:
        """What is known of a live key."""
        return self._core.report(key, self._driver.loop.time())

    def state(self, check: bool = True) -> WorkerState:
        """The answer to GetWorkerStatus. check: prove the pool's integrity too, page by page."""
        with self._driver.lock:  # page servers pin from threads of their own
            problem = self._core.check_integrity() if check else ""
        return WorkerState(
            record=self.record, load=self.load(), integrity_problem=problem, idle=self._core.idle,
            live=self._core.num_live, closing=self._core.num_closing, tombstones=self._core.num_tombstones,
            counters=dict(self._driver.counters),
        )  # fmt: skip

    async def describe(self) -> dict[str, Any]:
        """State, counters and what is joined, as plain data."""
        state = self.state()
        return {
            "load": asdict(state.load),
            "integrity_problem": state.integrity_problem,
            "idle": state.idle,
            "live": self._core.num_live,
            "counters": dict(self._driver.counters),
            "routers": sorted(self._membership.joined) if self._membership else [],
        }

    def _record(self, control: str, endpoints: dict[str, str]) -> WorkerRecord:
        parts = self._engine.parts
        peer = PeerRef(
            worker_id=parts.context.worker_id,
            incarnation=parts.context.incarnation,
            control=control,
            host_id=parts.host_id,
            shm=endpoints.get("shm", ""),
            tcp=endpoints.get("tcp", ""),
            nixl=endpoints.get("nixl", ""),
            layout=parts.context.layout,
            numerics=parts.context.numerics,
        )
        return WorkerRecord(
            peer=peer,
            role=self._engine.config.role,
            capability=self._engine.capability(),
            limits=self._engine.limits,
            model_name=self._engine.model.name,
            pool_pages=parts.pages.num_pages,
            page_size=parts.layout.page_size,
            pid=os.getpid(),
        )


def _vllm_facts(engine: Engine) -> VllmFacts:
    """What vLLM's names for our metrics tell besides."""
    pages, size = engine.parts.pages.num_pages, engine.parts.layout.page_size
    return VllmFacts(model=engine.model.name, kv_usage=0.0, page_size=size, num_pages=pages)


def _rebalancing(engine: Engine) -> Rebalancing | None:
    return engine.runner.rebalancing if isinstance(engine.runner, ParallelRunner) else None


def _watch(engine: Engine) -> ExpertWatch:
    config, load = engine.model.config, engine.runner.expert_load
    layers = [layer for layer in range(config.num_layers) if config.has_experts(layer)]
    counts = None if load is None else load.counts_LX
    rebalancing = _rebalancing(engine)
    table = None if rebalancing is None else rebalancing.status.table
    spread = None if load is None else (load.chosen_LX, load.probs_LX)
    return ExpertWatch(engine.parts.context.worker_id, counts, layers, engine.config.tp, table, spread)
