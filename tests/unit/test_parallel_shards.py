"""Shards of a model by rank: nothing is missing, nothing is twice that should be once, nobody is idle."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import ConfigError
from pdserve.parallel.shards import MLP_UNIT, Shard, shards, split


@dataclass(frozen=True)
class Sizes:
    """A model's sizes; the default model's unless said otherwise."""

    num_heads: int = 9
    num_kv_heads: int = 3
    intermediate_size: int = 1536
    vocab_size: int = 49152


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    kv_heads, group = draw(st.integers(1, 12)), draw(st.integers(1, 8))
    return Sizes(
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        intermediate_size=draw(st.integers(1, 300)),
        vocab_size=draw(st.integers(1, 300)),
    )


def heads_of(plan: tuple[Shard, ...]) -> list[tuple[list[int], list[int]]]:
    return [(list(s.heads), list(s.kv_heads)) for s in plan]


def test_the_default_models_heads() -> None:
    assert heads_of(shards(Sizes(), 1)) == [([*range(9)], [0, 1, 2])]
    assert heads_of(shards(Sizes(), 2)) == [([0, 1, 2, 3, 4, 5], [0, 1]), ([6, 7, 8], [2])]
    assert heads_of(shards(Sizes(), 3)) == [([0, 1, 2], [0]), ([3, 4, 5], [1]), ([6, 7, 8], [2])]
    assert heads_of(shards(Sizes(), 4)) == [([0, 1], [0]), ([2], [0]), ([3, 4, 5], [1]), ([6, 7, 8], [2])]
    assert all(len(heads) == 1 for heads, _ in heads_of(shards(Sizes(), 9)))


@given(sizes(), st.integers(1, 40))
def test_every_part_is_complete_and_nobody_is_idle(shape: Sizes, size: int) -> None:
    if size > min(shape.num_heads, shape.intermediate_size, shape.vocab_size):
        with pytest.raises(ConfigError, match="tp: "):
            shards(shape, size)
        return
    plan = shards(shape, size)
    assert [s.rank for s in plan] == list(range(size))
    for name, total in (
        ("heads", shape.num_heads),
        ("mlp", shape.intermediate_size),
        ("vocab", shape.vocab_size),
    ):
        parts = [getattr(s, name) for s in plan]
        assert [i for part in parts for i in part] == list(range(total))
        assert all(parts)


@given(sizes(), st.integers(1, 40))
def test_a_query_head_lies_where_its_keys_are(shape: Sizes, size: int) -> None:
    size = min(size, shape.num_heads, shape.intermediate_size, shape.vocab_size)
    plan, group = shards(shape, size), shape.num_heads // shape.num_kv_heads
    for s in plan:
        assert list(s.kv_heads) == sorted({head // group for head in s.heads})
        assert len(s.heads) % len(s.kv_heads) == 0
    copies = [sum(kv in s.kv_heads for s in plan) for kv in range(shape.num_kv_heads)]
    assert max(copies) - min(copies) <= 1
    assert size > shape.num_kv_heads or max(copies) == 1


@given(st.integers(1, 5000), st.integers(1, 64), st.sampled_from([1, 4, MLP_UNIT]))
def test_runs_differ_by_one_unit_at_most(total: int, parts: int, unit: int) -> None:
    runs = split(total, parts, unit)
    step = unit if total // unit >= parts else 1
    lengths = [len(run) for run in runs]
    assert sum(lengths) == total
    assert max(lengths) - min(lengths) < 2 * step
    assert all(run.start % step == 0 for run in runs if run)


def test_no_rank_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        shards(Sizes(), 0)
