"""Decode workers in doubt: one request at a time finds out whether there is room again."""

from __future__ import annotations

from pdserve.types import Key
from router.room import CAUTION_S, Room

D = 7
FIRST, SECOND = Key(request_id="a"), Key(request_id="b")


def test_a_worker_that_refused_is_left_alone_for_its_time() -> None:
    room = Room()
    room.refused(D, 10.0, 0.5)
    assert room.closed(10.4) == {D}
    assert room.closed(10.5) == set()


def test_one_probe_at_a_time_until_it_is_answered() -> None:
    room = Room()
    room.refused(D, 10.0, 0.1)
    assert room.closed(10.2) == set()
    room.tried(D, FIRST)
    assert room.closed(10.2) == {D}
    assert not room.answered(D, SECOND), "another's answer says nothing"
    assert room.closed(10.2) == {D}
    assert room.answered(D, FIRST)
    assert room.closed(10.2) == set()
    room.tried(D, SECOND)
    assert room.closed(10.3) == {D}


def test_the_end_of_a_request_reopens_before_time() -> None:
    room = Room()
    room.refused(D, 10.0, 5.0)
    room.freed(D)
    assert room.closed(10.0) == set()
    room.tried(D, FIRST)
    assert room.closed(10.1) == {D}, "still one at a time"


def test_without_refusals_for_a_while_it_is_a_worker_like_any_other() -> None:
    room = Room()
    room.refused(D, 10.0, 0.1)
    assert room.closed(10.0 + CAUTION_S) == set()
    room.tried(D, FIRST)
    room.tried(D, SECOND)
    assert room.closed(10.0 + CAUTION_S) == set()


def test_a_probe_that_is_not_answered_keeps_its_worker_closed_and_its_loss_forgets_both() -> None:
    room = Room()
    room.refused(D, 10.0, 0.1)
    room.tried(D, FIRST)
    assert room.closed(99.0) == {D}
    room.forget(D)
    assert room.closed(99.0) == set()
