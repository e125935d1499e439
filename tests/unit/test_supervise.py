"""The fleet's decisions: counts, back-off, draining, adoption. No process, no clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.fleet.spec import controller_name, fleet_and_role
from pdserve.fleet.supervise import HEALTHY_AFTER_S, Forget, Retire, SlotState, Start, Supervisor
from pdserve.types import Role

LOST = {"label": "worker_lost", "message": "gone"}


def make(prefill: int = 1, decode: int = 1) -> Supervisor:
    wanted = {Role.PREFILL: prefill, Role.DECODE: decode}
    return Supervisor(wanted, min_backoff_s=1.0, max_backoff_s=30.0)


def test_every_wanted_worker_is_started_once() -> None:
    fleet = make(2, 1)
    first = fleet.due(0.0)
    assert {c.worker_id for c in first} == {"prefill-0", "prefill-1", "decode-0"}
    assert fleet.due(0.0) == []
    assert not fleet.all_serving()
    for command in first:
        fleet.serving(command.worker_id, {}, 1.0)
    assert fleet.all_serving()


def test_a_worker_that_dies_at_every_start_is_tried_after_1_2_4_to_30_seconds() -> None:
    fleet, now, waits = make(1, 0), 0.0, []
    for _ in range(8):
        assert fleet.due(now) == [Start(worker_id="prefill-0", role=Role.PREFILL)]
        fleet.ended("prefill-0", LOST, now)
        due = fleet.next_due()
        assert due is not None
        waits.append(due - now)
        assert fleet.due(due - 0.01) == []
        now = due
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]
    assert fleet.slots["prefill-0"].restarts == 8


def test_a_worker_that_served_long_enough_starts_its_back_off_again() -> None:
    fleet, now = make(1, 0), 0.0
    for served, wait in ((0.1, 1.0), (0.1, 2.0), (HEALTHY_AFTER_S, 1.0), (0.1, 2.0)):
        fleet.due(now)
        fleet.serving("prefill-0", {}, now)
        fleet.ended("prefill-0", LOST, now + served)
        assert fleet.next_due() == now + served + wait
        now += served + wait


def test_a_worker_that_ended_its_own_incarnation_starts_again_at_once() -> None:
    fleet = make(1, 0)
    fleet.due(0.0)
    fleet.serving("prefill-0", {}, 0.0)
    fleet.ended("prefill-0", None, 1.0, retired=True)
    assert fleet.due(1.0) == [Start(worker_id="prefill-0", role=Role.PREFILL)]
    slot = fleet.slots["prefill-0"]
    assert (slot.failures, slot.restarts) == (0, 1)


def test_scaling_down_retires_the_youngest_and_up_fills_the_gap() -> None:
    fleet = make(0, 3)
    for command in fleet.due(0.0):
        fleet.serving(command.worker_id, {}, 0.0)
    fleet.scale(Role.DECODE, 1)
    assert fleet.due(1.0) == [Retire(worker_id="decode-1"), Retire(worker_id="decode-2")]
    assert fleet.due(1.0) == []
    fleet.ended("decode-1", None, 2.0)
    fleet.scale(Role.DECODE, 2)
    assert fleet.due(2.0) == [Start(worker_id="decode-1", role=Role.DECODE)]


def test_a_draining_worker_that_dies_is_not_replaced() -> None:
    fleet = make(2, 0)
    fleet.due(0.0)
    assert fleet.drain("prefill-0", 1.0) == Retire(worker_id="prefill-0")
    assert fleet.drain("prefill-0", 1.0) is None
    assert fleet.drain("unheard", 1.0) is None
    fleet.ended("prefill-0", LOST, 2.0)
    assert fleet.due(100.0) == []
    assert set(fleet.slots) == {"prefill-1"}


def test_adopted_workers_count_and_are_not_started_again() -> None:
    fleet = make(1, 1)
    fleet.adopt("prefill-0", Role.PREFILL, 0.0)
    assert fleet.due(0.0) == [Start(worker_id="decode-0", role=Role.DECODE)]
    fleet.serving("prefill-0", {"pid": 7}, 0.0)
    assert fleet.slots["prefill-0"].state is SlotState.SERVING


def test_a_moved_worker_is_replaced_under_another_name_at_once() -> None:
    fleet = make(0, 1)
    for command in fleet.due(0.0):
        fleet.serving(command.worker_id, {}, 0.0)
    assert fleet.enough_serving()
    assert fleet.move("decode-0", 1.0) == Retire(worker_id="decode-0")
    assert fleet.move("decode-0", 1.0) is None
    assert fleet.due(1.0) == [Start(worker_id="decode-1", role=Role.DECODE)]
    assert not fleet.enough_serving()
    fleet.serving("decode-1", {}, 2.0)
    assert fleet.enough_serving()
    assert not fleet.all_serving()
    fleet.ended("decode-0", None, 3.0)
    assert fleet.all_serving()
    assert fleet.restarts[Role.DECODE] == 0


def test_a_slot_between_two_tries_stays_until_its_place_is_given_back() -> None:
    fleet = make(0, 2)
    fleet.due(0.0)
    for worker_id in ("decode-0", "decode-1"):
        fleet.ended(worker_id, LOST, 0.0)
    assert fleet.move("decode-0", 0.1) == Forget(worker_id="decode-0")
    assert fleet.move("decode-0", 0.1) is None
    assert fleet.due(0.1) == [Start(worker_id="decode-2", role=Role.DECODE)]
    fleet.ended("decode-0", None, 0.2)
    assert fleet.drain("decode-1", 0.3) == Forget(worker_id="decode-1")
    fleet.ended("decode-1", None, 0.4)
    assert fleet.slots.keys() == {"decode-2"}
    assert fleet.restarts[Role.DECODE] == 2


def test_restarts_are_counted_by_role_for_good() -> None:
    fleet = make(1, 1)
    fleet.due(0.0)
    fleet.ended("decode-0", LOST, 1.0)
    fleet.scale(Role.DECODE, 0)
    fleet.due(1.0)
    fleet.ended("decode-0", None, 1.0)
    assert fleet.slots.keys() == {"prefill-0"}
    assert (fleet.restarts[Role.DECODE], fleet.restarts[Role.PREFILL]) == (1, 0)


@given(
    st.from_regex(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True) | st.just(""), st.sampled_from(Role)
)
def test_workers_tell_their_fleet_and_role(name: str, role: Role) -> None:
    fleet = Supervisor({role: 1}, min_backoff_s=1.0, max_backoff_s=30.0, fleet=name)
    (start,) = fleet.due(0.0)
    assert fleet_and_role(start.worker_id) == (name, role)
    assert len({controller_name(name), controller_name(f"{name}x")}) == 2


EVENTS = st.one_of(
    st.tuples(st.just("scale"), st.sampled_from([Role.PREFILL, Role.DECODE]), st.integers(0, 4)),
    st.tuples(st.just("serving"), st.integers(0, 7), st.none()),
    st.tuples(st.just("ended"), st.integers(0, 7), st.none()),
    st.tuples(st.just("drain"), st.integers(0, 7), st.none()),
    st.tuples(st.just("wait"), st.floats(0, 40), st.none()),
)


@given(st.lists(EVENTS, max_size=60))
def test_after_any_events_the_slots_are_what_is_wanted(events: list[tuple[str, object, object]]) -> None:
    fleet, now = make(2, 2), 0.0
    running: set[str] = set()

    def carry_out() -> None:
        for command in fleet.due(now):
            if isinstance(command, Start):
                assert command.worker_id not in running, "two processes in one slot"
                running.add(command.worker_id)

    carry_out()
    for name, value, extra in events:
        chosen = (
            sorted(fleet.slots)[value % len(fleet.slots)] if isinstance(value, int) and fleet.slots else ""
        )
        if name == "scale":
            assert isinstance(value, Role)
            assert isinstance(extra, int)
            fleet.scale(value, extra)
        elif name == "serving":
            fleet.serving(chosen, {}, now)
        elif name == "ended" and chosen in running:
            running.discard(chosen)
            fleet.ended(chosen, LOST, now)
        elif name == "drain":
            fleet.drain(chosen, now)
        elif name == "wait":
            assert isinstance(value, float)
            now += value
        carry_out()
        for role in Role:
            live = [s for s in fleet.slots.values() if s.role is role and s.state is not SlotState.RETIRING]
            assert len(live) == fleet.wanted[role]
        assert running <= set(fleet.slots)
