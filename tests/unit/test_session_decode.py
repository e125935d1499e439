"""The decode side's state table (protocol.md §9, rows D1-D14), row by row, and under any order of events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.digest import digest_of_digests
from kvtransfer.session import decode_events as ev
from kvtransfer.session.decode import DecodeSession, DState
from kvtransfer.session.guard import finish_record
from kvtransfer.transport import ReadStatus
from pdserve.messages import Abort, Ack, Announce, Commit, Finish, Grant, Nack, Outcome
from pdserve.types import FinishReason, HandoverMode, Key, PageName, TokenLogprob

KEY = Key(request_id="r")
L = 10.0


def digest(index: int) -> bytes:
    return bytes([index]) * 16


def announce(index: int, value: bytes | None = None, generation: int = 1) -> Announce:
    return Announce(
        key=KEY, index=index, page=PageName(pool_id=7, page=index, generation=generation), valid_rows=16,
        content_key=b"k" * 16, digest=digest(index) if value is None else value,
    )  # fmt: skip


def finish(indices: tuple[int, ...] = (0, 1), reason: FinishReason | None = None, index: int = 0) -> Finish:
    made = Finish(
        key=KEY, index=index, token_id=42, next_counter=1, finish=reason, num_announced=len(indices),
        digest_of_digests=b"",
    )  # fmt: skip
    value = digest_of_digests([(i, digest(i)) for i in indices], finish_record(made))
    return replace(made, digest_of_digests=value)


def read(index: int, status: ReadStatus = ReadStatus.GOOD) -> ev.ReadEnded:
    return ev.ReadEnded(index=index, status=status, digest=digest(index))


def accepted(
    mode: HandoverMode = HandoverMode.DISAGGREGATED, hits: int = 0, max_tokens: int = 50
) -> ev.Accepted:
    return ev.Accepted(
        mode=mode,
        num_pages=2,
        hit_pages=hits,
        ticket=b"t",
        deadline_at=100.0,
        num_forced=0,
        max_tokens=max_tokens,
    )


def session(*events: Any) -> DecodeSession:
    made = DecodeSession(key=KEY, lease_s=L)
    for event in events:
        made.step(event, 0.0)
    return made


def sent(effects: list[Any], kind: type) -> list[Any]:
    return [e.message for e in effects if isinstance(e, ev.DSend) and isinstance(e.message, kind)]


def has(effects: list[Any], kind: type) -> bool:
    return any(isinstance(e, kind) for e in effects)


VERIFIED = (accepted(), announce(0), read(0), announce(1), read(1))


def test_d1_a_reservation_is_granted_at_once_for_what_is_lacking() -> None:
    (grant,) = sent(session().step(accepted(hits=1), 0.0), Grant)
    assert (grant.want, grant.credit) == ((1,), 1)


def test_d1_local_mode_needs_no_grant() -> None:
    made = session()
    assert made.step(accepted(HandoverMode.LOCAL), 0.0) == [ev.DRunLocal(verified_pages=0)]
    assert made.state is DState.LOCAL


def test_d1_the_grant_is_repeated_until_prefill_has_used_it() -> None:
    made = session(accepted())
    assert len(sent(made.step(ev.Tick(), L / 4), Grant)) == 1
    made.step(announce(0), L / 4)
    assert len(sent(made.step(ev.Tick(), L / 2), Grant)) == 1
    made.step(announce(1), L / 2)
    assert sent(made.step(ev.Tick(), 3 * L / 4), Grant) == []


def windowed(window: int, num_pages: int) -> DecodeSession:
    made = DecodeSession(key=KEY, lease_s=L, credit_pages=window)
    made.step(replace(accepted(), num_pages=num_pages), 0.0)
    return made


def test_d1_credit_is_absolute_and_a_window_over_the_verified_pages() -> None:
    made = windowed(2, 6)
    assert made.granted == 2
    credits = []
    for index in range(6):
        made.step(announce(index), 0.0)
        credits += [g.credit for g in sent(made.step(read(index), 0.0), Grant)]
    assert credits == [3, 4, 5, 6]
    assert made.verified_prefix == 6


def test_d1_a_large_window_is_not_raised_page_by_page() -> None:
    made = windowed(8, 100)
    credits = []
    for index in range(8):
        made.step(announce(index), 0.0)
        credits += [g.credit for g in sent(made.step(read(index), 0.0), Grant)]
    assert credits == [10, 12, 14, 16]


def test_d1_a_raised_limit_that_was_lost_is_said_again() -> None:
    made = windowed(1, 3)
    made.step(announce(0), 0.0)
    assert [g.credit for g in sent(made.step(read(0), 0.0), Grant)] == [2]
    assert [g.credit for g in sent(made.step(ev.Tick(), L / 4), Grant)] == [2]


def test_d2_more_pages_than_granted_end_the_transfer_and_are_counted() -> None:
    made = windowed(1, 3)
    made.step(announce(0), 0.0)
    effects = made.step(announce(1), 0.0)
    assert ev.DCount(name="over_credit") in effects
    assert len(sent(effects, Abort)) == 1
    assert made.switching


def test_d1_pages_taken_over_are_not_wanted_again_but_count_as_verified() -> None:
    made = session(replace(accepted(), num_pages=4, verified=frozenset({1})), announce(0), read(0))
    assert made.want == (0, 2, 3)
    assert made.verified_prefix == 2
    assert has(made.step(announce(1), 0.0), ev.DRunLocal), "nobody may announce what was not granted"


def test_d5_all_pages_taken_over_need_only_the_first_token() -> None:
    made = session(replace(accepted(), verified=frozenset({0, 1})))
    effects = made.step(finish(()), 0.0)
    assert len(sent(effects, Commit)) == 1
    assert made.state is DState.RUNNING


def test_d2_a_page_is_read_once_however_often_it_is_announced() -> None:
    made = session(accepted())
    assert made.step(announce(0), 0.0) == [ev.DRead(announce=announce(0))]
    assert made.step(announce(0), 0.0) == []
    made.step(read(0), 0.0)
    assert [a.index for a in sent(made.step(announce(0), 0.0), Ack)] == [0]


def test_d2_a_page_of_another_prefix_ends_the_transfer_without_a_read() -> None:
    effects = session(accepted(), announce(0)).step(ev.WrongPage(index=0), 0.0)
    assert len(sent(effects, Abort)) == 1
    assert has(effects, ev.DRunLocal)


def test_d6_a_prefill_worker_that_never_started_gives_the_router_a_moment_to_find_another() -> None:
    made = session(accepted())
    assert made.step(Abort(key=KEY, outcome=Outcome.NEVER_STARTED), 1.0) == []
    assert made.pulling, "a higher epoch may take over, with another prefill worker"
    assert sent(made.step(ev.Tick(), 1.0 + L / 4 - 0.01), Grant) == []
    assert has(made.step(ev.Tick(), 1.0 + L / 4), ev.DRunLocal)


def test_d6_a_prefill_worker_that_gave_up_later_is_replaced_by_ourselves_at_once() -> None:
    made = session(accepted(), announce(0), read(0))
    assert made.step(Abort(key=KEY, outcome=Outcome.EXPIRED), 0.0) == [ev.DRunLocal(verified_pages=1)]


def test_d2_two_digests_for_one_index_end_the_transfer() -> None:
    made = session(accepted(), announce(0), read(0))
    effects = made.step(announce(0, b"z" * 16), 0.0)
    assert has(effects, ev.DRunLocal)
    assert len(sent(effects, Abort)) == 1


def test_d2_a_page_that_was_not_granted_ends_the_transfer() -> None:
    assert has(session(accepted(hits=1)).step(announce(0), 0.0), ev.DRunLocal)


def test_d3_a_mismatch_is_nacked_and_read_again_at_most_three_times() -> None:
    made = session(accepted(), announce(0))
    for _ in range(2):
        effects = made.step(read(0, ReadStatus.MISMATCH), 0.0)
        assert len(sent(effects, Nack)) == 1
        made.step(announce(0), 0.0)
    assert has(made.step(read(0, ReadStatus.MISMATCH), 0.0), ev.DRunLocal)


def test_d3_a_changed_generation_is_not_corruption_but_the_end_of_the_transfer() -> None:
    effects = session(accepted(), announce(0)).step(read(0, ReadStatus.STALE), 0.0)
    assert sent(effects, Nack) == []
    assert has(effects, ev.DRunLocal)


def test_d4_d5_commit_when_all_is_verified_in_any_order() -> None:
    early = session(accepted(), finish(), announce(0), read(0), announce(1))
    late = session(*VERIFIED)
    for made, event in ((early, read(1)), (late, finish())):
        effects = made.step(event, 0.0)
        assert len(sent(effects, Commit)) == 1
        assert has(effects, ev.DRun)
        assert effects[-1] == ev.DEmit(index=0, token_id=42)
        assert made.state is DState.RUNNING


def test_d5_a_wrong_digest_of_digests_never_commits() -> None:
    made = session(*VERIFIED)
    effects = made.step(finish((0,)), 0.0)
    assert sent(effects, Commit) == []
    assert has(effects, ev.DRunLocal)


LOGPROB = TokenLogprob(token_id=42, logprob=-0.5)


@pytest.mark.parametrize(
    "change",
    [{"token_id": 43}, {"next_counter": 2}, {"finish": FinishReason.STOP}, {"logprob": LOGPROB}],
)
def test_d5_a_first_token_that_changed_on_the_way_never_commits(change: dict[str, Any]) -> None:
    effects = session(*VERIFIED).step(replace(finish(), **change), 0.0)
    assert sent(effects, Commit) == []
    assert has(effects, ev.DRunLocal)


def test_d5_a_first_token_with_the_wrong_index_never_commits() -> None:
    effects = session(*VERIFIED).step(finish(index=1), 0.0)
    assert sent(effects, Commit) == []


def test_d5_a_last_token_that_prefill_does_not_call_the_last_never_commits() -> None:
    made = session(accepted(max_tokens=1), *VERIFIED[1:])
    assert has(made.step(finish(), 0.0), ev.DRunLocal)


def test_d5_a_request_that_ends_with_its_first_token_ends_here() -> None:
    effects = session(*VERIFIED).step(finish(reason=FinishReason.STOP), 0.0)
    assert ev.DEnd(finish=FinishReason.STOP) in effects
    assert effects[-1] == ev.DRelease(outcome=Outcome.COMPLETE)


def test_d6_the_switch_keeps_the_verified_prefix_and_waits_for_reads() -> None:
    made = session(accepted(), announce(0), read(0), announce(1))
    effects = made.step(ev.Switch(detail="lost"), 0.0)
    assert has(effects, ev.DCancelReads)
    assert not has(effects, ev.DRunLocal), "a page that is still written must not be computed on"
    assert made.step(read(1, ReadStatus.FAILED), 0.0) == [ev.DRunLocal(verified_pages=1)]


def test_d6_prefill_silent_for_one_lease_is_lost() -> None:
    made = session(accepted())
    made.step(ev.PeerSeen(), 5.0)
    assert made.step(ev.Tick(), L + 4.9) != [] or made.pulling
    assert has(made.step(ev.Tick(), L + 5.0), ev.DRunLocal)


def test_d7_late_words_of_the_prefill_side_are_superseded() -> None:
    made = session(accepted(), ev.Switch(detail="lost"), ev.Sampled(index=0, token_id=5))
    assert [a.outcome for a in sent(made.step(announce(0), 0.0), Abort)] == [Outcome.SUPERSEDED]
    assert [a.outcome for a in sent(made.step(finish(), 0.0), Abort)] == [Outcome.SUPERSEDED]


def test_d8_finish_again_is_committed_again() -> None:
    made = session(*VERIFIED, finish())
    assert len(sent(made.step(finish(), 0.0), Commit)) == 1


def test_d8_a_forced_or_repeated_index_is_never_emitted() -> None:
    made = session(*VERIFIED, finish())
    assert made.step(ev.Sampled(index=0, token_id=6), 0.0) == []
    local = session(replace(accepted(HandoverMode.LOCAL), num_forced=3))
    assert local.step(ev.Sampled(index=2, token_id=6), 0.0) == []
    assert local.step(ev.Sampled(index=3, token_id=6), 0.0) == [ev.DEmit(index=3, token_id=6)]


def test_d8_d9_tokens_then_the_end_then_release() -> None:
    made = session(*VERIFIED, finish())
    assert made.step(ev.Sampled(index=1, token_id=6), 0.0) == [ev.DEmit(index=1, token_id=6)]
    effects = made.step(ev.Finished(reason=FinishReason.LENGTH), 0.0)
    assert effects == [ev.DEnd(finish=FinishReason.LENGTH), ev.DRelease(outcome=Outcome.COMPLETE)]


CANCEL = ev.Stop(label="cancelled", message="m", retryable=False)


def test_d13_cancel_while_pulling_tells_prefill_and_waits_for_reads() -> None:
    made = session(accepted(), announce(0))
    effects = made.step(CANCEL, 0.0)
    assert len(sent(effects, Abort)) == 1
    assert has(effects, ev.DEnd)
    assert has(effects, ev.DDropPages), "pages that no read touches are given back at once"
    assert not has(effects, ev.DRelease), "pages that are still written are not given back"
    assert made.step(read(0), 0.0) == [ev.DRelease(outcome=Outcome.STOPPED)]


def test_d13_cancel_while_running_waits_for_the_step() -> None:
    made = session(*VERIFIED, finish())
    effects = made.step(CANCEL, 0.0)
    assert has(effects, ev.DStopCompute)
    assert not has(effects, ev.DRelease)
    assert made.step(ev.ComputeQuiet(), 0.0) == [ev.DRelease(outcome=Outcome.STOPPED)]


def test_d13_the_deadline_ends_it_with_its_own_label() -> None:
    effects = session(accepted()).step(ev.Tick(), 100.0)
    (end,) = [e for e in effects if isinstance(e, ev.DEnd)]
    assert (end.finish, end.label) == (None, "deadline_expired")


EVENTS = st.sampled_from(
    [
        announce(0), announce(1), announce(0, b"z" * 16), announce(5), finish(), finish((0,)),
        finish(reason=FinishReason.STOP), "good", "bad", "stale", "failed",
        Abort(key=KEY, outcome=Outcome.EXPIRED), ev.Switch(detail="x"), ev.Sampled(index=1, token_id=3),
        ev.Finished(reason=FinishReason.LENGTH), CANCEL, ev.PeerSeen(), ev.ComputeQuiet(), ev.Tick(),
    ]
)  # fmt: skip
STATUS = {
    "good": ReadStatus.GOOD,
    "bad": ReadStatus.MISMATCH,
    "stale": ReadStatus.STALE,
    "failed": ReadStatus.FAILED,
}


class Model:
    """Keeps what the role keeps, so that only events that can happen are fed: reads end once, compute too."""

    def __init__(self, mode: HandoverMode) -> None:
        self.session = DecodeSession(key=KEY, lease_s=L)
        self.reading: list[int] = []
        self.computing = False
        self.ends = self.releases = self.runs = 0
        self.feed(accepted(mode), 0.0)

    def feed(self, event: Any, now: float) -> None:
        for effect in self.session.step(event, now):
            if isinstance(effect, ev.DRead):
                assert effect.announce.index not in self.reading, "read twice at once"
                self.reading.append(effect.announce.index)
            elif isinstance(effect, ev.DRun | ev.DRunLocal):
                assert not self.reading, "computing on pages that are still written"
                self.runs += 1
                self.computing = isinstance(effect, ev.DRunLocal) or effect.finish.finish is None
            elif isinstance(effect, ev.DEnd):
                self.ends += 1
            elif isinstance(effect, ev.DRelease):
                assert not self.reading
                assert not self.computing or isinstance(event, ev.ComputeQuiet | ev.Finished)
                self.releases += 1

    def drive(self, event: Any, now: float) -> None:
        if isinstance(event, str):
            if self.reading:
                index = self.reading.pop(0)
                self.feed(read(index, STATUS[event]), now)
        elif isinstance(event, ev.Sampled | ev.Finished | ev.ComputeQuiet):
            if self.computing:
                self.computing = isinstance(event, ev.Sampled)
                self.feed(event, now)
        else:
            self.feed(event, now)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(list(HandoverMode)), st.lists(EVENTS, max_size=40), st.floats(0, 0.5))
def test_any_order_of_events_ends_once_and_releases_once(
    mode: HandoverMode, events: list[Any], pace: float
) -> None:
    model = Model(mode)
    now = 0.0
    for event in events:
        now += pace
        model.drive(event, now)
    model.drive(CANCEL, now)
    while model.reading:
        model.drive("good", now)
    model.drive(ev.ComputeQuiet(), now)
    assert model.session.state is DState.DONE
    assert (model.ends, model.releases) == (1, 1)
    assert model.runs <= 1
