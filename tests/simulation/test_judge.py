"""Every invariant can fire: a simulator that finds nothing must be known to be able to find something.

Each case sabotages one thing, crudely, and the rule that is about it must break within a few seeds. The
planted defects, which are finer, have a suite of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from decode_worker.loop import DecodeRole
from decode_worker.pulls import Pulls
from kvtransfer.effects import Count
from kvtransfer.session.decode import DecodeSession
from kvtransfer.session.prefill import PrefillSession
from kvtransfer.transport import ReadStatus
from pdserve.kvcache.allocator import PageAllocator
from pdserve.kvcache.manager import PageManager
from pdserve.messages import Ended
from pdserve.sched.outcome import Outcomes
from pdserve.sched.roster import Roster
from prefill_worker.loop import PrefillRole
from router import events as ev
from router import lifecycle
from tests.simulation import runner
from tests.simulation.bias import Bias
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

    def copy(self: Memory, page: int, *about: Any) -> None:
        original(self, page, *about)
        self.rows[page][0] = 0

    patch.setattr(Memory, "copy", copy)


def other_tenants_page(patch: Patch) -> None:
    """A prefix index without tenants."""
    patch.setattr("decode_worker.reserve.cache_salt", lambda tenant, own: b"")
    patch.setattr("prefill_worker.loop.cache_salt", lambda tenant, own: b"")
    patch.setattr(runner, "_wishes", _same_prompts(runner._wishes))


def _same_prompts(original: Callable[..., Any]) -> Callable[..., Any]:
    def wishes(world: Any) -> Any:
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


def engine_dies(patch: Patch) -> None:
    patch.setattr(PrefillRole, "_on_finished", lambda self, entry, event, now: {}["nothing"])


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
    def renew(self: DecodeRole, now: float) -> list[Any]:
        self._renew_at = float("inf")
        return []

    patch.setattr(DecodeRole, "_renew", renew)


def false_alarm(patch: Patch) -> None:
    patch.setattr(Read, "_verify", lambda self: self.finish(ReadStatus.MISMATCH, b""))


def failing(patch: Patch) -> None:
    """Requests that fail for no reason."""
    patch.setattr("tests.simulation.faults.Faults.is_poisoned", lambda self, request_id: request_id == "r3")
    patch.setattr(Judge, "_check_failure", _unpoisoned(Judge._check_failure))


def _unpoisoned(original: Any) -> Any:
    def check(self: Judge, request: Any, end: Any) -> None:
        self._fleet.faults.is_poisoned = lambda name: False  # type: ignore[method-assign]
        original(self, request, end)

    return check


def talkative(patch: Patch) -> None:
    original = Judge.said

    def said(self: Judge, process: Any, effect: Any) -> None:
        if isinstance(effect.message, Ended):
            text = "no pages in /dev/shm/pool for <Process 7>"
            effect = replace(effect, message=replace(effect.message, error_message=text))
        original(self, process, effect)

    patch.setattr(Judge, "said", said)


def two_owners(patch: Patch) -> None:
    """Whoever commits, somebody else has committed that key before."""
    original = Judge._check_commit

    def check(self: Judge, process: Any, key: Any) -> None:
        self._owners[key] = 1
        original(self, process, key)

    patch.setattr(Judge, "_check_commit", check)


def no_deadline(patch: Patch) -> None:
    """Clients in a hurry are never told that their time is over, and workers are slow."""
    patch.setattr(lifecycle, "_HANDLERS", {**lifecycle._HANDLERS, ev.DeadlineHit: lambda state, event: []})
    patch.setattr(DecodeSession, "_on_tick", lambda self, now: [])
    patch.setattr(PrefillSession, "_announce", lambda self, now: [])
    original = runner._wish
    patch.setattr(runner, "_wish", lambda *about: replace(original(*about), deadline_s=1.0))


def quarantine_early(patch: Patch) -> None:
    """Pages are given up as soon as they are read."""
    original = Pulls.start

    def start(self: Pulls, entry: Any, announce: Any, now: float) -> Any:
        effects = original(self, entry, announce, now)
        return [*effects, Count(name="quarantined")]

    patch.setattr(Pulls, "start", start)


def stuck(patch: Patch) -> None:
    """No step ever ends with a token of the last row."""
    patch.setattr(Outcomes, "_sampled", lambda self, seq, token_id: [])


CASES: list[tuple[Callable[[Patch], None], set[str], Bias]] = [
    (wrong_rows, {"S1"}, Bias(mask=frozenset({"digest"}))),
    (other_tenants_page, {"S1"}, QUIET),
    (tokens_twice, {"S2"}, QUIET),
    (two_ends, {"S2"}, QUIET),
    (cut_short, {"S2"}, QUIET),
    (lost_count, {"S3"}, QUIET),
    (zombie, {"zombie commits"}, CANCELS),
    (engine_dies, {"S5"}, QUIET),
    (talkative, {"S6"}, QUIET),
    (two_owners, {"S4"}, QUIET),
    (no_deadline, {"L1"}, QUIET),
    (quarantine_early, {"quarantined pages"}, QUIET),
    (stuck, {"deadline failures", "L1", "L3"}, QUIET),
    (never_freed, {"L2"}, Bias()),
    (oldest_first, {"L3"}, Bias(reuse_at_once=True)),
    (forget_to_renew, {"false expiries"}, Bias(io_longer_than_lease=0.6, only=True, cancels=0.0)),
    (false_alarm, {"false alarms"}, QUIET),
    (failing, {"unexplained failures"}, QUIET),
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
