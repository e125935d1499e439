"""The grouped linear layer on a GPU: rows sorted by group (expert), each group's rows with their own weight.

What lives here: one Triton kernel, its typed wrapper, and a plain form. What does not: sorting, the CPU's
form with its packed weights (`pdserve.kernels.grouped_linear`).

A tile of rows belongs to one group. A program finds its tile's group from the offsets by itself, so nothing
waits for the host: the grid is as large as the number of tiles can get. Sums go over K in order, in steps of
a fixed size. How many rows a tile has follows the mean rows of a group, and a GPU may add within a step
differently for other tiles: only with batch_invariant, one tile for all, do a row's bits ignore the others.

Legend: M rows, G groups, N outputs, K inputs.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import triton
import triton.language as tl

from pdserve.kernels.triton.products import INTERPRETED, dot

BLOCK_K = {torch.bfloat16: 64, torch.float32: 32}
"""The step of the sums; a multiple of it is not asked of K."""


@triton.jit(do_not_specialize=["row_tiles"])
def _grouped_kernel(
    out, x, weights, offsets,
    num_groups, num_out, num_in, row_tiles,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BAND: tl.constexpr, WHOLE_K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    # Programs go over the columns of BAND row tiles before the next ones: their rows and weights stay in L2.
    pid = tl.program_id(0)
    col_tiles = tl.cdiv(num_out, BLOCK_N)
    first = pid // (BAND * col_tiles) * BAND
    height = min(row_tiles - first, BAND)
    tile = first + pid % (BAND * col_tiles) % height
    col = pid % (BAND * col_tiles) // height

    g = tl.arange(0, BLOCK_G)
    starts = tl.load(offsets + g, mask=g < num_groups, other=0)
    ends = tl.load(offsets + g + 1, mask=g < num_groups, other=0)
    tiles = (ends - starts + BLOCK_M - 1) // BLOCK_M
    upto = tl.cumsum(tiles, 0)
    group = tl.sum((upto <= tile).to(tl.int32), 0)
    if group < num_groups:
        ours = g == group
        tile_in_group = tile - tl.sum(tl.where(g < group, tiles, 0), 0)
        row = tl.sum(tl.where(ours, starts, 0), 0) + tile_in_group * BLOCK_M
        end = tl.sum(tl.where(ours, ends, 0), 0)
        m = row + tl.arange(0, BLOCK_M)
        n = col * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        # Past the last row and column the last one is read again: no mask in the loop, nothing of it written.
        m_in = tl.minimum(m, end - 1)
        n_in = tl.minimum(n, num_out - 1).to(tl.int64)
        x_at = x + m_in[:, None] * num_in + k[None, :]
        w_at = weights + (group.to(tl.int64) * num_out + n_in)[None, :] * num_in + k[:, None]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for at in range(0, num_in, BLOCK_K):
            if WHOLE_K:
                x_MK = tl.load(x_at)
                w_KN = tl.load(w_at)
            else:
                x_MK = tl.load(x_at, mask=(k < num_in - at)[None, :], other=0.0)
                w_KN = tl.load(w_at, mask=(k < num_in - at)[:, None], other=0.0)
            acc = dot(x_MK, w_KN, acc, WIDEN)
            x_at += BLOCK_K
            w_at += BLOCK_K
        there = (m < end)[:, None] & (n < num_out)[None, :]
        out_at = out + m[:, None] * num_out + n[None, :]
        tl.store(out_at, acc.to(out.dtype.element_ty), mask=there)


def grouped_linear(
    x_MK: torch.Tensor,
    offsets_G: torch.Tensor,
    weights_GNK: torch.Tensor,
    *,
    out_float32: bool = False,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Row m of group g is x[m] @ weights[g].T: [M, N] in x's dtype, summed in float32.

    x_MK, weights_GNK: bfloat16 or float32, contiguous, on one device. offsets_G: int64 [G + 1] there,
    ascending from 0 to M; rows [offsets[g], offsets[g + 1]) belong to group g. out_float32: return the sums
    unrounded.
    """
    rows, num_in = x_MK.shape
    groups, num_out, _ = weights_GNK.shape
    assert x_MK.dtype is weights_GNK.dtype
    assert x_MK.is_contiguous()
    assert weights_GNK.is_contiguous()
    assert weights_GNK.shape[2] == num_in
    assert offsets_G.dtype is torch.int64
    assert offsets_G.shape[0] == groups + 1
    out = x_MK.new_empty(rows, num_out, dtype=torch.float32 if out_float32 else x_MK.dtype)
    if rows == 0:
        return out
    block_m, block_n, warps, stages = _tile(0 if batch_invariant else rows, groups, x_MK.dtype)
    row_tiles = min(rows, rows // block_m + groups)
    block_k = BLOCK_K[x_MK.dtype]
    grid = (row_tiles * triton.cdiv(num_out, block_n),)
    _grouped_kernel[grid](
        out, x_MK, weights_GNK, offsets_G, groups, num_out, num_in, row_tiles,
        BLOCK_G=triton.next_power_of_2(groups), BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        BAND=8, WHOLE_K=num_in % block_k == 0, WIDEN=INTERPRETED,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def _tile(rows: int, groups: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """(rows, columns of a tile, warps, stages of the pipeline), by the mean rows of a group."""
    if dtype is torch.float32:
        return (64 if rows > 32 * groups else 16), 64, 4, 3
    if rows >= 128 * groups:
        return 128, 256, 8, 3
    return (64, 128, 4, 4) if rows > 32 * groups else (16, 128, 4, 4)


def grouped_linear_reference(
    x_MK: torch.Tensor, offsets_G: torch.Tensor, weights_GNK: torch.Tensor, *, out_float32: bool = False
) -> torch.Tensor:
    """Plain torch form of `grouped_linear`."""
    parts = [
        x_MK[begin:end].float() @ weight_NK.float().T
        for weight_NK, (begin, end) in zip(weights_GNK, pairwise(offsets_G.tolist()), strict=True)
    ]
    out = torch.cat(parts)
    return out if out_float32 else out.to(x_MK.dtype)
