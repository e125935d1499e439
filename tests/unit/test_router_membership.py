"""Members: registration, heartbeats, incarnations, suspicion, loss, and the router's own pauses."""

from __future__ import annotations

from dataclasses import replace

from pdserve.types import CapabilityRecord, ModelLimits, PeerRef, Role, WorkerLoad, WorkerRecord
from router.membership import MAX_TICK_GAP_S, Membership, MembershipConfig

CONFIG = MembershipConfig(suspect_after_s=4.0, lost_after_s=10.0)


def record(incarnation: int, name: str = "w", *, model: str = "m", tokenizer: str = "t") -> WorkerRecord:
    capability = CapabilityRecord(
        layout="l", numerics="n", model=model, tokenizer=tokenizer, dtype="float32", page_size=16,
        page_bytes=1, transports=(),
    )  # fmt: skip
    return WorkerRecord(
        peer=PeerRef(worker_id=name, incarnation=incarnation, control="127.0.0.1:1"),
        role=Role.DECODE,
        capability=capability,
        limits=ModelLimits(vocab_size=1, max_context=1, end_token_ids=(), bos_token_id=None),
        model_name="m",
        pool_pages=10,
        page_size=16,
    )


def joined(*records: WorkerRecord, now: float = 0.0) -> Membership:
    membership = Membership(CONFIG)
    for one in records:
        assert membership.register(one, 1000.0, now).problem is None
    return membership


def usable(membership: Membership, now: float) -> list[int]:
    return [m.incarnation for m in membership.members() if membership.is_usable(m, now)]


def tick_until(membership: Membership, start: float, end: float) -> list[int]:
    lost = []
    now = start
    while now <= end:
        lost += [one.peer.incarnation for one in membership.tick(now)]
        now += 0.5
    return lost


def test_a_silent_worker_is_suspect_and_then_lost() -> None:
    membership = joined(record(1), record(2, "x"))
    assert usable(membership, 3.9) == [1, 2]
    assert membership.heartbeat("x", 2, WorkerLoad(), 1003.0, 3.0)
    assert usable(membership, 4.0) == [2]
    assert membership.heartbeat("w", 1, WorkerLoad(), 1005.0, 5.0)
    assert usable(membership, 5.0) == [1, 2]
    assert tick_until(membership, 5.0, 14.5) == [2]
    assert not membership.heartbeat("x", 2, WorkerLoad(), 1015.0, 15.0)


def test_a_broken_stream_makes_suspect_until_the_next_heartbeat_and_releases_nothing() -> None:
    membership = joined(record(1))
    assert membership.broken("w", 1)
    assert usable(membership, 0.1) == []
    assert len(membership.members()) == 1
    assert membership.heartbeat("w", 1, WorkerLoad(), 1000.2, 0.2)
    assert usable(membership, 0.3) == [1]


def test_the_same_incarnation_may_register_again_even_after_it_was_lost() -> None:
    membership = joined(record(1))
    membership.broken("w", 1)
    again = membership.register(record(1), 1000.5, 1.0)
    assert (again.problem, again.replaced) == (None, None)
    member = membership.member("w", 1)
    assert member is not None
    assert member.its_time(1.0) == 1001.0  # this reading of its clock came late, the first did not
    assert usable(membership, 1.0) == [1]
    assert tick_until(membership, 1.0, 11.0) == [1]
    assert membership.register(record(1), 1012.0, 12.0).problem is None


def test_a_new_incarnation_replaces_and_the_old_one_never_comes_back() -> None:
    membership = joined(record(1))
    assert membership.register(record(2), 5.0, 1.0).replaced == record(1)
    assert not membership.heartbeat("w", 1, WorkerLoad(), 1001.0, 1.5)
    assert not membership.broken("w", 1)
    assert membership.leave("w", 1) is None
    assert membership.register(record(1), 1002.0, 2.0).problem is not None
    assert usable(membership, 2.0) == [2]


def test_not_ready_or_draining_is_not_usable() -> None:
    membership = joined(record(1))
    for load in (WorkerLoad(draining=True), WorkerLoad(ready=False)):
        membership.heartbeat("w", 1, load, 1001.0, 1.0)
        assert usable(membership, 1.0) == []
    membership.heartbeat("w", 1, WorkerLoad(), 1001.0, 1.0)
    assert usable(membership, 1.0) == [1]


def test_workers_of_another_model_or_tokenizer_are_refused_while_ours_are_there() -> None:
    membership = joined(record(1))
    for other in (record(2, "x", model="other"), record(2, "x", tokenizer="other")):
        assert membership.register(other, 0.0, 0.0).problem is not None
    assert membership.register(record(3, model="other"), 0.0, 0.0).problem is None
    assert membership.leave("w", 3) is not None
    assert membership.register(record(4, "y", model="third"), 0.0, 0.0).problem is None


def test_time_on_the_workers_clock_is_the_least_delayed_reading() -> None:
    membership = joined(record(1), now=50.0)
    member = membership.member("w", 1)
    assert member is not None
    assert member.its_time(60.0) == 1010.0
    membership.heartbeat("w", 1, WorkerLoad(), 1001.0, 51.5)  # late by half a second
    assert member.its_time(60.0) == 1010.0
    membership.heartbeat("w", 1, WorkerLoad(), 1002.2, 52.0)  # the first was late by 0.2 s
    assert abs(member.its_time(60.0) - 1010.2) < 1e-9


def test_our_own_pause_counts_against_nobody() -> None:
    membership = joined(record(1))
    membership.tick(0.0)
    assert membership.tick(30.0) == ()
    assert usable(membership, 30.0) == [1]
    assert tick_until(membership, 30.0 + MAX_TICK_GAP_S, 45.0) == [1]


def test_leaving_is_immediate() -> None:
    membership = joined(record(1), record(2, "x"))
    assert membership.leave("w", 1) == record(1)
    assert [m.incarnation for m in membership.members()] == [2]
    assert membership.register(replace(record(1)), 0.0, 0.0).problem is None
