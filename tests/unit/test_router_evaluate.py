"""How many texts may wait for a worker, in all and of one tenant."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from pdserve.errors import Overloaded
from router.config import RouterConfig
from router.evaluate import Line


def line(**settings: float) -> Line:
    return Line(RouterConfig(**settings))  # type: ignore[arg-type]


def test_texts_and_their_tokens_are_bounded_and_leave_room_again() -> None:
    waiting = line(max_queue=2, max_queue_tokens=100)
    with ExitStack() as stack:
        stack.enter_context(waiting.waiting("a", 60))
        with pytest.raises(Overloaded), waiting.waiting("b", 41):
            pass
        stack.enter_context(waiting.waiting("b", 40))
        with pytest.raises(Overloaded), waiting.waiting("c", 0):
            pass
    with waiting.waiting("c", 100):
        pass


def test_a_tenant_has_a_share_and_always_room_for_one() -> None:
    waiting = line(max_queue=4, max_queue_tokens=100, max_tenant_share=0.5)
    with waiting.waiting("a", 60):
        with pytest.raises(Overloaded), waiting.waiting("a", 1):
            pass
        with waiting.waiting("b", 10), waiting.waiting("b", 10):
            with pytest.raises(Overloaded), waiting.waiting("b", 10):
                pass
            with waiting.waiting("c", 10):
                pass
