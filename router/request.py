"""One request under way: feeds its lifecycle, carries out the effects, and gives the client its stream.

Everything runs on the event loop; `apply` takes an event and has carried out its effects when it returns.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pdserve.api import Admitted, Chunk, End, Explanation, StreamEvent, Timings
from pdserve.clock import Clock
from pdserve.messages import PrefillRequest, Report, Reserve, Reserved, Token
from pdserve.rpc.status import error_from_label
from pdserve.types import Ledger, PeerRef, Role
from router import events as ev
from router.admission import Waiting
from router.calls import LOST_MESSAGE, Calls, Tasks
from router.dispatch import Dispatcher
from router.explain import progress, told_by, waiting_for
from router.ledger import Journal, assemble
from router.lifecycle import step
from router.metrics import RouterMetrics
from router.output import Output
from router.request_state import RequestState
from router.roster import Roster
from router.run_metrics import RunMetrics
from router.tickets import TicketMint
from router.validate import ValidRequest

SETTLE_S = 1.0
"""How long a decode worker may take to report after a stop text before the stream ends without its ledger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What every request works with."""

    roster: Roster
    dispatcher: Dispatcher
    tasks: Tasks
    tickets: TicketMint
    metrics: RouterMetrics
    clock: Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What all runs of one client's request share. tenant: from the authenticator, never from the request.
    cache_salt: see `pdserve.messages.Reserve`. trace: metadata for workers, so that it stays one trace."""

    tenant: str
    arrival: int
    started_at: float
    deadline_at: float
    cache_salt: str = ""
    trace: tuple[tuple[str, str], ...] = ()


class RequestRun:
    """One completion of a valid request; `stream` submits it and must be closed (aclosing)."""

    def __init__(
        self,
        services: Services,
        request_id: str,
        request: ValidRequest,
        output: Output,
        shared: Shared,
        *,
        part: bool = False,
        pinned: PeerRef | None = None,
    ) -> None:
        """part: another run of the request has computed its prompt, and is counted for it. pinned: on this
        decode worker."""
        self._services, self._request, self._output = services, request, output
        self.tenant, self._shared = shared.tenant, shared
        self._part = part
        self.pinned = None if pinned is None else pinned.incarnation
        self._state = RequestState(
            request_id=request_id,
            prompt=request.token_ids,
            max_tokens=request.sampling.max_tokens,
            stop_ids=request.stop_ids,
        )
        self._calls = Calls(services.roster, services.tasks, self.apply, shared.trace)
        self._todo: deque[ev.Event] = deque()
        self._busy = False
        self._wake = asyncio.Event()
        self._end: ev.EndStream | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ticket: bytes | None = None
        self._queued_at = services.clock.now()
        self._started_at, self._deadline_at = shared.started_at, shared.deadline_at
        self._times = RunMetrics(
            services.metrics, part=part, started_at=self._started_at, queued_at=self._queued_at
        )
        self._journal = Journal(
            came_at=self._started_at, queued_at=self._queued_at, waiting_since=self._queued_at
        )
        self._told: Ledger | None = None
        self._peers: tuple[PeerRef | None, PeerRef | None] = (None, None)
        self._ended_at: float | None = None

    # -- for the dispatcher ----------------------------------------------------------------------------

    @property
    def request_id(self) -> str:
        return self._state.request_id

    @property
    def waiting(self) -> Waiting:
        """This request as the queue sees it."""
        return Waiting(
            request_id=self.request_id,
            priority=self._request.priority,
            arrival=self._shared.arrival,
            tokens=len(self._state.prompt) + len(self._state.delivered),
            queued_at=self._queued_at,
            deadline_at=self._deadline_at,
            tried=self._state.num_tries > 0 or self._part,
            tenant=self.tenant,
        )

    @property
    def avoid(self) -> frozenset[int]:
        return self._state.avoid

    @property
    def mode(self) -> str:
        """Who computed its prompt, as metrics say it; before its first token that is not known."""
        return self._times.mode

    @property
    def decode_worker(self) -> PeerRef | None:
        """Who made its last token, or is to make its first."""
        return self._peers[0]

    # -- for the client --------------------------------------------------------------------------------

    async def stream(self) -> AsyncIterator[StreamEvent]:
        """Submits the request, yields its events; closing early cancels. Raises what the request ends in."""
        loop = asyncio.get_running_loop()
        self._services.dispatcher.submit(self)
        remaining = self._deadline_at - self._services.clock.now()
        self._timer = loop.call_later(max(remaining, 0.0), self.apply, ev.DeadlineHit())
        try:
            yield Admitted(
                request_id=self.request_id,
                client_request_id=self._request.client_request_id,
                prompt_tokens=len(self._state.prompt),
            )
            while (chunk := await self._next_chunk()) is not None:
                yield chunk
            end = self._result()
            yield self._output.end(end.finish_reason)
            yield end
        finally:
            self.apply(ev.ClientGone())

    async def _next_chunk(self) -> Chunk | None:
        """All tokens that came since the last chunk; None when the stream has ended."""
        while not self._output.waits:
            if self._end is not None:
                return None
            self._wake.clear()
            await self._wake.wait()
        return self._output.take()

    def _result(self) -> End:
        end = self._end
        assert end is not None
        if end.finish is None:
            raise error_from_label(end.label, end.message, retry_after_s=end.retry_after_s)
        return End(
            finish_reason=end.finish,
            usage=end.usage,
            timings=self._timings(),
            ledger=end.ledger,
            epochs=end.epochs,
        )

    def _timings(self) -> Timings:
        now = self._services.clock.now()
        return Timings(
            queue_s=max(0.0, self._times.tried_at - self._queued_at),
            tokenise_s=self._queued_at - self._started_at,
            ttft_s=max(0.0, self._times.first_at - self._started_at),
            total_s=now - self._started_at,
        )

    # -- events and effects ----------------------------------------------------------------------------

    def apply(self, event: ev.Event) -> None:
        """Takes one event, and whatever its effects bring about at once."""
        if isinstance(event, Token) and event.ledger is not None:
            self._told = event.ledger
        if isinstance(event, Reserved):
            self._services.dispatcher.reserved(event.key, event.hit_tokens)
        self._todo.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._todo:
                for effect in step(self._state, self._todo.popleft()):
                    _DO[type(effect)](self, effect)
        finally:
            self._busy = False

    def _send_reserve(self, effect: ev.SendReserve) -> None:
        services, request = self._services, self._request
        now = services.clock.now()
        self._times.tried(now, first=effect.key.epoch == 0)
        self._journal.sent(now)
        self._peers = (effect.decode, effect.prefill)
        services.dispatcher.count(
            effect.key,
            decode=effect.decode,
            prefill=effect.prefill,
            tokens=0 if effect.decode.incarnation == self.pinned else len(effect.token_ids),
            rows=len(self._state.prompt) + request.sampling.max_tokens,
        )
        remaining = max(0.0, self._deadline_at - now)
        self._ticket = ticket = self._mint(effect, now, remaining)
        if ticket is None:
            lost = ev.DecodeBroken(key=effect.key, label="worker_lost", message=LOST_MESSAGE)
            self._todo.append(lost)
            return
        message = Reserve(
            key=effect.key,
            receiver_incarnation=effect.decode.incarnation,
            ticket=ticket,
            token_ids=effect.token_ids,
            num_forced=effect.num_forced,
            sampling=request.sampling,
            tenant=self.tenant,
            mode=effect.mode,
            prefill=effect.prefill,
            deadline_s=remaining,
            priority=request.priority,
            use_prefix_cache=request.use_prefix_cache,
            trace_id=request.trace_id,
            cache_salt=self._shared.cache_salt,
        )
        self._calls.reserve(effect.decode, message, remaining + services.tickets.lease_s)

    def _mint(self, effect: ev.SendReserve, now: float, remaining: float) -> bytes | None:
        """The try's ticket; None if a worker is no member any more."""
        roster = self._services.roster
        decode = roster.member(effect.decode.worker_id, effect.decode.incarnation)
        peer = effect.prefill
        prefill = None if peer is None else roster.member(peer.worker_id, peer.incarnation)
        if decode is None or (peer is not None and prefill is None):
            return None
        return self._services.tickets.ticket(
            effect,
            decode=decode,
            prefill=prefill,
            sampling=self._request.sampling,
            tenant=self.tenant,
            now=now,
            remaining_s=remaining,
            cache_salt=self._shared.cache_salt,
        )

    def _send_prefill(self, effect: ev.SendPrefill) -> None:
        if self._ticket is None:
            return  # the try is already lost, see _send_reserve
        request = self._request
        remaining = max(0.0, self._deadline_at - self._services.clock.now())
        message = PrefillRequest(
            key=effect.key,
            receiver_incarnation=effect.prefill.incarnation,
            ticket=self._ticket,
            token_ids=effect.token_ids,
            num_forced=effect.num_forced,
            sampling=request.sampling,
            tenant=self.tenant,
            decode=effect.decode,
            deadline_s=remaining,
            priority=request.priority,
            use_prefix_cache=request.use_prefix_cache,
            trace_id=request.trace_id,
            cache_salt=self._shared.cache_salt,
        )
        self._calls.prefill(effect.prefill, message, remaining + self._services.tickets.lease_s)

    def _emit(self, effect: ev.Emit) -> None:
        services, state, now = self._services, self._state, self._services.clock.now()
        role: Role | None = None
        if not self._times.first_at:
            assert state.key is not None
            services.dispatcher.inflight.computed(state.key)
            self._journal.token(self._told, now, services.roster.clocks(*self._peers))
            role = services.roster.role(self._peers[0])
        self._times.token(now, state.mode, role)
        self._output.push(effect.token_id, effect.logprob)
        if self._output.stopped:
            self._todo.append(ev.StopMatched())
        self._wake.set()

    def _cancel_decode(self, effect: ev.CancelDecode) -> None:
        self._calls.cancel_decode(effect.decode, effect.key, keep_stream=effect.keep_stream)
        if effect.keep_stream:
            asyncio.get_running_loop().call_later(SETTLE_S, self.apply, ev.StopSettled())

    def _requeue(self, effect: ev.Requeue) -> None:
        if effect.blocked is None:
            self._services.metrics.retries.inc()
        self._journal.requeued(self._services.clock.now())
        self._services.dispatcher.requeue(self, effect)

    def _end_stream(self, effect: ev.EndStream) -> None:
        self._ended_at = now = self._services.clock.now()
        told = effect.ledger if effect.ledger.spans else self._told or effect.ledger
        self._end = replace(effect, ledger=self._whole(told, now))
        if self._timer is not None:
            self._timer.cancel()
        if effect.finish is not None:
            self._output.finish()
        self._times.ended(self._end, ignored=self._state.num_ignored, first_try=self._journal.path_tries == 1)
        self._wake.set()

    def _whole(self, told: Ledger, now: float) -> Ledger:
        """What everybody did so far, by our clock."""
        return assemble(self._journal, told, self._services.roster.clocks(*self._peers), now)

    async def ask_workers(self) -> dict[str, Report]:
        """What those who have the request say of it, by worker."""
        key, peers = self._state.key, [peer for peer in self._peers if peer is not None]
        if key is None:
            return {}
        answers = await asyncio.gather(*(self._calls.report(peer, key) for peer in peers))
        return {p.worker_id: report for p, report in zip(peers, answers, strict=True) if report is not None}

    def explain(self, reports: Mapping[str, Report] | None = None) -> Explanation:
        """Where the time went so far, and what is waited for. reports: of its workers, just asked for."""
        now, end = self._services.clock.now(), self._end
        decode, prefill = self._peers
        outcome = "" if end is None else end.finish or end.label
        ledger = self._whole(told_by(reports or {}, self._told), now) if end is None else end.ledger
        return Explanation(
            request_id=self.request_id,
            state=str(self._state.phase),
            client_request_id=self._request.client_request_id,
            waiting_for=waiting_for(self._state, self._services.dispatcher.why, reports or {}),
            outcome=str(outcome),
            message=end.message if end is not None else "",
            prefill_worker=ledger.prefill_worker or (prefill.worker_id if prefill is not None else ""),
            decode_worker=ledger.decode_worker or (decode.worker_id if decode is not None else ""),
            usage=progress(self._state) if end is None else end.usage,
            max_tokens=self._state.max_tokens,
            epochs=self._state.next_epoch,
            age_s=now - self._started_at,
            total_s=0.0 if self._ended_at is None else self._ended_at - self._started_at,
            ledger=ledger,
        )


_DO: dict[type, Callable[[RequestRun, Any], None]] = {
    ev.SendReserve: RequestRun._send_reserve,
    ev.SendPrefill: RequestRun._send_prefill,
    ev.CancelDecode: RequestRun._cancel_decode,
    ev.CancelPrefill: lambda run, e: run._calls.cancel_prefill(e.prefill, e.key),
    ev.Rebind: lambda run, e: run._todo.append(run._services.dispatcher.rebind(e)),
    ev.SwitchLocal: lambda run, e: run._calls.switch_local(e.decode, e.key),
    ev.Emit: RequestRun._emit,
    ev.ReleaseDecode: lambda run, e: run._services.dispatcher.release_decode(e.key),
    ev.ReleasePrefill: lambda run, e: run._services.dispatcher.release_prefill(e.key),
    ev.Requeue: RequestRun._requeue,
    ev.LeaveQueue: lambda run, e: run._services.dispatcher.leave(run.request_id),
    ev.EndStream: RequestRun._end_stream,
}
