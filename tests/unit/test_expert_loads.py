"""The window of expert loads: halves with time, whatever the clock's start and however long it runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import ConfigError
from pdserve.parallel.expert_loads import LoadWindow

Events = list[tuple[float, list[int]]]


@given(
    st.lists(
        st.tuples(st.floats(0, 2000), st.lists(st.integers(0, 1000), min_size=3, max_size=3)), max_size=20
    ),
    st.floats(-1e6, 1e6),
)
def test_a_count_halves_every_half_life(events: Events, start: float) -> None:
    window = LoadWindow(2, 3, half_life_s=10.0)
    now = start
    counted: list[tuple[float, list[int]]] = []
    for wait, counts in events:
        now += wait
        window.add(1, counts, now)
        counted.append((now, counts))
    expected = [sum(counts[e] * 0.5 ** ((now - at) / 10.0) for at, counts in counted) for e in range(3)]
    loads = window.loads(now)
    assert loads[0] == (0.0, 0.0, 0.0)
    assert loads[1] == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_reading_changes_nothing_and_time_does_not_go_back() -> None:
    window = LoadWindow(1, 2, half_life_s=1.0)
    window.add(0, [8, 0], 5.0)
    assert window.loads(6.0) == window.loads(6.0) == ((4.0, 0.0),)
    window.add(0, [0, 2], 3.0)
    assert window.loads(6.0) == ((4.0, 2.0),)


def test_wrong_shapes_are_refused() -> None:
    for layers, experts, half_life in ((0, 1, 1.0), (1, 0, 1.0), (1, 1, 0.0), (1, 1, float("nan"))):
        with pytest.raises(ConfigError):
            LoadWindow(layers, experts, half_life)
    with pytest.raises(ConfigError, match="3 counts for 2"):
        LoadWindow(1, 2, 1.0).add(0, [1, 2, 3], 0.0)
