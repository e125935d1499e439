"""The router's calls, as the worker's gRPC services see them: one stream per Reserve, one call per
Prefill.

A broken stream is a cancel, a second call with a key that is running is refused, and an answer goes to
whoever waits for it. What does not live here: the router's side of the same calls (`router_calls`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvtransfer import effects as fx
from pdserve.messages import Ended, Outcome, PrefillRequest, Refused, Reserve
from pdserve.types import Key

if TYPE_CHECKING:
    from tests.simulation.process import Process
    from tests.simulation.router_calls import Call

Reply = Callable[[Outcome | None], None]


class Calls:
    """Calls that wait at one worker process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._decode: dict[Key, list[Call]] = {}
        self._prefill: dict[Key, list[Call]] = {}

    @property
    def num_open(self) -> int:
        return len(self._decode) + len(self._prefill)

    def reserve(self, message: Reserve, call: Call) -> None:
        """The same key on a second stream hears everything again, on both."""
        process, key = self._process, message.key
        self._decode.setdefault(key, []).append(call)
        process.feed(lambda now: process.decode.reserve(message, now))

    def prefill(self, message: PrefillRequest, call: Call) -> None:
        process, key = self._process, message.key
        self._prefill.setdefault(key, []).append(call)
        process.feed(lambda now: process.prefill.prefill(message, now))

    def answer(self, effect: fx.AnswerPrefill | fx.AnswerDecode) -> None:
        """The core answers: it goes to every call that waits."""
        process, key, message = self._process, effect.key, effect.message
        process.fleet.judge.said(process, effect)
        process.world.note(process.name, "→ router:", message)
        if isinstance(effect, fx.AnswerPrefill):
            waiting = self._prefill.pop(key, [])
        elif isinstance(message, Refused | Ended):
            waiting = self._decode.pop(key, [])
        else:
            waiting = self._decode.get(key, [])
        for call in waiting:
            call.hear(message)

    def broken(self, call: Call) -> None:
        """A stream broke while it was open here. When it was the key's last, that is a cancel."""
        process, key = self._process, call.key
        if call.kind == "decode":
            if self._forget(self._decode, call):
                process.fleet.judge.told(process, key)
                process.feed(lambda now: process.decode.cancel(key, now)[1])
        elif call in self._prefill.get(key, []):
            self._forget(self._prefill, call)
            process.feed(lambda now: process.prefill.cancel(key, now)[1])

    def _forget(self, calls: dict[Key, list[Call]], call: Call) -> bool:
        """Whether that was the last one of its key that waited."""
        waiting = calls.get(call.key, [])
        if call not in waiting:
            return False
        waiting.remove(call)
        if not waiting:
            del calls[call.key]
        return not waiting

    def cancel(self, kind: str, key: Key, incarnation: int, reply: Reply) -> None:
        """CancelDecode or CancelPrefill. Another incarnation's is refused."""
        process = self._process
        if incarnation != process.incarnation:
            return reply(None)
        role = process.decode if kind == "decode" else process.prefill
        if kind == "decode":
            process.fleet.judge.told(process, key)
        return self._ask(lambda now: role.cancel(key, now), reply)

    def switch(self, key: Key, incarnation: int, reply: Reply) -> None:
        process = self._process
        if incarnation != process.incarnation:
            return reply(None)
        return self._ask(lambda now: process.decode.switch_local(key, now), reply)

    def _ask(self, ask: Callable[[float], tuple[Outcome, list[fx.Effect]]], reply: Reply) -> None:
        outcome = Outcome.UNKNOWN

        def make(now: float) -> list[fx.Effect]:
            nonlocal outcome
            outcome, effects = ask(now)
            return effects

        self._process.feed(make)
        reply(outcome)
