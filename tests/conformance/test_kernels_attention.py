"""Attention over pages: the plain reference, and the same bits for every batch, chunk, page size, threads."""

from __future__ import annotations

import pytest
import torch

from pdserve.errors import InternalError
from pdserve.kernels import native
from pdserve.kernels.attention import paged_attention, paged_attention_reference
from pdserve.kernels.attention_meta import AttentionMeta
from tests.conformance.kernel_kit import (
    SHAPES,
    Heads,
    assert_near,
    both_dtypes,
    every_shape,
    filled,
    make_kv,
    one_token_over,
    randn,
)

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("seeded_and_threaded")]


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
            with pytest.raises(InternalError):
                paged_attention(q, kv, 0, one_token_over(pages), scale=1.0)

    def test_meta_places_rows(self) -> None:
        meta = AttentionMeta.build([1, 3], [20, 18], [[5, 2], [7, 1]], page_size=16)
        assert meta.query_starts_B1.tolist() == [0, 1, 4]
        assert meta.positions_T.tolist() == [19, 15, 16, 17]
        assert meta.slots_T.tolist() == [2 * 16 + 3, 7 * 16 + 15, 16, 17]
