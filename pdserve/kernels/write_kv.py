"""Writing K and V rows of a step into their pages. Rope and its fusion with the write live in `rope`.

Legend: T tokens, K KV heads, D head dim.
"""

from __future__ import annotations

import torch

from pdserve.kernels.kv_view import KVView
from pdserve.kernels.native import DTYPE_CODE, check, library


def write_kv(k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv: KVView, layer: int, slots_T: torch.Tensor) -> None:
    """Write row t of k and v to slots_T[t] (int32; page * page_size + row) of a layer.

    Slots must differ from each other. Raises InternalError for a slot outside the pool.
    """
    assert kv.takes(k_TKD.dtype)
    assert k_TKD.dtype is v_TKD.dtype
    assert slots_T.dtype is torch.int32
    k_TKD, v_TKD = k_TKD.contiguous(), v_TKD.contiguous()
    status = library().pds_write_kv(
        kv.native, k_TKD.data_ptr(), v_TKD.data_ptr(), layer, slots_T.data_ptr(), k_TKD.shape[0],
        DTYPE_CODE[k_TKD.dtype],
    )  # fmt: skip
    check(status)


def write_kv_reference(
    k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv: KVView, layer: int, slots_T: torch.Tensor
) -> None:
    """Plain torch form of `write_kv`; rows of any floating dtype may go to int8 pages."""
    page, row = slots_T.long() // kv.page_size, slots_T.long() % kv.page_size
    k, v = kv.k_part(layer), kv.v_part(layer)
    if kv.dtype == "float32":
        k[page, :, :, row] = k_TKD
        v[page, :, row, :] = v_TKD
    elif kv.dtype == "int8":
        k_codes_TKD, kv.k_scales(layer)[page, :, row] = quantise_rows(k_TKD)
        v_codes_TKD, kv.v_scales(layer)[page, :, row] = quantise_rows(v_TKD)
        k[page, :, :, row, :] = (k_codes_TKD + 128).to(torch.uint8).reshape(*k_TKD.shape[:2], -1, 4)
        v[page, :, row // 4, :, row % 4] = v_codes_TKD.to(torch.int8)
    else:
        k[page, :, :, row, :] = k_TKD.reshape(*k_TKD.shape[:2], -1, 2)
        v[page, :, row // 2, :, row % 2] = v_TKD


def quantise_rows(x_TKD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes_TKD, scale_TK), float32: x = code * scale, by row and head, codes whole numbers in [-127, 127].

    A head with a value that is not a finite number has a NaN for a scale, and codes of 0.
    """
    x_TKD = x_TKD.float()
    top_TK = x_TKD.abs().amax(dim=-1) + (x_TKD * 0).sum(dim=-1)
    none_TK = top_TK < 2.0**-100
    # Not `127 / top`: torch makes that a product with the reciprocal, which rounds twice.
    inverse_TK = torch.where(none_TK, 0, torch.full_like(top_TK, 127) / top_TK)
    codes_TKD = torch.nan_to_num((x_TKD * inverse_TK[..., None]).round(), 0, 0, 0)
    scale_TK = torch.where(none_TK, 0, top_TK / 127)
    return codes_TKD, torch.where(scale_TK.isnan(), torch.nan, scale_TK)  # always the same NaN
