"""The router's workers: membership driven by their Join streams, their links, and the model they serve.

What lives here: who is there, how to reach them, fetching the tokenizer. What does not: choosing
among them (`policy`), and what happens to requests when one is lost (told through `on_lost`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pdserve.clock import Clock
from pdserve.config.addresses import is_loopback
from pdserve.errors import PdserveError
from pdserve.obs.logging import fields
from pdserve.rpc.convert import Heartbeat, JoinAnswer, Register
from pdserve.tls import TlsSource
from pdserve.types import ClockOffset, PeerRef, Role, WorkerRecord
from router.config import RouterConfig
from router.links import Links, WorkerLink
from router.membership import Member, Membership, MembershipConfig
from router.model import ServedModel, fetch_model
from router.policy import Candidate, pairing_problems

log = logging.getLogger(__name__)


class Roster:
    """All workers of one router. Owned by the event loop.

    on_lost: called with an incarnation that is gone. on_change: called when new work may have a place, or the
    router's readiness may have changed.
    """

    def __init__(
        self, config: RouterConfig, clock: Clock, router_id: str, secret: bytes, tls: TlsSource | None = None
    ) -> None:
        """secret: the fleet's. tls: our certificate."""
        self._config, self._clock, self._router_id = config, clock, router_id
        self._membership = Membership(
            MembershipConfig(suspect_after_s=config.suspect_after_s, lost_after_s=config.heartbeat_timeout_s)
        )
        self.links = Links(secret, tls)
        self.model: ServedModel | None = None
        self.on_lost: Callable[[int], None] = lambda incarnation: None
        self.on_change: Callable[[], None] = lambda: None
        self.open_streams: set[asyncio.Task[Any]] = set()
        self._streams: dict[int, object] = {}
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="tokenise")
        self._tasks: set[asyncio.Task[None]] = set()
        self._fetching = False
        self.closing = False

    # -- Join streams ----------------------------------------------------------------------------------

    def register(self, event: Register, stream: object) -> JoinAnswer:
        """A worker presents itself on a Join stream."""
        problem = self._address_problem(event.record)
        if problem is not None:
            return self._answer(problem)
        joined = self._membership.register(event.record, event.monotonic_s, self._clock.now())
        if joined.problem is not None:
            return self._answer(joined.problem)
        peer = event.record.peer
        log.info(
            "a worker joined", extra=fields(worker=peer.worker_id, role=event.record.role, at=peer.control)
        )
        self._streams[peer.incarnation] = stream
        self.links.open(event.record)
        if joined.replaced is not None:
            self._lost(joined.replaced)
        self._want_model(event.record)
        self.on_change()
        return self._answer(None)

    def heartbeat(self, record: WorkerRecord, event: Heartbeat) -> JoinAnswer:
        """A sign of life. Not accepted: this incarnation is no member (any more), it must register again."""
        peer = record.peer
        before = self._usable(peer.worker_id, peer.incarnation)
        known = self._membership.heartbeat(
            peer.worker_id, peer.incarnation, event.load, event.monotonic_s, self._clock.now(), event.sample
        )
        if not known:
            return self._answer("This router has given the worker up; register again.")
        if self._usable(peer.worker_id, peer.incarnation) != before:
            self.on_change()
        self._want_model(record)
        return self._answer(None)

    def leave(self, record: WorkerRecord) -> None:
        """The worker said that it goes."""
        gone = self._membership.leave(record.peer.worker_id, record.peer.incarnation)
        if gone is not None:
            self._lost(gone)

    def stream_ended(self, record: WorkerRecord, stream: object) -> None:
        """A Join stream ended without a Leave: the worker is suspect, unless it has a newer stream."""
        if self._streams.get(record.peer.incarnation) is stream:
            del self._streams[record.peer.incarnation]
            self.suspect(record.peer.worker_id, record.peer.incarnation)

    # -- suspicion and loss ----------------------------------------------------------------------------

    def suspect(self, worker_id: str, incarnation: int) -> None:
        """A stream or call to the worker broke: no new work until it is heard again."""
        if self._membership.broken(worker_id, incarnation):
            self.on_change()

    def tick(self) -> None:
        """Gives up on silent workers. Call it every second or faster."""
        for record in self._membership.tick(self._clock.now()):
            self._lost(record)

    def _lost(self, record: WorkerRecord) -> None:
        log.warning("a worker is gone", extra=fields(worker=record.peer.worker_id, role=record.role))
        incarnation = record.peer.incarnation
        self._streams.pop(incarnation, None)
        self.on_lost(incarnation)
        link = self.links.take(incarnation)
        if link is not None:
            self._spawn(link.close())
        self.on_change()

    def now(self) -> float:
        """Our clock."""
        return self._clock.now()

    # -- questions -------------------------------------------------------------------------------------

    def member(self, worker_id: str, incarnation: int) -> Member | None:
        return self._membership.member(worker_id, incarnation)

    def role(self, peer: PeerRef | None) -> Role | None:
        """A worker's role; None for one that is no member any more."""
        member = None if peer is None else self.member(peer.worker_id, peer.incarnation)
        return None if member is None else member.record.role

    def members(self) -> tuple[Member, ...]:
        return self._membership.members()

    def is_suspect(self, member: Member) -> bool:
        return self._membership.is_suspect(member, self._clock.now())

    def candidates(self) -> tuple[Candidate, ...]:
        """The workers as the policy sees them now."""
        now = self._clock.now()
        return tuple(
            Candidate(record=m.record, usable=self._membership.is_usable(m, now)) for m in self.members()
        )

    def clocks(self, *peers: PeerRef | None) -> tuple[ClockOffset, ...]:
        """How far these workers' clocks are from ours now; without those of no members."""
        now = self._clock.now()
        members = [self.member(p.worker_id, p.incarnation) for p in peers if p is not None]
        return tuple(m.clock.estimate(m.record.peer.worker_id, now) for m in members if m is not None)

    def capacity(self) -> int | None:
        """KV rows of the largest empty pool of those that decode; None without any."""
        rows = [m.record.pool_pages * m.record.page_size for m in self._decoders()]
        return max(rows, default=None)

    def is_ready(self) -> bool:
        """Whether a request has a path: the model is known and a decode worker is usable."""
        now = self._clock.now()
        return self.model is not None and any(self._membership.is_usable(m, now) for m in self._decoders())

    def pairing_problems(self) -> tuple[str, ...]:
        records = {m.incarnation: m.record for m in self.members()}
        return pairing_problems(records, self._config.mixing)

    # -- inside ----------------------------------------------------------------------------------------

    def _decoders(self) -> list[Member]:
        return [m for m in self.members() if m.record.role is not Role.PREFILL]

    def _usable(self, worker_id: str, incarnation: int) -> bool:
        member = self._membership.member(worker_id, incarnation)
        return member is not None and self._membership.is_usable(member, self._clock.now())

    def _address_problem(self, record: WorkerRecord) -> str | None:
        host = record.peer.control.rpartition(":")[0]
        if self._config.insecure or self._config.tls_ca or is_loopback(host):
            return None
        return "The worker's address is not loopback: give the router TLS, or --insecure to allow that."

    def _answer(self, problem: str | None) -> JoinAnswer:
        return JoinAnswer(router_id=self._router_id, accepted=problem is None, problem=problem or "")

    def _want_model(self, record: WorkerRecord) -> None:
        """Fetches the model's text side if this worker serves another one than we know."""
        if self._fetching or (
            self.model is not None and self.model.digest == record.capability.tokenizer
            and self.model.info.model_digest == record.capability.model
        ):  # fmt: skip
            return
        link = self.links.get(record.peer.incarnation)
        if link is not None:
            self._fetching = True
            self._spawn(self._fetch(link))

    async def _fetch(self, link: WorkerLink) -> None:
        try:
            self.model = await fetch_model(link, self._pool, self._config.tool_format)
            log.info("serving model %s", self.model.name)
        except PdserveError as error:
            # The next heartbeat, of this worker or another, tries again.
            log.warning("a worker's tokenizer could not be fetched: %s", error.message)
        finally:
            self._fetching = False
        self.on_change()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Ends all Join streams and closes all links; no call runs on afterwards."""
        self.closing = True
        tasks = {*self._tasks, *self.open_streams}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.links.close_all()
        self._pool.shutdown(wait=False, cancel_futures=True)
