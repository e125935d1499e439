"""Attention over 8-bit pages: near attention in float64, equal to the plain form up to single codes, the same
bits for every batch, chunk, page size and number of threads, and no NaN that is lost."""

from __future__ import annotations

import pytest
import torch

from pdserve.errors import ConfigError, InternalError
from pdserve.kernels import native
from pdserve.kernels.attention import paged_attention, paged_attention_reference
from pdserve.kernels.attention_meta import AttentionMeta
from pdserve.kernels.kv_view import KVView, inner_layout, read_kv
from pdserve.kernels.write_kv import write_kv_reference
from tests.conformance.kernel_kit import DTYPES, SHAPES, Heads, both_dtypes, one_token_over, randn, tables

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("seeded_and_threaded")]

CONTEXT, QUERY = [1, 2, 33, 40, 301, 600, 131], [1, 1, 33, 17, 1, 3, 70]
HEADS = {
    **{name: heads for name, heads in SHAPES.items() if heads.dim % 4 == 0},
    "dim-36": Heads(num_heads=6, num_kv_heads=2, dim=36),
    "group-of-9": Heads(num_heads=9, num_kv_heads=1, dim=96),
}
every_heads = pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())


def make_kv8(heads: Heads, *, page_size: int = 16, num_pages: int = 96) -> KVView:
    """Pages whose every scale is a NaN: rows that nobody wrote must not matter."""
    stride = 2 * 2 * heads.num_kv_heads * page_size * (heads.dim + 4) + 64
    return KVView(
        storage=torch.full((num_pages * stride,), 255, dtype=torch.uint8), page_stride=stride,
        num_pages=num_pages, num_layers=2, num_kv_heads=heads.num_kv_heads, head_dim=heads.dim,
        page_size=page_size, dtype="int8",
    )  # fmt: skip


def rows_of(heads: Heads, lens: list[int]) -> torch.Tensor:
    """K and V of sequences of so many tokens, float32 [2, T, K, D], the same in every call."""
    generator = torch.Generator().manual_seed(11)
    shape = (2, sum(lens), heads.num_kv_heads)
    size = torch.rand(*shape, 1, generator=generator) + 0.5
    return torch.randn(*shape, heads.dim, generator=generator) * size


def filled8(
    heads: Heads, lens: list[int], *, page_size: int = 16, rows: torch.Tensor | None = None
) -> tuple[KVView, list[list[int]]]:
    kv, pages = make_kv8(heads, page_size=page_size), tables(lens, page_size, 96)
    slots = AttentionMeta.build(lens, lens, pages, page_size=page_size).slots_T
    rows = rows_of(heads, lens) if rows is None else rows
    write_kv_reference(rows[0], rows[1], kv, 1, slots)
    return kv, pages


def exact(
    q: torch.Tensor, rows: torch.Tensor, lens: list[int], query: list[int], window: int
) -> torch.Tensor:
    """Attention in float64 over rows as they were before any rounding."""
    outs, q_at, kv_at = [], 0, 0
    for context, tokens in zip(lens, query, strict=True):
        k, v = rows[:, kv_at : kv_at + context].double().repeat_interleave(q.shape[1] // rows.shape[2], dim=2)
        distance = torch.arange(context)[-tokens:, None] - torch.arange(context)
        hidden = (distance < 0) | (distance >= (window or context))
        scores = torch.einsum("thd,chd->htc", q[q_at : q_at + tokens].double(), k) * q.shape[2] ** -0.5
        outs.append(torch.einsum("htc,chd->thd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v))
        q_at, kv_at = q_at + tokens, kv_at + context
    return torch.cat(outs)


class TestValues:
    @both_dtypes
    @every_heads
    @pytest.mark.parametrize(("page_size", "window"), [(16, 0), (16, 1), (32, 21), (16, 200)])
    def test_mixed_step(self, dtype: str, heads: Heads, page_size: int, window: int) -> None:
        """Codes of q and K are off by 1/254 of a row's greatest value (0.006 of its deviation), so scores by
        0.01, weights by 1 %, V by 0.6 %, weights' codes by 0.1 % of the greatest: 2 % of results in all."""
        rows = rows_of(heads, CONTEXT)
        kv, pages = filled8(heads, CONTEXT, page_size=page_size, rows=rows)
        meta = AttentionMeta.build(QUERY, CONTEXT, pages, page_size=page_size)
        q = randn(dtype, sum(QUERY), heads.num_heads, heads.dim)
        options = {"scale": heads.dim**-0.5, "window": window}
        got = paged_attention(q, kv, 1, meta, **options)
        assert got.dtype == q.dtype
        wanted = exact(q, rows, CONTEXT, QUERY, window)
        assert (got.double() - wanted).square().mean().sqrt() <= 0.02 * wanted.square().mean().sqrt()
        # A weight that lies between two codes may go to either: 1/255 of the greatest V, for a few of them.
        plain = paged_attention_reference(q.float(), kv, 1, meta, **options)
        bound = rows.abs().max().item() * (3 / 255 + (2**-8 if dtype == "bfloat16" else 0))
        assert (got.float() - plain).abs().max().item() <= bound
        assert (got.float() - plain).abs().mean().item() <= bound / 10

    @both_dtypes
    @pytest.mark.parametrize("tokens", [1, 300])
    def test_scores_of_every_size(self, dtype: str, tokens: int) -> None:
        """One position that takes nearly all, and weights too small for a code."""
        heads = HEADS["smollm2-gqa"]
        kv, pages = filled8(heads, [700])
        meta = AttentionMeta.build([tokens], [700], pages, page_size=16)
        for size in (0, 1e-30, 1, 30, 1e4, 1e9, 1e15):
            q = randn(dtype, tokens, 9, 64) * size
            got = paged_attention(q, kv, 1, meta, scale=0.3)
            plain = paged_attention_reference(q.float(), kv, 1, meta, scale=0.3)
            assert (got.float() - plain).abs().max() <= 0.06 if size < 1e4 else torch.isfinite(got).all()

    def test_zero_rows(self) -> None:
        heads = HEADS["tiny"]
        rows = torch.zeros(2, 300, 2, 8)
        kv, pages = filled8(heads, [300], rows=rows)
        meta = AttentionMeta.build([5], [300], pages, page_size=16)
        assert torch.equal(
            paged_attention(torch.randn(5, 6, 8), kv, 1, meta, scale=1.0), torch.zeros(5, 6, 8)
        )


class TestRowsAlone:
    @both_dtypes
    @pytest.mark.parametrize("window", [0, 50])
    @pytest.mark.parametrize("name", ["smollm2-gqa", "mqa", "tiny", "mha", "dim-36", "wide-group"])
    def test_bits_do_not_depend_on_batch_chunk_page_or_threads(
        self, dtype: str, name: str, window: int
    ) -> None:
        heads, lens = HEADS[name], [333, 90]
        q = randn(dtype, sum(lens), heads.num_heads, heads.dim)
        whole = by_chunks(heads, lens, q, 333, page_size=16, window=window)
        assert torch.isfinite(whole).all()
        for chunk, page_size, threads in ((1, 16, 2), (64, 32, 1), (100, 128, 3), (512, 32, 2)):
            native.set_num_threads(threads)
            got = by_chunks(heads, lens, q, chunk, page_size=page_size, window=window)
            assert torch.equal(got, whole), (chunk, page_size)


def by_chunks(
    heads: Heads, lens: list[int], q: torch.Tensor, chunk: int, *, page_size: int, window: int
) -> torch.Tensor:
    """All rows of both sequences; a step holds the next chunk of every unfinished one."""
    kv, pages = filled8(heads, lens, page_size=page_size)
    out, done = torch.empty_like(q), [0, 0]
    while done != lens:
        step = [(s, min(chunk, lens[s] - done[s])) for s in (0, 1) if done[s] < lens[s]]
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


class TestStrangeRows:
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    @pytest.mark.parametrize("which", ["q", "k", "v"])
    @pytest.mark.parametrize("at", [0, 100, 299])
    def test_reach_all_that_see_them_and_no_others(self, value: float, which: str, at: int) -> None:
        heads, window = HEADS["smollm2-gqa"], 60
        rows, q = rows_of(heads, [300]), torch.randn(300, 9, 64)
        clean_kv, clean_pages = filled8(heads, [300], rows=rows)
        if which == "q":
            q[at, 4, 7] = value
        else:
            rows[0 if which == "k" else 1, at, 1, 7] = value
        kv, pages = filled8(heads, [300], rows=rows)
        meta = AttentionMeta.build([300], [300], pages, page_size=16)
        got = paged_attention(q, kv, 1, meta, scale=0.1, window=window)
        hit = torch.zeros(300, 9, dtype=torch.bool)
        if which == "q":
            hit[at, 4] = True
        else:
            hit[at : at + window, 3:6] = True
        assert got[hit].isnan().all()
        clean_meta = AttentionMeta.build([300], [300], clean_pages, page_size=16)
        clean = paged_attention(q, clean_kv, 1, clean_meta, scale=0.1, window=window)
        assert torch.equal(got[~hit], clean[~hit])

    @pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF])
    @pytest.mark.parametrize("key", [True, False])
    def test_any_nan_for_a_scale(self, bits: int, key: bool) -> None:
        heads = HEADS["mqa"]
        kv, pages = filled8(heads, [40])
        scales = kv.k_scales(1) if key else kv.v_scales(1)
        scales[pages[0][1], 0, 2] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
        meta = AttentionMeta.build([40], [40], pages, page_size=16)
        got = paged_attention(torch.randn(40, 8, 128), kv, 1, meta, scale=0.1)
        assert got[18:].isnan().all()
        assert torch.isfinite(got[:18]).all()


class TestPages:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_pages_outside_the_pool_are_refused(self, dtype: str) -> None:
        heads = HEADS["tiny"]
        kv, q = make_kv8(heads, num_pages=4), randn(dtype, 1, heads.num_heads, heads.dim)
        for pages in ([0, 4], [-1, 1], [2]):
            with pytest.raises(InternalError):
                paged_attention(q, kv, 0, one_token_over(pages), scale=1.0)

    def test_only_the_layer_is_read(self) -> None:
        """Bytes outside the layer's parts may be anything."""
        heads = HEADS["dim-36"]
        kv, pages = filled8(heads, [100])
        meta = AttentionMeta.build([3], [100], pages, page_size=16)
        q = torch.randn(3, heads.num_heads, heads.dim)
        before = paged_attention(q, kv, 1, meta, scale=0.2)
        size = kv.part_elems
        storage = kv.storage.view(kv.num_pages, kv.page_stride)
        for end in (slice(0, 2 * size), slice(4 * size, None)):
            storage[:, end] = torch.randint(0, 256, storage[:, end].shape, dtype=torch.uint8)
        assert torch.equal(paged_attention(q, kv, 1, meta, scale=0.2), before)

    def test_rows_come_back_within_half_a_code(self) -> None:
        heads, lens = HEADS["smollm2-gqa"], [70]
        rows = rows_of(heads, lens)
        kv, pages = filled8(heads, lens, rows=rows)
        slots = AttentionMeta.build(lens, lens, pages, page_size=16).slots_T
        for got, wanted in zip(read_kv(kv, 1, slots), rows, strict=True):
            assert ((got - wanted).abs() <= wanted.abs().amax(-1, keepdim=True) / 253).all()

    def test_what_can_not_be(self) -> None:
        with pytest.raises(ConfigError, match="latent"):
            inner_layout("int8", latent=True)
        with pytest.raises(ConfigError, match="multiple of 4"):
            make_kv8(Heads(num_heads=2, num_kv_heads=2, dim=90))
