"""Both executors of re-layout plans against plain arrays: every pair of TP, page size, inner order and
dtype."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from kvtransfer.plan import FULL, LayerKind, RelayoutPlan, ReplicaLayout, compile_plan
from kvtransfer.relay import NativeRelayout, PlainRelayout
from pdserve.errors import InternalError
from pdserve.kernels.kv_view import KVView, inner_layout, read_kv
from tests.support.relayout_kit import (
    BITS,
    UNTOUCHED,
    VARIANTS,
    Bits,
    as_dtype,
    blank,
    layout,
    pages_of,
    same,
    values,
)

EXECUTORS = (NativeRelayout, PlainRelayout)
SIZES, TPS, TOKENS = (16, 32, 64), (1, 2, 3, 4), 64
LINE = 64


@functools.cache
def pages(of: ReplicaLayout, dtype: str) -> dict[tuple[int, int], Bits]:
    """Pages of 64 tokens whose values come from `dtype`."""
    arrays = {name: as_dtype(bits, of.dtype) for name, bits in values(dtype, 2, TOKENS, 3, 4).items()}
    return pages_of(of, TOKENS // of.page_size, arrays)


@functools.cache
def filled(of: ReplicaLayout, num_tokens: int) -> dict[tuple[int, int], Bits]:
    """Which elements of the pages are of the first tokens."""
    mask = np.zeros((2, TOKENS, 3, 4), bool)
    mask[:, :num_tokens] = True
    return pages_of(of, TOKENS // of.page_size, {"k": mask, "v": mask})


def views(
    found: Mapping[tuple[int, int], Bits], wanted: tuple[tuple[int, int], ...]
) -> dict[Any, memoryview]:
    return {at: memoryview(found[at]).cast("B") for at in wanted}


def check(executor: type[NativeRelayout] | type[PlainRelayout], plan: RelayoutPlan, num_tokens: int) -> None:
    got = blank(plan.target, plan.span_tokens // plan.target.page_size)
    sources = views(pages(plan.source, plan.source.dtype), plan.source_pages(num_tokens))
    written = plan.target_pages(num_tokens)
    executor(plan).execute(source_pages=sources, target_pages=views(got, written), num_tokens=num_tokens)
    wanted, mask = pages(plan.target, plan.source.dtype), filled(plan.target, num_tokens)
    for at, page in got.items():
        if at in written:
            assert same(page[mask[at]], wanted[at][mask[at]]), (executor, plan.source, plan.target, at)
        else:
            assert (page.view(np.uint8) == UNTOUCHED).all()


@pytest.mark.parametrize("variants", list(itertools.product(VARIANTS, VARIANTS)), ids=" to ".join)
def test_every_pair_of_layouts_is_bit_exact(variants: tuple[str, str]) -> None:
    numbers = itertools.count()
    for tp, other_tp, size, other_size in itertools.product(TPS, TPS, SIZES, SIZES):
        plan = compile_plan(
            layout(variants[0], tp, size), layout(variants[1], other_tp, other_size), convert=True
        )
        for executor in EXECUTORS:
            check(executor, plan, plan.span_tokens - next(numbers) % plan.span_tokens)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_every_number_of_tokens(executor: type[NativeRelayout]) -> None:
    for sizes in ((16, 32), (32, 16), (64, 16)):
        plan = compile_plan(layout("f32", 2, sizes[0]), layout("f32", 3, sizes[1]))
        for num_tokens in range(1, plan.span_tokens + 1):
            check(executor, plan, num_tokens)


REAL = (
    *(("f32", "f32"), ("f32", "f32-plain"), ("f32", "bf16"), ("f32", "bf16-plain"), ("f32-plain", "f32")),
    *(
        ("bf16", "bf16"),
        ("bf16", "bf16-plain"),
        ("bf16", "f32"),
        ("bf16", "f32-plain"),
        ("bf16-plain", "bf16"),
    ),
)


@pytest.mark.smoke
@pytest.mark.parametrize("offset", [0, 4, 32])
@pytest.mark.parametrize("variants", REAL, ids=" to ".join)
def test_real_sizes_at_any_address(variants: tuple[str, str], offset: int) -> None:
    wide = {"head_dim": 64, "layers": (FULL,) * 3}
    for tps, sizes in itertools.product([(1, 1), (1, 3), (3, 2)], [(16, 16), (16, 32), (32, 16)]):
        plan = compile_plan(
            layout(variants[0], tps[0], sizes[0], **wide),
            layout(variants[1], tps[1], sizes[1], **wide),
            convert=True,
        )
        random = np.random.default_rng(3)
        sources = {
            at: random.integers(0, 256, plan.source.page_bytes(at[0]), np.uint8)
            for at in plan.source_pages(plan.span_tokens)
        }
        results = [relaid(executor, plan, sources, offset) for executor in EXECUTORS]
        assert all(np.array_equal(results[0][at], results[1][at]) for at in results[0])


def relaid(
    executor: type[NativeRelayout] | type[PlainRelayout], plan: RelayoutPlan, sources: Any, offset: int
) -> dict[tuple[int, int], Bits]:
    """Target pages that begin `offset` bytes behind a cache line, with untouched guards around them."""
    memory, targets = {}, {}
    for at in plan.target_pages(plan.span_tokens):
        size = plan.target.page_bytes(at[0])
        memory[at] = np.full(size + 3 * LINE, UNTOUCHED, np.uint8)
        start = -memory[at].ctypes.data % LINE + offset
        targets[at] = memoryview(memory[at])[start : start + size]
    addresses = {at: page.ctypes.data for at, page in sources.items()}
    executor(plan).execute(source_pages=addresses, target_pages=targets, num_tokens=plan.span_tokens)
    for at, page in targets.items():
        start = -memory[at].ctypes.data % LINE + offset
        rest = np.concatenate([memory[at][:start], memory[at][start + len(page) :]])
        assert (rest == UNTOUCHED).all()
    return {at: np.array(page) for at, page in targets.items()}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_source_pages_may_come_one_by_one(executor: type[NativeRelayout]) -> None:
    plan = compile_plan(layout("bf16", 3, 16), layout("bf16", 2, 64))
    relay, got = executor(plan), blank(plan.target, 1)
    targets, sources = views(got, plan.target_pages(50)), pages(plan.source, "bfloat16")
    steps = 0
    for at in reversed(plan.source_pages(50)):
        steps += relay.execute(source_pages=views(sources, (at,)), target_pages=targets, num_tokens=50)
    assert steps == sum(copy.source in plan.source_pages(50) for copy in plan.copies)
    wanted, mask = pages(plan.target, "bfloat16"), filled(plan.target, 50)
    assert all(np.array_equal(page[mask[at]], wanted[at][mask[at]]) for at, page in got.items())


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("held", [{0}, {0, 1}, {0, 1, 2}, {2}])
def test_pages_that_the_target_has_are_not_written(executor: type[NativeRelayout], held: set[int]) -> None:
    for size in (32, 64):
        each = compile_plan(layout("bf16", 2, size), layout("bf16", 3, 16))
        has = frozenset(held & set(range(each.span_tokens // 16)))
        got, written = blank(each.target, each.span_tokens // 16), each.target_pages(each.span_tokens, has)
        read = each.source_pages(each.span_tokens, has)
        executor(each).execute(
            source_pages=views(pages(each.source, "bfloat16"), read),
            target_pages=views(got, written),
            num_tokens=each.span_tokens,
            held=has,
        )
        for at, page in got.items():
            if at[1] in has:
                assert (page.view(np.uint8) == UNTOUCHED).all()
            else:
                assert np.array_equal(page, pages(each.target, "bfloat16")[at])


@pytest.mark.parametrize("executor", EXECUTORS)
def test_wrong_pages_are_refused_before_a_byte_moves(executor: type[NativeRelayout]) -> None:
    plan = compile_plan(layout("f32", 1, 16), layout("f32", 1, 32))
    relay, sources = executor(plan), views(pages(plan.source, "float32"), ((0, 0), (0, 1)))
    got = blank(plan.target, 1)
    target = views(got, ((0, 0),))
    for changed, words in (
        ({"num_tokens": 16}, "does not read"),
        ({"target_pages": {}}, "lacks a target"),
        ({"target_pages": {**target, (1, 0): target[0, 0]}}, "does not write"),
        ({"source_pages": {(0, 0): sources[0, 0][:-1]}}, "bytes, not"),
    ):
        with pytest.raises(InternalError, match=words):
            relay.execute(**{"source_pages": sources, "target_pages": target, "num_tokens": 32, **changed})
    with pytest.raises(ValueError, match="1 to 32 tokens"):
        relay.execute(source_pages={}, target_pages={}, num_tokens=33)
    assert (got[0, 0].view(np.uint8) == UNTOUCHED).all()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_rows_out_of_a_window_are_left_out(executor: type[NativeRelayout]) -> None:
    kinds = {"layers": (LayerKind(window=24), FULL)}
    plan = compile_plan(layout("f32", 1, 16, **kinds), layout("f32", 2, 32, **kinds))
    sources = views(pages(layout("f32", 1, 16), "float32"), ((0, 0), (0, 1)))
    steps = {}
    for after in (0, 6, 7, 22, 23, 500):
        targets = views(blank(plan.target, 1), plan.target_pages(32))
        steps[after] = executor(plan).execute(
            source_pages=sources, target_pages=targets, num_tokens=32, tokens_after=after
        )
    # The next query is at 32 + after, and sees row 15 up to position 38 and row 31 up to 54.
    windowed = sum(copy.window > 0 for copy in plan.copies)
    full = len(plan.copies) - windowed
    half = full + windowed // 2
    assert steps == {0: len(plan.copies), 6: len(plan.copies), 7: half, 22: half, 23: full, 500: full}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_oracles_pages_are_the_kernels(dtype: str) -> None:
    variant = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    of = layout(variant, 1, 16)
    assert of.inner == inner_layout(dtype)
    arrays = values(dtype, 2, TOKENS, 3, 4)
    torch_dtype, as_int = {
        "float32": (torch.float32, torch.int32),
        "bfloat16": (torch.bfloat16, torch.int16),
    }[dtype]
    memory = np.concatenate([pages(of, dtype)[0, page] for page in range(4)])
    storage = torch.from_numpy(memory.view(np.int32 if dtype == "float32" else np.int16)).view(torch_dtype)
    view = KVView(storage=storage, page_stride=of.page_elems(0), num_pages=4, num_layers=2, num_kv_heads=3,
                  head_dim=4, page_size=16, dtype=dtype)  # fmt: skip
    for layer in range(2):
        found = read_kv(view, layer, torch.arange(TOKENS))
        for name, tensor in zip("kv", found, strict=True):
            bits = tensor.contiguous().view(as_int).numpy().view(BITS[dtype])
            assert np.array_equal(bits, arrays[name][layer])
