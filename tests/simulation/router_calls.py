"""The router's calls to workers: streams that break, control calls that may fail. The router's side of
`calls`.

What `router.calls` does with gRPC, on the simulated network: whatever way a call ends, one event comes of
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pdserve.messages import Ended, Outcome, PrefillRequest, Refused, Reserve
from pdserve.types import Key, PeerRef
from router import events as ev
from tests.simulation.bias import LEASE_S

if TYPE_CHECKING:
    from tests.simulation.fleet import Fleet
    from tests.simulation.process import Process
    from tests.simulation.router import SimRouter

LOST_MESSAGE = "A worker was lost; try again."
ROUTER = "router"
REPLAY_OPEN_S = 2.5 * LEASE_S


class Call:
    """One open call. broken: nothing of it arrives any more, either way."""

    def __init__(
        self, calls: RouterCalls, kind: str, key: Key, peer: PeerRef, *, replay: bool = False
    ) -> None:
        """replay: the router knows nothing of it and hears nothing from it."""
        self._calls = calls
        self.kind, self.key, self.peer, self.replay = kind, key, peer, replay
        self.broken = self.over = False

    def hear(self, message: Any) -> None:
        """The worker says something on it."""
        if not self.replay:
            self._calls.arrive(self, message)


class RouterCalls:
    """All calls of the router."""

    def __init__(self, fleet: Fleet, router: SimRouter) -> None:
        self._fleet, self._router = fleet, router
        self.open: dict[tuple[str, Key], Call] = {}
        self._replays: list[Call] = []

    # -- streams --------------------------------------------------------------------------------------------

    def reserve(self, peer: PeerRef, message: Reserve) -> None:
        self._begin(Call(self, "decode", message.key, peer), message)

    def prefill(self, peer: PeerRef, message: PrefillRequest) -> None:
        self._begin(Call(self, "prefill", message.key, peer), message)

    def _begin(self, call: Call, message: Reserve | PrefillRequest) -> None:
        self.open[call.kind, call.key] = call
        fleet, name = self._fleet, call.peer.worker_id

        def deliver() -> None:
            process = fleet.processes.get(name)
            if process is None or not process.alive:
                self.break_call(call, told_after=0.01)
                return
            process.later(0.0, lambda: self._handle(call, message))

        fleet.network.stream(ROUTER, name, deliver)

    def _handle(self, call: Call, message: Reserve | PrefillRequest) -> None:
        process = self._fleet.processes[call.peer.worker_id]
        if process is None or call.broken:
            return
        self._hand_over(process, message, call)
        delay = self._fleet.faults.replay_after()
        if delay is not None:
            process.later(delay, lambda: self._replay(process, message, call))

    def _hand_over(self, process: Process, message: Reserve | PrefillRequest, call: Call) -> None:
        if isinstance(message, Reserve):
            process.calls.reserve(message, call)
        else:
            process.calls.prefill(message, call)

    def _replay(self, process: Process, message: Reserve | PrefillRequest, original: Call) -> None:
        """The very same call once more, from nobody who would cancel it; its connection ends some time."""
        self._fleet.world.fault("replay", process.name, f"{original.kind} {original.key}")
        call = Call(self, original.kind, original.key, original.peer, replay=True)
        self._replays.append(call)
        self._hand_over(process, message, call)
        self._fleet.world.after(REPLAY_OPEN_S, lambda: self.break_call(call, told_after=0.0))

    def arrive(self, call: Call, message: Any) -> None:
        """A worker's words are on their way to the router."""
        self._fleet.network.stream(call.peer.worker_id, ROUTER, lambda: self._hear(call, message))

    def _hear(self, call: Call, message: Any) -> None:
        if call.broken or call.over:
            return
        if call.kind == "prefill" or isinstance(message, Refused | Ended):
            self._close(call)
        if call.kind == "prefill" and isinstance(message, Refused):
            message = ev.PrefillRefused(refused=message)
        self._router.step(call.key.request_id, message)
        if call.kind == "decode" and call.over:  # the stream ended; without effect if it ended properly
            self._router.step(call.key.request_id, _lost(call.key))

    def _close(self, call: Call) -> None:
        call.over = True
        self.open.pop((call.kind, call.key), None)

    def break_call(self, call: Call, *, told_after: float, suspect: bool = True) -> None:
        """The connection broke: both ends learn it in their own time."""
        if call.broken:
            return
        call.broken = True
        if not call.replay:
            self.open.pop((call.kind, call.key), None)
        process = self._fleet.processes.get(call.peer.worker_id)
        world = self._fleet.world
        if process is not None:
            process.later(world.rng.uniform(0.0, 0.5), lambda: process.calls.broken(call))
        if call in self._replays:
            self._replays.remove(call)
        elif not call.over:
            world.after(told_after, lambda: self._tell_broken(call, suspect))

    def _tell_broken(self, call: Call, suspect: bool) -> None:
        if suspect:
            self._router.suspect(call.peer)
        event: Any = ev.PrefillBroken(key=call.key)
        if call.kind == "decode":
            event = _lost(call.key)
        self._router.step(call.key.request_id, event)

    def drop_stream(self, key: Key) -> None:
        """The router itself gives a Reserve stream up; D hears it as a broken stream."""
        call = self.open.pop(("decode", key), None)
        if call is None:
            return
        call.over = True
        name = call.peer.worker_id

        def deliver() -> None:
            process = self._fleet.processes.get(name)
            if process is not None:
                process.later(0.0, lambda: process.calls.broken(call))

        self._fleet.network.stream(ROUTER, name, deliver)

    def break_all(self, name: str, *, told_after: float) -> None:
        """Every open call to a worker breaks."""
        for call in [c for c in (*self.open.values(), *self._replays) if c.peer.worker_id == name]:
            self.break_call(call, told_after=told_after * self._fleet.world.rng.random())

    # -- control --------------------------------------------------------------------------------------------

    def cancel(self, kind: str, peer: PeerRef, key: Key) -> None:
        def ask(process: Process, reply: Callable[[Outcome | None], None]) -> None:
            process.calls.cancel(kind, key, peer.incarnation, reply)
            delay = self._fleet.faults.replay_after()
            if delay is not None:
                process.later(delay, lambda: self._cancel_again(process, kind, key))

        self._control(peer, ask, lambda _: None)

    def _cancel_again(self, process: Process, kind: str, key: Key) -> None:
        """A cancel that comes a second time, when its key may long be over and a newer one live."""
        self._fleet.world.fault("replay", process.name, f"cancel {kind} {key}")
        process.calls.cancel(kind, key, process.incarnation, lambda outcome: None)

    def switch(self, peer: PeerRef, key: Key) -> None:
        def answered(outcome: Outcome | None) -> None:
            self._router.step(key.request_id, ev.SwitchAnswered(key=key, outcome=outcome))

        self._control(peer, lambda p, reply: p.calls.switch(key, peer.incarnation, reply), answered)

    def _control(
        self, peer: PeerRef, ask: Callable[[Any, Any], None], answered: Callable[[Any], None]
    ) -> None:
        """One call with a time-out; it fails when its worker is out of reach for that long."""
        fleet, name, settled = self._fleet, peer.worker_id, [False]

        def settle(outcome: Outcome | None) -> None:
            if not settled[0]:
                settled[0] = True
                answered(outcome)

        def reply(outcome: Outcome | None) -> None:
            fleet.network.stream(name, ROUTER, lambda: settle(outcome))

        def deliver() -> None:
            process = fleet.processes.get(name)
            if process is None or not process.alive:
                settle(None)
            elif not settled[0]:
                process.later(0.0, lambda: None if settled[0] else ask(process, reply))

        fleet.network.stream(ROUTER, name, deliver)
        fleet.world.after(2.0, lambda: settle(None))


def _lost(key: Key) -> ev.DecodeBroken:
    return ev.DecodeBroken(key=key, label="worker_lost", message=LOST_MESSAGE)
