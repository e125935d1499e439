"""The prefill side's state table (protocol.md §9, rows P1-P11), row by row, and under any order of events."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.digest import digest_of_digests
from kvtransfer.session import prefill_events as ev
from kvtransfer.session.guard import finish_record
from kvtransfer.session.prefill import PrefillSession, PState
from pdserve.messages import Abort, Ack, Announce, Commit, Finish, Grant, Nack, Outcome
from pdserve.types import FinishReason, Key, PageName

KEY = Key(request_id="r")
L = 10.0


def page(index: int, generation: int = 1) -> PageName:
    return PageName(pool_id=7, page=100 + index, generation=generation)


def digest(index: int) -> bytes:
    return bytes([index]) * 16


def sealed(index: int, known: bytes | None = None) -> ev.Sealed:
    """known: the digest of a page that comes from the cache."""
    return ev.Sealed(index=index, page=page(index), valid_rows=16, content_key=b"k" * 16, digest=known)


def digested(index: int) -> ev.Digested:
    return ev.Digested(index=index, page=page(index), digest=digest(index))


def grant(want: tuple[int, ...] = (0, 1), credit: int = 2) -> Grant:
    return Grant(key=KEY, want=want, credit=credit, ticket=b"t")


HALF = ev.PrefillHalf(deadline_at=100.0)
FIRST = ev.FirstToken(index=0, token_id=42, finish=None)


def session(*events: Any) -> PrefillSession:
    made = PrefillSession(key=KEY, lease_s=L, lease_until=L)
    for event in events:
        made.step(event, 0.0)
    return made


def sent(effects: list[Any], kind: type) -> list[Any]:
    return [e.message for e in effects if isinstance(e, ev.PSend) and isinstance(e.message, kind)]


def kinds(effects: list[Any]) -> list[type]:
    return [type(e) for e in effects]


COMPUTING = (HALF, grant(), ev.Scheduled())
SENT = (*COMPUTING, sealed(0), digested(0), sealed(1), digested(1), FIRST)


def test_p1_p2_work_starts_when_both_halves_are_there_in_any_order() -> None:
    for first, second in ((HALF, grant()), (grant(), HALF)):
        made = session()
        assert made.step(first, 0.0) == []
        assert made.state is PState.HALF
        assert made.step(second, 0.0) == [ev.PQueue()]
        assert made.state is PState.QUEUED


def test_p3_the_prompt_computes_once_the_scheduler_started_it() -> None:
    made = session(HALF, grant())
    assert made.step(ev.Scheduled(), 0.0) == []
    assert made.state is PState.COMPUTE


def test_p10_decode_that_never_asks_again_is_not_waited_for_once_all_is_sent() -> None:
    assert session(*COMPUTING).waits_for_renewal
    assert not session(*SENT).waits_for_renewal


def test_p4_a_sealed_wanted_page_is_held_digested_and_announced() -> None:
    made = session(*COMPUTING)
    assert made.step(sealed(0), 0.0) == [ev.PHold(index=0, page=page(0), valid_rows=16)]
    (announce,) = sent(made.step(digested(0), 0.0), Announce)
    assert (announce.index, announce.page, announce.digest) == (0, page(0), digest(0))


def test_p4_pages_that_decode_has_are_not_sent() -> None:
    made = session(HALF, grant(want=(1,), credit=1), ev.Scheduled())
    assert kinds(made.step(sealed(0), 0.0)) == [ev.PRehash]
    assert made.step(digested(0), 0.0) == []


def test_announcements_stay_within_the_credit_and_credit_is_absolute() -> None:
    made = session(HALF, grant(credit=1), ev.Scheduled(), sealed(0), digested(0), sealed(1))
    assert sent(made.step(digested(1), 0.0), Announce) == []
    assert sent(made.step(grant(credit=1), 0.0), Announce) == [], "a repeated grant gives no new credit"
    assert [a.index for a in sent(made.step(grant(credit=2), 0.0), Announce)] == [1]


def test_p5_a_preempted_prompt_keeps_its_transfer_holds() -> None:
    made = session(*COMPUTING, sealed(0), digested(0))
    assert made.step(ev.PreemptedEvent(), 0.0) == []
    made.step(ev.Scheduled(), 0.0)
    again = ev.Sealed(index=0, page=page(0, 5), valid_rows=16, content_key=b"k" * 16)
    assert made.step(again, 0.0) == [], "an announced page is not announced twice with another name"


def test_p6_finish_waits_for_every_wanted_page_and_covers_their_digests() -> None:
    made = session(*COMPUTING, sealed(0), digested(0), sealed(1))
    assert made.step(FIRST, 0.0) == [ev.PDropRequest()]
    effects = made.step(digested(1), 0.0)
    (finish,) = sent(effects, Finish)
    assert made.state is PState.SENT
    assert (finish.index, finish.token_id, finish.next_counter, finish.num_announced) == (0, 42, 1, 2)
    pairs = [(0, digest(0)), (1, digest(1))]
    assert finish.digest_of_digests == digest_of_digests(pairs, finish_record(finish))


def test_p6_finish_is_repeated_each_quarter_lease_until_commit() -> None:
    made = session(*SENT)
    assert sent(made.step(ev.Tick(), L / 4 - 0.01), Finish) == []
    assert len(sent(made.step(ev.Tick(), L / 4), Finish)) == 1
    assert len(sent(made.step(ev.Tick(), L / 2), Finish)) == 1
    made.step(Commit(key=KEY), L / 2)
    assert made.step(ev.Tick(), L) == []


def test_p4_what_decode_has_not_answered_is_announced_again() -> None:
    """A lost Announce, or a lost Nack, must not hold the request until its deadline."""
    made = session(*COMPUTING, sealed(0), digested(0), sealed(1), digested(1))
    made.step(Ack(key=KEY, index=1), 0.0)
    assert [a.index for a in sent(made.step(ev.Tick(), L / 4), Announce)] == [0]
    made.step(Ack(key=KEY, index=0), L / 4)
    assert made.step(ev.Tick(), L / 2) == []


def test_p8_a_nack_for_what_was_not_announced_means_nothing() -> None:
    made = session(*COMPUTING, sealed(0))
    assert made.step(Nack(key=KEY, index=0, digest=b"x" * 16), 0.0) == []


def test_p8_an_ack_ends_a_rehash_that_its_nack_began() -> None:
    # A Nack sent twice, or late: the page is verified by now, its hold goes, and its digest may never come.
    made = session(*COMPUTING, sealed(0), digested(0))
    assert any(isinstance(e, ev.PRehash) for e in made.step(Nack(key=KEY, index=0, digest=b"x" * 16), 0.0))
    made.step(Ack(key=KEY, index=0), 0.0)
    made.step(sealed(1), 0.0)
    announced = [e.message for e in made.step(digested(1), 0.0) if isinstance(e, ev.PSend)]
    assert [m.index for m in announced if isinstance(m, Announce)] == [1], (
        "later pages wait for no dead check"
    )


def test_p7_an_ack_drops_the_hold_once() -> None:
    made = session(*COMPUTING, sealed(0), digested(0))
    assert made.step(Ack(key=KEY, index=0), 0.0) == [ev.PDrop(index=0, page=page(0))]
    assert made.step(Ack(key=KEY, index=0), 0.0) == []


def test_p8_a_good_page_is_announced_again_at_most_twice() -> None:
    made = session(*COMPUTING, sealed(0), digested(0))
    nack = Nack(key=KEY, index=0, digest=b"x" * 16)
    for _ in range(2):
        assert made.step(nack, 0.0) == [ev.PRehash(index=0, page=page(0), valid_rows=16)]
        assert len(sent(made.step(digested(0), 0.0), Announce)) == 1
    effects = made.step(nack, 0.0)
    assert [a.outcome for a in sent(effects, Abort)] == [Outcome.SOURCE_CORRUPT]


def test_p8_a_page_that_is_bad_at_the_source_is_unpublished() -> None:
    made = session(*COMPUTING, sealed(0), digested(0))
    made.step(Nack(key=KEY, index=0, digest=b"x" * 16), 0.0)
    effects = made.step(ev.Digested(index=0, page=page(0), digest=b"z" * 16), 0.0)
    assert effects[0] == ev.PUnpublish(page=page(0))
    assert [a.outcome for a in sent(effects, Abort)] == [Outcome.SOURCE_CORRUPT]


HIT = (HALF, grant(want=(1,), credit=1), ev.Scheduled(), sealed(0, digest(0)))


def test_p4_a_cached_page_that_decode_has_is_digested_again_before_anything_is_announced() -> None:
    """Decode never sees its bytes, only pages computed from them: those would be wrong with right digests."""
    made = session(*HIT[:3])
    assert made.step(HIT[3], 0.0) == [ev.PRehash(index=0, page=page(0), valid_rows=16)]
    made.step(sealed(1), 0.0)
    assert made.step(digested(1), 0.0) == [], "it waits for the proof"
    assert made.step(FIRST, 0.0) == [], "and keeps the page until then"
    effects = made.step(digested(0), 0.0)
    assert effects[0] == ev.PDropRequest()
    assert [a.index for a in sent(effects, Announce)] == [1]
    assert len(sent(effects, Finish)) == 1


def test_p4_a_cached_page_that_changed_ends_the_request_before_anything_is_announced() -> None:
    made = session(*HIT, sealed(1), digested(1), FIRST)
    effects = made.step(ev.Digested(index=0, page=page(0), digest=b"z" * 16), 0.0)
    assert effects[0] == ev.PUnpublish(page=page(0))
    assert sent(effects, Announce) == []
    assert [a.outcome for a in sent(effects, Abort)] == [Outcome.SOURCE_CORRUPT]
    assert made.state is PState.DONE


def test_p4_nothing_waits_for_the_digest_of_a_computed_page_that_decode_has() -> None:
    made = session(*HIT[:3], sealed(0), sealed(1))
    assert [a.index for a in sent(made.step(digested(1), 0.0), Announce)] == [1]


def test_p8_a_second_digest_that_differs_is_never_announced() -> None:
    """Two requests may have asked for a page's first digest at once."""
    made = session(*COMPUTING, sealed(0), digested(0))
    effects = made.step(ev.Digested(index=0, page=page(0), digest=b"z" * 16), 0.0)
    assert effects[0] == ev.PUnpublish(page=page(0))
    assert sent(effects, Announce) == []


def test_p9_commit_ends_the_key_with_all_holds_dropped() -> None:
    made = session(*SENT)
    effects = made.step(Commit(key=KEY), 0.0)
    assert kinds(effects) == [ev.PDrop, ev.PDrop, ev.PReport, ev.PDropRequest, ev.PDone]
    assert effects[2] == ev.PReport(outcome=Outcome.COMPLETE, detail="")


def test_p9_commit_before_sent_means_nothing() -> None:
    made = session(*COMPUTING)
    assert made.step(Commit(key=KEY), 0.0) == []


def test_p10_p11_cancel_while_computing_waits_for_the_step() -> None:
    made = session(*COMPUTING, sealed(0))
    effects = made.step(ev.Stop(outcome=Outcome.STOPPED), 0.0)
    assert kinds(effects) == [ev.PStopCompute, ev.PSend, ev.PDrop, ev.PReport]
    assert made.state is PState.CLOSING
    assert kinds(made.step(ev.ComputeQuiet(), 0.0)) == [ev.PDropRequest, ev.PDone]


def test_p10_the_lease_ends_a_transfer_that_nobody_renews() -> None:
    made = session(*SENT)
    made.step(ev.Renewed(), 8.0)
    assert PState.SENT is made.state
    made.step(ev.Tick(), 8.0 + L - 0.01)
    assert made.live
    made.step(ev.Tick(), 8.0 + L)
    assert made.outcome is Outcome.EXPIRED


def test_p10_half_a_request_is_forgotten_after_one_lease() -> None:
    made = session(HALF)
    effects = made.step(ev.Tick(), L)
    assert made.state is PState.DONE
    assert ev.PReport(outcome=Outcome.NEVER_STARTED, detail="the other half never came") in effects


def test_p10_the_deadline_ends_it() -> None:
    made = PrefillSession(key=KEY, lease_s=L, lease_until=L)
    made.step(ev.PrefillHalf(deadline_at=3.0), 0.0)
    made.step(ev.Tick(), 3.0)
    assert made.outcome is Outcome.EXPIRED


def test_a_request_that_ends_with_its_first_token_says_so() -> None:
    first = ev.FirstToken(index=0, token_id=42, finish=FinishReason.STOP)
    made = session(*COMPUTING, sealed(0), digested(0), sealed(1), digested(1))
    (finish,) = sent(made.step(first, 0.0), Finish)
    assert finish.finish is FinishReason.STOP


EVENTS = st.sampled_from(
    [
        HALF, grant(), grant((0, 1, 2), 3), ev.Scheduled(), sealed(0), sealed(1), sealed(2), digested(0),
        digested(1), digested(2), sealed(3, digest(3)), digested(3), ev.PreemptedEvent(), FIRST,
        ev.Renewed(), Ack(key=KEY, index=0), Ack(key=KEY, index=1),
        Nack(key=KEY, index=0, digest=b"x" * 16), Commit(key=KEY), ev.Tick(),
        Abort(key=KEY, outcome=Outcome.SUPERSEDED), ev.Stop(outcome=Outcome.STOPPED), ev.ComputeQuiet(),
    ]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENTS, max_size=40), st.floats(0, 0.5))
def test_any_order_of_events_ends_with_one_report_and_no_hold(events: list[Any], pace: float) -> None:
    made = PrefillSession(key=KEY, lease_s=L, lease_until=L)
    held: set[int] = set()
    reports = 0
    now = 0.0
    for event in [*events, ev.Stop(outcome=Outcome.STOPPED), ev.ComputeQuiet()]:
        now += pace
        for effect in made.step(event, now):
            if isinstance(effect, ev.PHold):
                assert effect.index not in held, "held twice"
                held.add(effect.index)
            elif isinstance(effect, ev.PDrop):
                held.remove(effect.index)
            elif isinstance(effect, ev.PReport):
                reports += 1
    assert made.state is PState.DONE
    assert (held, reports) == (set(), 1)
