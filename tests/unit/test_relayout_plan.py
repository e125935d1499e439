"""Re-layout plans: what a layout may be, what can be bridged, how few copies there are, and that a wrong plan
is found out before a byte moves."""

from __future__ import annotations

import dataclasses
import itertools
import types
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.plan import FULL, LayerKind, RelayoutPlan, ReplicaLayout, bridge_problem, compile_plan
from kvtransfer.plan.order import parse_order
from kvtransfer.plan.prove import prove
from kvtransfer.relay import NativeRelayout, PlainRelayout
from pdserve.errors import Incompatible, InternalError
from pdserve.kernels.kv_view import inner_layout
from pdserve.kvcache.layout import PageLayout
from pdserve.parallel.shards import shards
from tests.support.relayout_kit import (
    KERNEL_BF16,
    KERNEL_F32,
    PLAIN,
    blank,
    heads_for,
    layout,
    pages_of,
    same,
    values,
)

DEFAULT = {"head_dim": 64, "layers": (FULL,) * 30}
ORDERS = (KERNEL_F32, KERNEL_BF16, PLAIN, "v[d,s,h] k[s/2,h,2,d]", "k[d,h,s/2,2] v[s,d/2,h,2]")


def copies(source: ReplicaLayout, target: ReplicaLayout) -> int:
    return len(compile_plan(source, target).copies)


@pytest.mark.parametrize(
    "tag",
    ["", "k", "k[h,s]", "k[s,d,c]", "k[h,d]", "k[h,s,d,d]", "k[h,s/2,d]", "k[h,s,d,2]", "k[h,s,d] k[h,s,d]"],
)
def test_what_is_no_inner_order(tag: str) -> None:
    with pytest.raises(ValueError, match=r"order|dim|axis|name"):
        parse_order(tag)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"page_size": 0}, "page_size must be at least 1"),
        ({"dtype": "float16"}, "dtype must be one of"),
        ({"layers": ()}, "own"),
        ({"layers": (LayerKind(shares=0),)}, "own"),
        ({"layers": (FULL, LayerKind(shares=2), FULL)}, "layer 1 must share"),
        ({"layers": (FULL, LayerKind(window=-1))}, "layer 1 has a negative window"),
        ({"inner": "latent[s,c]"}, "num_kv_heads must be 1"),
        ({"ranks": ()}, "needs ranks"),
        ({"ranks": ((range(3),), ())}, "each of them a KV head"),
        ({"ranks": ((range(2), range(1, 3)),)}, "a KV head twice"),
        ({"ranks": ((range(0, 3, 1), range(2, 0, -1)),)}, "step 1"),
        ({"ranks": ((range(2),),)}, "KV heads 0 to 2, all and no others"),
        ({"ranks": ((range(4),),)}, "KV heads 0 to 2, all and no others"),
        ({"inner": KERNEL_BF16, "page_size": 15}, "cuts s by 2, which does not divide 15"),
    ],
)
def test_what_is_no_layout(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        layout("f32", 1, 16, **change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": (FULL,) * 3}, "number of layers differs: 2 at the source, 3 at the target"),
        ({"num_kv_heads": 2, "ranks": heads_for(1, 2)}, "number of KV heads differs: 3 at the source, 2"),
        ({"head_dim": 8}, "head dim differs: 4 at the source, 8"),
        ({"inner": "c[s,h,d]"}, "set of parts differs: k v at the source, c at the target"),
        ({"dtype": "bfloat16"}, "allow converting pages"),
        ({"layers": (FULL, LayerKind(window=8))}, "layer 1 has window 0 at the source and 8"),
        ({"inner": "k[h,d/4,s,4] v[h,s/3,d,3]", "page_size": 48}, "cut through the tiles"),
        ({"inner": "k[s,h,d] v[s,h,d]", "page_size": 1021}, "begin together too seldom"),
    ],
)
def test_what_can_not_be_bridged_is_said_in_words(change: dict[str, Any], words: str) -> None:
    source, target = layout("f32", 1, 16, inner="k[s,h,d/2,2] v[s/2,h,d,2]"), layout("f32", 1, 16, **change)
    problem = bridge_problem(source, target)
    assert problem is not None
    assert words in problem
    with pytest.raises(Incompatible, match=words):
        compile_plan(source, target)


def test_tiles_must_nest() -> None:
    two, three = (layout("f32", 1, 16, head_dim=6, inner=f"k[s,h,d/{n},{n}] v[s,h,d]") for n in (2, 3))
    assert "do not nest" in (bridge_problem(two, three) or "")


def test_layers_that_share_differently_are_refused() -> None:
    kinds = [(FULL, FULL, LayerKind(shares=layer)) for layer in (0, 1)]
    one, other = (layout("f32", 1, 16, layers=layers) for layers in kinds)
    assert "layer 2 shares layer 0 at the source and 1" in (bridge_problem(one, other) or "")


def test_the_shards_of_a_model_are_ranks() -> None:
    model = types.SimpleNamespace(num_heads=9, num_kv_heads=3, intermediate_size=1536, vocab_size=49152)
    sides = [
        layout("bf16", 1, size, ranks=tuple((shard.kv_heads,) for shard in shards(model, tp)), **DEFAULT)
        for tp, size in itertools.product(range(1, 10), (16, 32))
    ]
    for source, target in itertools.product(sides, sides):
        assert bridge_problem(source, target) is None


def test_conversion_is_asked_for() -> None:
    one, other = layout("f32", 1, 16), layout("bf16", 2, 32)
    assert bridge_problem(one, other, convert=True) is None
    assert compile_plan(one, other, convert=True).convert
    assert not compile_plan(one, layout("f32", 2, 32), convert=True).convert


def test_equal_layouts_are_one_copy_of_a_page() -> None:
    for variant in ("f32", "bf16", "f32-plain"):
        of = layout(variant, 1, 16, **DEFAULT)
        (copy,) = compile_plan(of, of).copies
        assert [loop.extent for loop in copy.loops] == [of.page_elems(0)]
        assert (copy.loops[0].source, copy.loops[0].target) == (1, 1)


def test_copies_are_few() -> None:
    for variant in ("f32", "bf16"):
        by_tp = [layout(variant, tp, 16, **DEFAULT) for tp in (1, 2, 3, 4)]
        large = layout(variant, 1, 32, **DEFAULT)
        # One for each pair of ranks that share heads: K and V of all layers are one strided copy.
        assert [copies(by_tp[0], other) for other in by_tp] == [1, 2, 3, 4]
        assert [copies(other, by_tp[0]) for other in by_tp] == [1, 2, 3, 3]
        # Another page size: K and V differ in where rows lie, so one each for each pair of pages.
        assert copies(by_tp[0], large) == copies(large, by_tp[0]) == 4
        assert copies(by_tp[2], large) == 12


def test_heads_are_read_once_and_evenly() -> None:
    everybody = (range(4),)
    source = layout("f32", 1, 16, num_kv_heads=4, ranks=(everybody, everybody))
    target = layout("f32", 1, 16, num_kv_heads=4, ranks=(everybody,))
    plan = compile_plan(source, target)
    elements = dict.fromkeys(range(2), 0)
    for copy in plan.copies:
        elements[copy.source[0]] += int(np.prod([loop.extent for loop in copy.loops]))
    assert elements[0] == elements[1]


def test_turns_read_other_replicas_of_a_head() -> None:
    source, target = layout("f32", 4, 16), layout("f32", 1, 16)  # two ranks have KV head 0
    read = [{rank for rank, _ in compile_plan(source, target, turn=n).source_pages(16)} for n in (0, 1)]
    assert read == [{0, 2, 3}, {1, 2, 3}]


def test_the_pages_that_exist_for_a_number_of_tokens() -> None:
    plan = compile_plan(layout("f32", 2, 16), layout("f32", 1, 48))
    assert plan.span_tokens == 48
    assert plan.source_pages(17) == ((0, 0), (1, 0), (0, 1), (1, 1))
    assert plan.target_pages(17) == ((0, 0),)
    with pytest.raises(ValueError, match="1 to 48 tokens, not 0"):
        plan.source_pages(0)


def test_source_pages_whose_rows_the_target_has_are_not_read() -> None:
    plan = compile_plan(layout("f32", 1, 16), layout("f32", 1, 32))
    wider = compile_plan(layout("f32", 1, 32), layout("f32", 1, 16))
    assert plan.source_pages(32, frozenset({0})) == plan.target_pages(32, frozenset({0})) == ()
    assert wider.source_pages(32, frozenset({0})) == ((0, 0),)
    assert wider.target_pages(32, frozenset({0})) == ((0, 1),)
    assert wider.source_pages(16, frozenset({0})) == wider.target_pages(16, frozenset({0})) == ()


def test_latent_rows_are_moved_whole() -> None:
    """Rows [S, C] of all heads, which every rank has (kernels/latent.py)."""
    fields = {"num_layers": 2, "num_kv_heads": 1, "head_dim": 12, "dtype": "float32"}
    pools = [
        PageLayout(**fields, page_size=size, inner=inner_layout("float32", latent=True)) for size in (16, 32)
    ]
    plan = compile_plan(
        ReplicaLayout.of(pools[0], [range(1)] * 2), ReplicaLayout.of(pools[1], [range(1)] * 3)
    )
    assert plan.source.page_bytes(0) == pools[0].page_bytes
    assert len({copy.source[0] for copy in plan.copies}) == 1
    rows_LTC = np.arange(2 * 32 * 24, dtype=np.float32).reshape(2, 32, 24)
    for executor in (NativeRelayout, PlainRelayout):
        got = blank(plan.target, 1)
        executor(plan).execute(
            source_pages={
                at: memoryview(rows_LTC[:, 16 * at[1] : 16 * at[1] + 16].tobytes())
                for at in plan.source_pages(32)
            },
            target_pages={at: memoryview(page).cast("B") for at, page in got.items()},
            num_tokens=32,
        )
        assert all(np.array_equal(page.view(np.float32), rows_LTC.reshape(-1)) for page in got.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_replica_of_a_pools_pages(dtype: str) -> None:
    pages = PageLayout(
        num_layers=2, num_kv_heads=3, head_dim=4, page_size=16, dtype=dtype, inner=inner_layout(dtype)
    )
    one = ReplicaLayout.of(pages, [range(3)])
    assert one == layout({"float32": "f32", "bfloat16": "bf16"}[dtype], 1, 16)
    assert one.page_bytes(0) == pages.page_bytes
    split = ReplicaLayout.of(pages, [range(2), range(2, 3)])
    assert [split.page_bytes(rank) for rank in (0, 1)] == [
        dataclasses.replace(pages, num_kv_heads=heads).page_bytes for heads in (2, 1)
    ]


def broken(plan: RelayoutPlan, how: str) -> RelayoutPlan:
    """A plan with one copy that is not right."""
    first = plan.copies[0]
    changed = {
        "lost": (),
        "twice": (first, first),
        "shifted source": (dataclasses.replace(first, source_start=first.source_start + 1),),
        "shifted target": (dataclasses.replace(first, target_start=first.target_start + 1),),
        "stretched": (
            dataclasses.replace(first, loops=(*first.loops[:-1], first.loops[-1]._replace(source=2))),
        ),
        "backwards": (
            dataclasses.replace(first, loops=(*first.loops[:-1], first.loops[-1]._replace(source=-1))),
        ),
        "other page": (dataclasses.replace(first, source=plan.copies[-1].source),),
        "no page": (dataclasses.replace(first, target=(0, 7)),),
    }
    return dataclasses.replace(plan, copies=(*changed[how], *plan.copies[1:]))


BROKEN = (
    *("lost", "twice", "shifted source", "shifted target", "stretched", "backwards", "other page", "no page"),
)


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("executor", [NativeRelayout, PlainRelayout])
def test_a_wrong_plan_is_never_carried_out(how: str, executor: type[NativeRelayout]) -> None:
    plan = compile_plan(layout("f32", 3, 16), layout("f32", 2, 32))
    prove(plan)
    with pytest.raises(InternalError, match="re-layout plan"):
        executor(broken(plan, how))


@st.composite
def head_ranges(draw: st.DrawFn, num_heads: int) -> tuple[tuple[range, ...], ...]:
    """Heads in any order, cut into ranks; some on several of them."""
    order = draw(st.permutations(range(num_heads)))
    cuts = sorted(draw(st.sets(st.integers(1, num_heads - 1), max_size=2))) if num_heads > 1 else []
    ranks = [list(order[low:high]) for low, high in zip([0, *cuts], [*cuts, num_heads], strict=True)]
    for rank in ranks:
        rank += [head for head in range(num_heads) if head not in rank and draw(st.booleans())]
    return tuple(tuple(range(head, head + 1) for head in rank) for rank in ranks)


@st.composite
def layer_kinds(draw: st.DrawFn) -> tuple[tuple[LayerKind, ...], tuple[LayerKind, ...]]:
    """Two replicas' kinds of one model: either may store what the other shares."""
    both: tuple[list[LayerKind], list[LayerKind]] = ([LayerKind()], [LayerKind()])
    for number in range(1, draw(st.integers(1, 4))):
        window = draw(st.sampled_from([0, 5]))
        owners = [n for n in range(number) if all(kinds[n].shares is None for kinds in both)]
        shared = draw(st.sampled_from(owners))
        for kinds in both:
            kinds.append(LayerKind(window=window, shares=shared if draw(st.booleans()) else None))
    return tuple(both[0]), tuple(both[1])


@given(data=st.data())
def test_any_heads_and_layers_are_bit_exact(data: st.DataObject) -> None:
    num_heads, kinds = data.draw(st.integers(1, 5)), data.draw(layer_kinds())
    sides = [
        ReplicaLayout(
            page_size=data.draw(st.sampled_from([2, 4, 6, 10])), head_dim=4, num_kv_heads=num_heads,
            dtype="bfloat16", inner=data.draw(st.sampled_from(ORDERS)), layers=kinds[side],
            ranks=data.draw(head_ranges(num_heads)),
        )
        for side in (0, 1)
    ]  # fmt: skip
    plan = compile_plan(*sides)
    arrays = values("bfloat16", len(kinds[0]), plan.span_tokens, num_heads, 4)
    stored = {
        name: bits[[sides[0].home(layer) for layer in range(len(kinds[0]))]] for name, bits in arrays.items()
    }
    source = pages_of(sides[0], plan.span_tokens // sides[0].page_size, stored)
    wanted = pages_of(sides[1], plan.span_tokens // sides[1].page_size, stored)
    for executor in (NativeRelayout, PlainRelayout):
        got = blank(sides[1], plan.span_tokens // sides[1].page_size)
        executor(plan).execute(
            source_pages={at: memoryview(source[at]).cast("B") for at in plan.source_pages(plan.span_tokens)},
            target_pages={at: memoryview(page).cast("B") for at, page in got.items()},
            num_tokens=plan.span_tokens,
        )
        assert all(same(page, wanted[at]) for at, page in got.items())
