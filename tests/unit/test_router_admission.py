"""The queue: order, bounds, deadlines, retry hints; against a plain sorted list."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import Overloaded
from router.admission import AdmissionQueue, QueueLimits, Waiting


def entry(n: int, *, priority: int = 0, tokens: int = 10, at: float = 0.0, deadline: float = 1e9) -> Waiting:
    return Waiting(
        request_id=str(n), priority=priority, arrival=n, tokens=tokens, queued_at=at, deadline_at=deadline
    )


def order(queue: AdmissionQueue) -> list[str]:
    return [waiting.request_id for waiting in queue]


def test_priority_first_then_arrival() -> None:
    queue = AdmissionQueue(QueueLimits())
    for n, priority in enumerate([0, 5, -1, 0, 5]):
        queue.offer(entry(n, priority=priority), 0.0)
    assert order(queue) == ["2", "0", "3", "1", "4"]


def test_a_retry_keeps_its_place_and_passes_the_bounds() -> None:
    queue = AdmissionQueue(QueueLimits(max_requests=2))
    first = entry(1)
    queue.offer(first, 0.0)
    queue.take("1", 0.0)
    for n in (2, 3):
        queue.offer(entry(n), 0.0)
    queue.requeue(replace(first, tried=True))
    assert order(queue) == ["1", "2", "3"]
    assert queue.expired(1e6) == (entry(2), entry(3))
    assert order(queue) == ["1"]


def test_who_was_only_refused_does_not_wait_for_ever() -> None:
    queue = AdmissionQueue(QueueLimits(max_wait_s=5.0))
    queue.offer(entry(1), 0.0)
    queue.take("1", 0.0)
    queue.requeue(entry(1))  # every worker was full or draining: nothing was started anywhere
    assert queue.expired(5.0) == (entry(1),)


@pytest.mark.parametrize("limits", [QueueLimits(max_requests=2), QueueLimits(max_tokens=20)])
def test_a_full_queue_sheds_the_newcomer_with_a_hint(limits: QueueLimits) -> None:
    queue = AdmissionQueue(limits)
    queue.offer(entry(1), 0.0)
    queue.offer(entry(2), 0.0)
    with pytest.raises(Overloaded) as caught:
        queue.offer(entry(3), 0.0)
    assert caught.value.retry_after_s is not None
    assert 0 < caught.value.retry_after_s <= 30
    assert order(queue) == ["1", "2"]


def test_a_more_urgent_one_takes_the_place_of_the_least_urgent() -> None:
    queue = AdmissionQueue(QueueLimits(max_requests=2))
    queue.offer(entry(1, priority=3), 0.0)
    queue.offer(entry(2, priority=1), 0.0)
    assert [w.request_id for w in queue.offer(entry(3), 0.0)] == ["1"]
    assert order(queue) == ["3", "2"]


def test_nothing_is_shed_for_a_request_that_does_not_fit_anyway() -> None:
    queue = AdmissionQueue(QueueLimits(max_tokens=30))
    queue.offer(entry(1, priority=1, tokens=10), 0.0)
    queue.offer(entry(2, priority=-1, tokens=15), 0.0)
    with pytest.raises(Overloaded):
        queue.offer(entry(3, tokens=25), 0.0)
    assert order(queue) == ["2", "1"]


def moving_queue(num: int, interval_s: float) -> tuple[AdmissionQueue, float]:
    """A queue of `num` that has been seen to move once per interval."""
    queue, now = AdmissionQueue(QueueLimits()), 0.0
    for n in range(num + 5):
        queue.offer(entry(n), 0.0)
    for n in range(5):
        now += interval_s
        queue.take(str(n), now)
    return queue, now


def test_who_would_miss_its_deadline_in_the_queue_is_shed_at_once() -> None:
    queue, now = moving_queue(10, 2.0)
    with pytest.raises(Overloaded) as caught:
        queue.offer(entry(90, deadline=now + 15.0), now)
    assert caught.value.retry_after_s == pytest.approx(11.0)
    queue.offer(entry(91, deadline=now + 25.0), now)
    queue.offer(entry(92, priority=-1, deadline=now + 1.0), now)
    assert order(queue)[0] == "92"


def test_an_idle_time_teaches_nothing_about_speed() -> None:
    queue = AdmissionQueue(QueueLimits())
    for n in range(5):
        queue.offer(entry(n), n * 100.0)
        queue.take(str(n), n * 100.0)
    queue.offer(entry(7), 500.0)
    queue.offer(entry(8, deadline=500.5), 500.0)
    assert order(queue) == ["7", "8"]


def test_waits_too_long() -> None:
    queue = AdmissionQueue(QueueLimits(max_wait_s=10.0))
    queue.offer(entry(1, at=0.0), 0.0)
    queue.offer(entry(2, at=5.0), 5.0)
    assert [w.request_id for w in queue.expired(10.0)] == ["1"]
    assert queue.expired(10.0) == ()
    assert order(queue) == ["2"]


@given(
    st.lists(st.tuples(st.sampled_from(["offer", "take", "remove"]), st.integers(-3, 3), st.integers(1, 40)))
)
def test_it_is_a_sorted_list_within_bounds(steps: list[tuple[str, int, int]]) -> None:
    queue = AdmissionQueue(QueueLimits(max_requests=8, max_tokens=120))
    model: list[Waiting] = []
    for n, (what, priority, tokens) in enumerate(steps):
        if what == "offer":
            new = entry(n, priority=priority, tokens=tokens)
            try:
                shed = queue.offer(new, 0.0)
            except Overloaded:
                continue
            assert all(w.priority > priority for w in shed)
            model = sorted([*(w for w in model if w not in shed), new], key=lambda w: w.rank)
        elif model:
            victim = model.pop(0 if what == "take" else n % len(model))
            first = queue.first()
            assert what == "remove" or first == victim
            assert (queue.take if what == "take" else lambda i, _: queue.remove(i))(
                victim.request_id, 0.0
            ) == victim
        assert list(queue) == model
        assert len(queue) <= 8
        assert sum(w.tokens for w in queue) <= 120


def test_a_tenant_has_its_share_of_the_queue_and_no_more() -> None:
    queue = AdmissionQueue(QueueLimits(max_requests=8, max_tokens=100, tenant_share=0.5))
    for n in range(4):
        queue.offer(replace(entry(n), tenant="loud"), 0.0)
    with pytest.raises(Overloaded, match="this tenant"):
        queue.offer(replace(entry(4, priority=-5), tenant="loud"), 0.0)
    queue.offer(replace(entry(5, tokens=55), tenant="calm"), 0.0)  # more than its tokens, but its only one
    with pytest.raises(Overloaded, match="this tenant"):
        queue.offer(replace(entry(6, tokens=1), tenant="calm"), 0.0)
    queue.requeue(replace(entry(7), tenant="loud", tried=True))
    queue.take("7", 0.0)
    queue.remove("0")
    queue.offer(replace(entry(8, tokens=5), tenant="loud"), 0.0)
    assert len(queue) == 5


def test_choices_of_one_request_leave_one_by_one() -> None:
    queue = AdmissionQueue(QueueLimits())
    choices = [replace(entry(1), request_id=name) for name in ("r", "r-1", "r-2")]
    for choice in choices:
        queue.requeue(choice)
    assert queue.remove("r-1") == choices[1]
    assert order(queue) == ["r", "r-2"]
