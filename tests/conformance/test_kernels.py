"""Every kernel's implementations against one another, and that a row's bits depend on nothing but the row.

float32 is compared within rounding; bfloat16 within one rounding of its result (2^-8 of the largest value:
both sides sum in float32 and round once). The identity tests compare bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from pdserve.errors import ConfigError, InternalError
from pdserve.kernels import native
from pdserve.kernels.activation import silu_mul, silu_mul_reference
from pdserve.kernels.attention import paged_attention, paged_attention_reference
from pdserve.kernels.attention_meta import AttentionMeta
from pdserve.kernels.embedding import embed, select_rows
from pdserve.kernels.kv_view import KVView, inner_layout, read_kv
from pdserve.kernels.linear import PackedLinear, linear, linear_reference
from pdserve.kernels.norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from pdserve.kernels.rope import (
    apply_rope,
    apply_rope_reference,
    rope_and_write_kv,
    rope_and_write_kv_reference,
)
from pdserve.kernels.write_kv import write_kv, write_kv_reference

pytestmark = pytest.mark.smoke
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BOUND = {"float32": 1e-5, "bfloat16": 2**-8}
both_dtypes = pytest.mark.parametrize("dtype", DTYPES)
OPS: dict[str, dict[str, Callable[..., Any]]] = {
    "rms_norm": {"native": rms_norm, "reference": rms_norm_reference},
    "add_rms_norm": {"native": add_rms_norm, "reference": add_rms_norm_reference},
    "silu_mul": {"native": silu_mul, "reference": silu_mul_reference},
    "linear": {"native": linear, "reference": linear_reference},
    "apply_rope": {"native": apply_rope, "reference": apply_rope_reference},
    "rope_and_write_kv": {"native": rope_and_write_kv, "reference": rope_and_write_kv_reference},
    "write_kv": {"native": write_kv, "reference": write_kv_reference},
    "paged_attention": {"native": paged_attention, "reference": paged_attention_reference},
}


def implementations(op: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("impl", OPS[op].values(), ids=OPS[op].keys())


@pytest.fixture(autouse=True)
def _seeded_and_threaded() -> Iterator[None]:
    before = torch.get_num_threads()
    native.set_num_threads(2)
    torch.manual_seed(7)
    yield
    native.set_num_threads(before)


def randn(dtype: str, *shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(DTYPES[dtype])


def assert_near(got: torch.Tensor, wanted: torch.Tensor, dtype: str) -> None:
    """Within BOUND of the largest value of `wanted` (float32 or float64)."""
    scale = wanted.abs().max().clamp_min(1e-3)
    assert torch.isfinite(got).all()
    assert ((got.double() - wanted.double()).abs().max() / scale).item() <= BOUND[dtype]


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Shape of an attention layer."""

    num_heads: int
    num_kv_heads: int
    dim: int


SHAPES = {
    "smollm2-gqa": Heads(num_heads=9, num_kv_heads=3, dim=64),
    "mha": Heads(num_heads=4, num_kv_heads=4, dim=32),
    "mqa": Heads(num_heads=8, num_kv_heads=1, dim=128),
    "wide-group": Heads(num_heads=40, num_kv_heads=2, dim=16),
    "tiny": Heads(num_heads=6, num_kv_heads=2, dim=8),
    "odd-dim": Heads(num_heads=2, num_kv_heads=2, dim=90),
    "dim-256": Heads(num_heads=2, num_kv_heads=1, dim=256),
}
every_shape = pytest.mark.parametrize("heads", SHAPES.values(), ids=SHAPES.keys())


def make_kv(dtype: str, heads: Heads, *, page_size: int = 16, num_pages: int = 64, layers: int = 2) -> KVView:
    page = layers * 2 * heads.num_kv_heads * heads.dim * page_size
    stride = page + 64
    # Rows that nobody wrote must not matter, so they start as NaN.
    storage = torch.full((num_pages * stride,), float("nan"), dtype=DTYPES[dtype])
    return KVView(
        storage=storage, page_stride=stride, num_pages=num_pages, num_layers=layers,
        num_kv_heads=heads.num_kv_heads, head_dim=heads.dim, page_size=page_size, dtype=dtype,
    )  # fmt: skip


def tables(lens: list[int], page_size: int, num_pages: int = 64) -> list[list[int]]:
    """Disjoint pages for sequences of so many tokens, in no order."""
    pages = torch.randperm(num_pages).tolist()
    return [[pages.pop() for _ in range(-(-length // page_size))] for length in lens]


def filled(
    dtype: str, heads: Heads, lens: list[int], *, page_size: int = 16
) -> tuple[KVView, list[list[int]]]:
    """Pages that hold random K and V of sequences of so many tokens, the same for every page size."""
    kv, pages = make_kv(dtype, heads, page_size=page_size), tables(lens, page_size)
    slots = AttentionMeta.build(lens, lens, pages, page_size=page_size).slots_T
    generator = torch.Generator().manual_seed(11)
    rows = torch.randn(2, sum(lens), heads.num_kv_heads, heads.dim, generator=generator).to(DTYPES[dtype])
    for layer in range(kv.num_layers):
        write_kv_reference(rows[0] * (layer + 1), rows[1] + layer, kv, layer, slots)
    return kv, pages


class TestElementwise:
    @both_dtypes
    @pytest.mark.parametrize("shape", [(1, 576), (5, 64), (3, 17), (2, 3, 8), (200, 576)])
    @implementations("rms_norm")
    def test_rms_norm(self, impl: Callable[..., Any], dtype: str, shape: tuple[int, ...]) -> None:
        x, weight = randn(dtype, *shape), randn(dtype, shape[-1])
        exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        got = impl(x, weight, 1e-5)
        assert got.shape == x.shape
        # bfloat16 rounds twice here, before and after the weight.
        assert ((got - exact).abs().max() / exact.abs().max()).item() <= 2 * BOUND[dtype]

    @both_dtypes
    @pytest.mark.parametrize("rows", [1, 6, 130])
    @implementations("add_rms_norm")
    def test_add_rms_norm(self, impl: Callable[..., Any], dtype: str, rows: int) -> None:
        x, residual, weight = randn(dtype, rows, 136), randn(dtype, rows, 136), randn(dtype, 136)
        normed, total = impl(x, residual, weight, 1e-6)
        assert torch.equal(total, x + residual)
        assert torch.equal(normed, OPS["rms_norm"]["native"](total, weight, 1e-6)) or dtype == "float32"
        assert_near(normed, rms_norm_reference(total, weight, 1e-6), dtype)

    @both_dtypes
    @pytest.mark.parametrize("shape", [(1, 1536), (3, 18), (100, 96)])
    @implementations("silu_mul")
    def test_silu_mul(self, impl: Callable[..., Any], dtype: str, shape: tuple[int, int]) -> None:
        x = randn(dtype, shape[0], 2 * shape[1]) * 8
        x[0, :6] = torch.tensor([-200.0, -88.0, -87.0, 88.0, 200.0, 0.0])
        gate, up = x.double().chunk(2, dim=-1)
        assert_near(impl(x), gate * torch.sigmoid(gate) * up, dtype)

    def test_lookups(self) -> None:
        table = torch.randn(10, 4)
        assert torch.equal(embed(torch.tensor([3, 3, 9]), table), table[[3, 3, 9]])
        assert torch.equal(select_rows(table, torch.tensor([9, 0])), table[[9, 0]])


class TestLinear:
    @both_dtypes
    @pytest.mark.parametrize(
        ("rows", "num_out", "num_in"),
        [
            (1, 64, 64),
            (1, 7, 9),
            (2, 33, 17),
            (3, 130, 576),
            (5, 96, 64),
            (13, 100, 1536),
            (29, 64, 3000),
            (200, 70, 40),
        ],
    )
    @pytest.mark.parametrize("biased", [False, True])
    @implementations("linear")
    def test_against_float64(
        self, impl: Callable[..., Any], dtype: str, rows: int, num_out: int, num_in: int, biased: bool
    ) -> None:
        x, weight = randn(dtype, rows, num_in), randn(dtype, num_out, num_in)
        bias = randn(dtype, num_out) if biased else None
        packed = PackedLinear.pack(weight, bias)
        exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        assert_near(impl(x, packed), exact, dtype)
        unrounded = impl(x, packed, out_float32=True)
        assert unrounded.dtype == torch.float32
        assert_near(unrounded, exact, "float32")

    @both_dtypes
    def test_packing_loses_nothing(self, dtype: str) -> None:
        weight = randn(dtype, 75, 131)
        assert torch.equal(PackedLinear.pack(weight).unpack(), weight)

    @both_dtypes
    def test_a_row_does_not_depend_on_the_others(self, dtype: str) -> None:
        weight, x = randn(dtype, 160, 1100), randn(dtype, 300, 1100)
        packed = PackedLinear.pack(weight, deterministic=True)
        alone = torch.cat([linear(row[None], packed, out_float32=True) for row in x[:40]])
        for rows in (*range(1, 40), 64, 100, 299, 300):
            got = linear(x[:rows], packed, out_float32=True)[:40]
            assert torch.equal(got, alone[: min(rows, 40)]), rows

    @both_dtypes
    def test_threads_do_not_matter(self, dtype: str) -> None:
        packed, x = PackedLinear.pack(randn(dtype, 200, 96)), randn(dtype, 70, 96)
        native.set_num_threads(1)
        once = linear(x, packed), linear(x[:1], packed)
        native.set_num_threads(3)
        assert torch.equal(linear(x, packed), once[0])
        assert torch.equal(linear(x[:1], packed), once[1])


class TestRopeAndWrite:
    @both_dtypes
    @every_shape
    @implementations("apply_rope")
    def test_apply_rope(self, impl: Callable[..., Any], dtype: str, heads: Heads) -> None:
        q, k = randn(dtype, 5, heads.num_heads, heads.dim), randn(dtype, 5, heads.num_kv_heads, heads.dim)
        angle = torch.randn(5, heads.dim // 2) * 10
        cos, sin = (fn(torch.cat((angle, angle), -1)) for fn in (torch.cos, torch.sin))
        before = q.clone()
        for x, got in zip((q, k), impl(q, k, cos, sin), strict=True):
            pairs = torch.complex(*x.double().chunk(2, dim=-1)) * torch.polar(
                torch.ones(5, 1, heads.dim // 2).double(), angle[:, None].double()
            )
            assert_near(got, torch.cat((pairs.real, pairs.imag), -1), dtype)
        assert torch.equal(q, before)

    @both_dtypes
    @pytest.mark.parametrize("page_size", [16, 32, 48, 128])
    @implementations("write_kv")
    def test_written_rows_read_back(self, impl: Callable[..., Any], dtype: str, page_size: int) -> None:
        heads = Heads(num_heads=4, num_kv_heads=2, dim=24)
        kv = make_kv(dtype, heads, page_size=page_size, num_pages=8)
        kv.storage.zero_()
        slots = torch.randperm(8 * page_size)[:70].int()
        k, v = randn(dtype, 70, 2, 24), randn(dtype, 70, 2, 24)
        impl(k, v, kv, 1, slots)
        got_k, got_v = read_kv(kv, 1, slots)
        assert torch.equal(got_k, k)
        assert torch.equal(got_v, v)
        assert int(kv.storage.count_nonzero()) == int(k.count_nonzero() + v.count_nonzero())

    @both_dtypes
    @every_shape
    @pytest.mark.parametrize("normed", [False, True])
    def test_fused_equals_its_parts(self, dtype: str, heads: Heads, normed: bool) -> None:
        tokens, width = 37, (heads.num_heads + 2 * heads.num_kv_heads) * heads.dim
        qkv, cos, sin = (
            randn(dtype, tokens, width),
            torch.randn(tokens, heads.dim),
            torch.randn(tokens, heads.dim),
        )
        norms = {"q_norm_D": randn(dtype, heads.dim), "k_norm_D": randn(dtype, heads.dim)} if normed else {}
        slots = torch.randperm(64 * 16)[:tokens].int()
        results = []
        for impl in OPS["rope_and_write_kv"].values():
            kv = make_kv(dtype, heads)
            q = impl(qkv, cos, sin, kv, 1, slots, num_heads=heads.num_heads, eps=1e-6, **norms)
            results.append((q, *read_kv(kv, 1, slots)))
        for got, wanted in zip(*results, strict=True):
            assert_near(got, wanted.float(), dtype)
        assert torch.equal(results[0][2], results[1][2])

    @both_dtypes
    def test_slots_outside_the_pool_are_refused(self, dtype: str) -> None:
        heads = SHAPES["tiny"]
        kv = make_kv(dtype, heads, num_pages=4)
        row = randn(dtype, 1, heads.num_kv_heads, heads.dim)
        for slot in (-1, 4 * 16, 2**31 - 1):
            with pytest.raises(InternalError):
                write_kv(row, row, kv, 0, torch.tensor([slot], dtype=torch.int32))


class TestAttention:
    @both_dtypes
    @every_shape
    @pytest.mark.parametrize("page_size", [16, 32])
    @pytest.mark.parametrize("window", [0, 1, 21, 200])
    def test_mixed_step(self, dtype: str, heads: Heads, page_size: int, window: int) -> None:
        """Decode rows, a whole prompt, chunks that end inside a pair, a block, a page and a span."""
        context = [1, 2, 33, 40, 300, 131]
        query = [1, 1, 33, 17, 1, 70]
        kv, pages = filled(dtype, heads, context, page_size=page_size)
        meta = AttentionMeta.build(query, context, pages, page_size=page_size)
        q = randn(dtype, sum(query), heads.num_heads, heads.dim)
        options = {"scale": heads.dim**-0.5, "window": window}
        got = paged_attention(q, kv, 1, meta, **options)
        wanted = paged_attention_reference(q.float(), kv, 1, meta, **options)
        assert got.dtype == q.dtype
        assert_near(got, wanted, dtype)

    @both_dtypes
    def test_large_scores(self, dtype: str) -> None:
        heads = SHAPES["smollm2-gqa"]
        kv, pages = filled(dtype, heads, [400])
        meta = AttentionMeta.build([3], [400], pages, page_size=16)
        q = randn(dtype, 3, 9, 64) * 100
        wanted = paged_attention_reference(q.float(), kv, 0, meta, scale=1.0)
        assert_near(paged_attention(q, kv, 0, meta, scale=1.0), wanted, dtype)

    @both_dtypes
    @pytest.mark.parametrize("window", [0, 50])
    @pytest.mark.parametrize("heads", [SHAPES["smollm2-gqa"], SHAPES["mqa"], SHAPES["tiny"]])
    def test_bits_do_not_depend_on_batch_chunk_page_or_threads(
        self, dtype: str, heads: Heads, window: int
    ) -> None:
        lens = [333, 90]
        q = randn(dtype, sum(lens), heads.num_heads, heads.dim)
        whole = self._by_chunks(dtype, heads, lens, q, [333, 90], page_size=16, window=window)
        assert torch.isfinite(whole).all()
        for chunk, page_size, threads in ((1, 16, 2), (64, 32, 1), (100, 16, 3), (512, 32, 2)):
            native.set_num_threads(threads)
            got = self._by_chunks(dtype, heads, lens, q, [chunk, chunk], page_size=page_size, window=window)
            assert torch.equal(got, whole), (chunk, page_size)

    def _by_chunks(
        self,
        dtype: str,
        heads: Heads,
        lens: list[int],
        q: torch.Tensor,
        chunks: list[int],
        *,
        page_size: int,
        window: int,
    ) -> torch.Tensor:
        """All rows of both sequences, by chunks; a step holds the next chunk of every unfinished sequence."""
        kv, pages = filled(dtype, heads, lens, page_size=page_size)
        out, done = torch.empty_like(q), [0, 0]
        while done != lens:
            step = [(s, min(chunks[s], lens[s] - done[s])) for s in (0, 1) if done[s] < lens[s]]
            rows = torch.cat([torch.arange(n) + done[s] + sum(lens[:s]) for s, n in step])
            meta = AttentionMeta.build(
                [n for _, n in step],
                [done[s] + n for s, n in step],
                [pages[s] for s, _ in step],
                page_size=page_size,
            )
            out[rows] = paged_attention(q[rows], kv, 1, meta, scale=heads.dim**-0.5, window=window)
            for s, n in step:
                done[s] += n
        return out

    @both_dtypes
    def test_pages_outside_the_pool_are_refused(self, dtype: str) -> None:
        heads = SHAPES["tiny"]
        kv, q = make_kv(dtype, heads, num_pages=4), randn(dtype, 1, heads.num_heads, heads.dim)
        for pages in ([0, 4], [-1, 1], [2]):
            meta = AttentionMeta(
                query_starts_B1=torch.tensor([0, 1], dtype=torch.int32),
                context_lens_B=torch.tensor([20], dtype=torch.int32),
                block_tables_BP=torch.tensor([pages], dtype=torch.int32),
                positions_T=torch.tensor([19], dtype=torch.int32),
                slots_T=torch.tensor([0], dtype=torch.int32),
            )
            with pytest.raises(InternalError):
                paged_attention(q, kv, 0, meta, scale=1.0)

    def test_meta_places_rows(self) -> None:
        meta = AttentionMeta.build([1, 3], [20, 18], [[5, 2], [7, 1]], page_size=16)
        assert meta.query_starts_B1.tolist() == [0, 1, 4]
        assert meta.positions_T.tolist() == [19, 15, 16, 17]
        assert meta.slots_T.tolist() == [2 * 16 + 3, 7 * 16 + 15, 16, 17]


class TestViewAndLibrary:
    @pytest.mark.parametrize(
        "wrong", [{"page_size": 24}, {"page_size": 144}, {"head_dim": 7}, {"head_dim": 258}, {"num_pages": 9}]
    )
    def test_views_that_can_not_be_served_are_refused(self, wrong: dict[str, int]) -> None:
        good = {
            "page_stride": 512,
            "num_pages": 8,
            "num_layers": 1,
            "num_kv_heads": 1,
            "head_dim": 8,
            "page_size": 16,
        }
        storage = torch.zeros(8 * 512)
        KVView(storage=storage, dtype="float32", **good)
        with pytest.raises(ConfigError):
            KVView(storage=storage, dtype="float32", **{**good, **wrong})

    def test_layout_tags_differ_by_dtype(self) -> None:
        assert inner_layout("float32") != inner_layout("bfloat16")
        with pytest.raises(ConfigError):
            inner_layout("float16")

    def test_one_openmp_runtime(self) -> None:
        """The kernels bring threads of their own and no second OpenMP beside torch's."""
        native.library()
        with open("/proc/self/maps") as maps:
            runtimes = {line.split()[-1] for line in maps if "libgomp" in line or "omp5" in line}
        assert len(runtimes) == 1

    def test_callers_on_several_threads(self) -> None:
        """Whoever finds the helpers taken works alone, to the same bits."""
        packed, x = PackedLinear.pack(randn("float32", 256, 128)), randn("float32", 64, 128)
        wanted = linear(x, packed)
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda _: linear(x, packed), range(200)))
        assert all(torch.equal(got, wanted) for got in results)

    def test_numerics_id_tells_dtypes_apart(self) -> None:
        assert native.isa() in native.numerics_id("float32")
        assert native.numerics_id("float32") != native.numerics_id("bfloat16")
