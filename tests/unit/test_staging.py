"""Memory for pages in flight: bounded, used again, and one page always fits."""

from __future__ import annotations

from decode_worker.staging import Staging


def test_slots_are_bounded_and_used_again() -> None:
    staging = Staging(limit_bytes=100)
    one, two = staging.take(40), staging.take(40)
    assert one is not None
    assert two is not None
    assert staging.take(40) is None
    one[:4] = b"here"
    staging.give(one)
    again = staging.take(40)
    assert again is one
    assert staging.used_bytes == 80


def test_a_page_over_the_limit_goes_alone() -> None:
    staging = Staging(limit_bytes=100)
    large = staging.take(500)
    assert large is not None
    assert large.nbytes == 500
    assert staging.take(10) is None
    staging.give(large)
    assert staging.take(10) is not None


def test_slots_of_other_sizes_make_room() -> None:
    staging = Staging(limit_bytes=100)
    old = [staging.take(30) for _ in range(3)]
    for slot in old:
        assert slot is not None
        staging.give(slot)
    found = [staging.take(50) for _ in range(2)]
    assert None not in found
    assert staging.used_bytes == 100
