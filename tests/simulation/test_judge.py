"""Every invariant can fire: a simulator that finds nothing must be known to be able to find something.

Each case sabotages one thing, crudely, and the rule that is about it must break within a few seeds. The
planted defects, which are finer, have a suite of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from decode_worker.loop import DecodeRole
from kvtransfer.session.decode import DecodeSession
from kvtransfer.session.prefill import PrefillSession
from kvtransfer.transport import ReadStatus
from pdserve.kvcache.allocator import PageAllocator
from pdserve.kvcache.manager import PageManager
from pdserve.kvcache.prefix import PrefixIndex
from pdserve.sched.roster import Roster
from prefill_worker.loop import PrefillRole
from router import events as ev
from router import lifecycle
from tests.simulation import runner
from tests.simulation.bias import Bias
from tests.simulation.calls import Calls
from tests.simulation.dataplane import Memory, Read
from tests.simulation.invariants import Judge
from tests.simulation.runner import Breach, run_seed

Patch = pytest.MonkeyPatch
SEEDS = 25
QUIET = Bias(only=True, num_requests=24, cancels=0.0)
CANCELS = Bias(cancels=0.5)


def wrong_rows(patch: Patch) -> None:
    """A copy that loses a row."""
    original = Memory.copy

    def copy(self: Memory, page: int, source: list[int], start: int, end: int) -> None:
        original(self, page, source, start, end)
        self.rows[page][0] = 0

    patch.setattr(Memory, "copy", copy)


def other_tenants_page(patch: Patch) -> None:
    """A prefix index without tenants."""
    patch.setattr("decode_worker.reserve.cache_salt", lambda tenant: b"")
    patch.setattr("prefill_worker.loop.cache_salt", lambda tenant: b"")
    patch.setattr(runner, "_wishes", _same_prompts(runner._wishes))


def _same_prompts(original: Callable[..., Any]) -> Callable[..., Any]:
    def wishes(world: Any) -> Any:
        from dataclasses import replace

        made = original(world)
        return [(replace(wish, prompt=tuple(range(1, 30))), at) for wish, at in made]

    return wishes


def tokens_twice(patch: Patch) -> None:
    original = lifecycle.step

    def step(state: Any, event: Any) -> list[ev.Effect]:
        effects = original(state, event)
        return effects + [e for e in effects if isinstance(e, ev.Emit)]

    patch.setattr(lifecycle, "step", step)


def two_ends(patch: Patch) -> None:
    original = lifecycle.step

    def step(state: Any, event: Any) -> list[ev.Effect]:
        effects = original(state, event)
        return effects + [e for e in effects if isinstance(e, ev.EndStream)]

    patch.setattr(lifecycle, "step", step)


def cut_short(patch: Patch) -> None:
    """Streams that end one token early."""
    patch.setattr(lifecycle, "_HANDLERS", {**lifecycle._HANDLERS, ev.Assigned: _shorter})


def _shorter(state: Any, event: ev.Assigned) -> list[ev.Effect]:
    effects = lifecycle._assigned(state, event)
    if state.max_tokens > 2:
        effects.append(ev.Emit(index=0, token_id=1))
    return effects


def lost_count(patch: Patch) -> None:
    original = PageAllocator._release

    def release(self: PageAllocator, page: int) -> None:
        original(self, page)
        self._free.pop()

    patch.setattr(PageAllocator, "_release", release)


def zombie(patch: Patch) -> None:
    """A cancel that decode forgets."""
    patch.setattr(DecodeRole, "cancel", lambda self, key, now: (lifecycle.Outcome.STOPPED, []))


def two_owners(patch: Patch) -> None:
    original = Judge.committed

    def committed(self: Judge, process: Any, key: Any) -> None:
        original(self, process, key)
        process.incarnation += 1
        original(self, process, key)

    patch.setattr(Judge, "committed", committed)


def engine_dies(patch: Patch) -> None:
    patch.setattr(PrefillRole, "_on_finished", lambda self, entry, event, now: {}["nothing"])


def talkative(patch: Patch) -> None:
    message = "no pages in /dev/shm/pool for <Process 7>"
    patch.setattr("decode_worker.loop.Refused", None, raising=False)
    patch.setattr(Calls, "answer", _saying(Calls.answer, message))


def _saying(original: Any, message: str) -> Any:
    from dataclasses import replace

    from pdserve.messages import Ended

    def answer(self: Calls, effect: Any) -> None:
        if isinstance(effect.message, Ended):
            effect = replace(effect, message=replace(effect.message, error_message=message))
        original(self, effect)

    return answer


def no_deadline(patch: Patch) -> None:
    patch.setattr(lifecycle, "_HANDLERS", {**lifecycle._HANDLERS, ev.DeadlineHit: lambda state, event: []})
    patch.setattr(DecodeSession, "_on_tick", lambda self, now: [])
    patch.setattr(PrefillSession, "_on_tick", lambda self, now: [])


def never_freed(patch: Patch) -> None:
    original = PageManager.drop_all

    def drop_all(self: PageManager, holder: Any) -> Any:
        return original(self, holder) if len(holder.id) % 2 else ()

    patch.setattr(PageManager, "drop_all", drop_all)


def oldest_first(patch: Patch) -> None:
    """Whoever lacks pages takes them from the oldest."""
    original = Roster.holders_younger_than
    patch.setattr(
        Roster, "holders_younger_than", lambda self, seq: [*original(self, seq), *self.by_age()[:1]]
    )


def forget_to_renew(patch: Patch) -> None:
    patch.setattr(DecodeRole, "_renew", lambda self, now: [])


def false_alarm(patch: Patch) -> None:
    patch.setattr(Read, "_verify", lambda self: self.finish(ReadStatus.MISMATCH, b""))


def quarantine_early(patch: Patch) -> None:
    patch.setattr("decode_worker.pulls.Read.due", lambda self, lease_s: self.started_at)
    original = DecodeRole.tick

    def tick(self: DecodeRole, now: float) -> Any:
        for read in self._pulls._reads.values():
            read.started_at -= 20.0
        return original(self, now)

    patch.setattr(DecodeRole, "tick", tick)


def leaky_cache(patch: Patch) -> None:
    """A page that is cached and free at once."""
    patch.setattr(PrefixIndex, "unpublish_chain", lambda self, page: ())


def failing(patch: Patch) -> None:
    """Requests that fail for no reason."""
    patch.setattr("tests.simulation.faults.Faults.is_poisoned", lambda self, request_id: request_id == "r3")
    patch.setattr(Judge, "_check_failure", _unpoisoned(Judge._check_failure))


def _unpoisoned(original: Any) -> Any:
    def check(self: Judge, request: Any, end: Any) -> None:
        self._fleet.faults.is_poisoned = lambda name: False  # type: ignore[method-assign]
        original(self, request, end)

    return check


def stuck(patch: Patch) -> None:
    """Prefill never announces, and decode never loses patience."""
    patch.setattr(PrefillSession, "_announce", lambda self, now: [])
    patch.setattr(DecodeSession, "_switch", lambda self, detail, tell_peer: [])


CASES: list[tuple[Callable[[Patch], None], set[str], Bias]] = [
    (wrong_rows, {"S1"}, Bias(mask=frozenset({"digest"}))),
    (other_tenants_page, {"S1"}, QUIET),
    (tokens_twice, {"S2"}, QUIET),
    (two_ends, {"S2"}, QUIET),
    (cut_short, {"S2"}, QUIET),
    (lost_count, {"S3"}, QUIET),
    (leaky_cache, {"S3", "S5"}, QUIET),
    (two_owners, {"S4"}, QUIET),
    (zombie, {"zombie commits"}, CANCELS),
    (engine_dies, {"S5"}, QUIET),
    (talkative, {"S6"}, QUIET),
    (no_deadline, {"L1"}, Bias()),
    (never_freed, {"L2"}, Bias()),
    (oldest_first, {"L3"}, Bias(reuse_at_once=True)),
    (forget_to_renew, {"false expiries"}, Bias(io_longer_than_lease=0.5, only=True)),
    (false_alarm, {"false alarms"}, QUIET),
    (quarantine_early, {"quarantined pages"}, Bias(io_longer_than_lease=0.2)),
    (failing, {"unexplained failures"}, QUIET),
    (stuck, {"deadline failures", "L1"}, QUIET),
]


@pytest.mark.parametrize(("sabotage", "rules", "bias"), CASES, ids=[case[0].__name__ for case in CASES])
def test_sabotage_is_seen(
    sabotage: Callable[[Patch], None], rules: set[str], bias: Bias, monkeypatch: Patch
) -> None:
    sabotage(monkeypatch)
    found = set()
    for seed in range(SEEDS):
        try:
            run_seed(seed, bias=bias)
        except Breach as breach:
            found.add(breach.rule)
            if breach.rule in rules:
                return
    pytest.fail(f"none of {rules} within {SEEDS} seeds; only {found}")
