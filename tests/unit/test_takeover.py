"""A higher key takes over on decode (protocol.md §9, guard 3): its pages, its age, and nothing read twice."""

from __future__ import annotations

from kvtransfer.session.decode import DState
from pdserve.kvcache.allocator import Holder, HolderKind
from pdserve.messages import Outcome, Refusal
from tests.unit.role_kit import P2, Decode, Key, key, of, reserve_call


def state(decode: Decode, at: Key) -> DState:
    return decode.role._entries[at].session.state


def test_a_higher_epoch_wants_only_what_lies_behind_the_proven_prefix() -> None:
    decode = Decode()
    decode.role.reserve(reserve_call(key(0)), 0.0)
    decode.verify(key(0), 0, 2)
    before = decode.pages.available
    effects = decode.role.reserve(reserve_call(key(1), prefill=P2), 0.0)
    (ended,) = of(effects, "Ended")
    assert (ended.key, ended.error_label) == (key(0), "cancelled")
    (grant,) = of(effects, "Grant")
    assert (grant.key, grant.want) == (key(1), (1, 2, 3))
    assert [a.outcome for a in of(effects, "Abort")] == [Outcome.SUPERSEDED]
    assert decode.pages.available == before, "the reservation passed on: nothing more, nothing less is held"
    decode.verify(key(1), 1, 2, 3, peer=P2)
    effects = decode.finish(key(1), (1, 2, 3), peer=P2)
    assert len(of(effects, "Commit")) == 1
    assert [t.token_id for t in of(effects, "Token")] == [5]


def test_a_page_with_a_read_in_flight_stays_with_the_old_key_until_it_is_quiet() -> None:
    decode = Decode()
    decode.role.reserve(reserve_call(key(0)), 0.0)
    reading = decode.announce(key(0), 0)
    decode.role.reserve(reserve_call(key(1), prefill=P2), 0.0)
    (read,) = of(reading, "StartRead")
    assert state(decode, key(0)) is DState.CLOSING
    (again,) = of(decode.announce(key(1), 0, peer=P2), "StartRead")
    assert again.target_page != read.target_page, "two reads never write one page"
    held = decode.pages.available
    decode.read(reading)
    assert key(0) not in decode.role._entries
    assert decode.pages.available == held + 1


def test_a_higher_key_that_does_not_fit_is_refused_and_the_lower_one_goes_on() -> None:
    decode = Decode(num_pages=6)
    decode.pages.reserve(1, Holder(HolderKind.REQUEST, "other"))
    decode.role.reserve(reserve_call(key(0)), 0.0)
    decode.announce(key(0), 0)
    (refused,) = of(decode.role.reserve(reserve_call(key(1), prefill=P2), 0.0), "Refused")
    assert refused.reason is Refusal.FULL
    assert state(decode, key(0)) is DState.PULL


def test_a_takeover_keeps_the_age_of_the_request() -> None:
    decode = Decode()
    decode.role.reserve(reserve_call(key(0)), 1.0)
    decode.role.reserve(reserve_call(key(1), prefill=P2), 5.0)
    assert decode.role._entries[key(1)].arrival == 1.0


def test_a_draining_worker_still_takes_the_next_epoch_of_what_it_holds() -> None:
    decode = Decode()
    decode.role.reserve(reserve_call(key(0)), 0.0)
    decode.core.drain()
    assert of(decode.role.reserve(reserve_call(key(1), prefill=P2), 0.0), "Reserved")
    (refused,) = of(decode.role.reserve(reserve_call(key(0, "other")), 0.0), "Refused")
    assert refused.reason is Refusal.DRAINING


def test_the_same_reserve_again_is_answered_again_with_all_tokens() -> None:
    decode = Decode()
    first = of(decode.role.reserve(reserve_call(key(0)), 0.0), "Reserved")
    assert of(decode.role.reserve(reserve_call(key(0)), 0.0), "Reserved") == first
    decode.verify(key(0), 0, 1, 2, 3)
    tokens = of(decode.finish(key(0), (0, 1, 2, 3)), "Token")
    again = decode.role.reserve(reserve_call(key(0)), 0.0)
    assert (of(again, "Reserved"), of(again, "Token")) == (first, tokens)
