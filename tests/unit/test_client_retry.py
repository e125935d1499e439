"""Which router gets a call, and whether and when a failed one is made again. On a clock of the test's own."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pdserve.client import Retry
from pdserve.client.pool import FIRST_REST_S, MAX_REMEMBERED, MAX_REST_S, Endpoint, Pool
from pdserve.client.retry import FIRST_WAIT_S, Tries
from pdserve.errors import (
    ConfigError,
    DeadlineExpired,
    Draining,
    InvalidRequest,
    Overloaded,
    PdserveError,
    Unavailable,
)


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def make(*names: str) -> tuple[Pool, Clock]:
    clock = Clock()
    return Pool([Endpoint(name, lambda: None) for name in names], clock), clock


def tries(pool: Pool, clock: Clock, *, deadline_s: float = 60.0, **changes: object) -> Tries:
    values: dict[str, object] = {"retry": Retry(attempts=3, max_wait_s=5.0), "chance": lambda: 0.0} | changes
    return Tries(pool=pool, deadline_at=clock.now + deadline_s, clock=clock, **values)  # type: ignore[arg-type]


def addresses(pool: Pool, count: int) -> list[str]:
    return [pool.take(()).address for _ in range(count)]


def test_the_router_with_the_fewest_calls_is_next() -> None:
    pool, _ = make("a", "b", "c")
    assert sorted(addresses(pool, 3)) == ["a", "b", "c"]
    b = pool.endpoints[1]
    pool.done(b)
    assert addresses(pool, 1) == ["b"]
    assert [each.outstanding for each in pool.endpoints] == [1, 1, 1]


def test_equal_routers_take_turns() -> None:
    pool, _ = make("a", "b")
    seen = []
    for _ in range(4):
        taken = pool.take(())
        seen.append(taken.address)
        pool.done(taken)
    assert seen == ["a", "b", "a", "b"]


def test_a_router_that_failed_rests_and_is_then_tried_by_one_call() -> None:
    pool, clock = make("a", "b")
    a = pool.endpoints[0]
    pool.failed(a)
    assert addresses(pool, 3) == ["b", "b", "b"]
    clock.now += FIRST_REST_S
    assert addresses(pool, 3) == ["a", "b", "b"]  # one call finds out
    pool.done(a)
    pool.answered(a)
    assert addresses(pool, 3) == ["a", "a", "a"]


def test_rests_double_up_to_a_limit_and_failures_together_count_once() -> None:
    pool, clock = make("a", "b")
    a = pool.endpoints[0]
    for _ in range(5):
        pool.failed(a)
    assert a.failures == 1
    rests = []
    for _ in range(12):
        clock.now = a.down_until
        pool.failed(a)
        rests.append(a.down_until - clock.now)
    assert rests[:3] == pytest.approx([2 * FIRST_REST_S, 4 * FIRST_REST_S, 8 * FIRST_REST_S])
    assert max(rests) == rests[-1] == pytest.approx(MAX_REST_S)


def test_when_all_rest_they_are_still_called() -> None:
    pool, _ = make("a", "b")
    for each in pool.endpoints:
        pool.failed(each)
    assert sorted(addresses(pool, 2)) == ["a", "b"]


def test_requests_are_asked_for_where_they_were_admitted() -> None:
    pool, _ = make("a", "b")
    pool.admitted("r", pool.endpoints[1])
    assert pool.asked_for("r") == (pool.endpoints[1],)
    assert pool.asked_for("other") == pool.endpoints
    for number in range(MAX_REMEMBERED):
        pool.admitted(str(number), pool.endpoints[0])
    assert pool.asked_for("r") == pool.endpoints


BUSY = Overloaded("busy", retry_after_s=1.5)
GONE = Unavailable("gone")


def test_a_refused_call_waits_as_the_server_says_and_gives_up_after_its_attempts() -> None:
    pool, clock = make("a")
    call = tries(pool, clock, chance=lambda: 1.0)
    waits = []
    for _ in range(3):
        call.take()
        waits.append(call.failed(BUSY, answered=True))
    assert waits == [pytest.approx(1.875), pytest.approx(1.875), None]
    assert pool.endpoints[0].failures == 0  # it answers


def test_without_a_hint_waits_double() -> None:
    pool, clock = make("a")
    call = tries(pool, clock, retry=Retry(attempts=4, max_wait_s=0.25))
    waits = []
    for _ in range(4):
        call.take()
        waits.append(call.failed(GONE, answered=False))
    assert waits == [FIRST_WAIT_S, 2 * FIRST_WAIT_S, 0.25, None]


def test_another_router_is_tried_at_once_and_does_not_count_as_an_attempt() -> None:
    pool, clock = make("a", "b", "c")
    call = tries(pool, clock, retry=Retry(attempts=2))
    order, waits = [], []
    for _ in range(6):
        order.append(call.take().address)
        waits.append(call.failed(GONE, answered=False))
    assert sorted(order[:3]) == sorted(order[3:]) == ["a", "b", "c"]
    assert waits == [0.0, 0.0, FIRST_WAIT_S, 0.0, 0.0, None]


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("no"),
        DeadlineExpired("late"),
        Overloaded("over a limit"),
        Overloaded("busy", retry_after_s=6.0),
    ],
)
def test_what_is_not_safe_or_not_wanted_is_not_made_again(error: PdserveError) -> None:
    pool, clock = make("a")
    call = tries(pool, clock)
    call.take()
    assert call.failed(error, answered=True) is None


def test_nothing_is_made_again_once_it_has_begun() -> None:
    pool, clock = make("a", "b")
    call = tries(pool, clock)
    call.take()
    assert call.failed(GONE, answered=False, begun=True) is None
    assert pool.endpoints[0].failures == 1


def test_what_a_server_may_have_carried_out_is_not_repeated() -> None:
    pool, clock = make("a", "b")
    call = tries(pool, clock, repeats=False)
    call.take()
    assert call.failed(GONE, answered=False) is None
    call = tries(pool, clock, repeats=False)
    call.take()
    assert call.failed(Unavailable("no worker", retry_after_s=1.0), answered=True) == 0.0


def test_the_deadline_bounds_all_tries() -> None:
    pool, clock = make("a")
    call = tries(pool, clock, deadline_s=2.0)
    call.take()
    assert call.failed(BUSY, answered=True) == 1.5
    clock.now += 1.5
    assert call.left_s() == 0.5
    call.take()
    assert call.failed(BUSY, answered=True) is None
    clock.now += 5.0
    assert call.left_s() == 0.0


def test_a_router_that_drains_is_left() -> None:
    pool, clock = make("a", "b")
    call = tries(pool, clock)
    left = call.take()
    assert call.failed(Draining("bye", retry_after_s=1.0), answered=True) == 0.0
    assert left.failures == 1
    assert call.take() is not left


def test_a_call_for_one_router_stays_there() -> None:
    pool, clock = make("a", "b")
    b = pool.endpoints[1]
    call = tries(pool, clock, only=b)
    assert call.take() is b
    assert call.failed(GONE, answered=False) == FIRST_WAIT_S
    assert call.take() is b


@pytest.mark.parametrize(
    "values", [{"attempts": 0}, {"attempts": 101}, {"max_wait_s": -1.0}, {"max_wait_s": float("nan")}]
)
def test_policies_have_bounds(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="retry"):
        Retry(**values)  # type: ignore[arg-type]
