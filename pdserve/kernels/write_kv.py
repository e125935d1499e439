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
    assert k_TKD.dtype is kv.storage.dtype
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
    """Plain torch form of `write_kv`."""
    page, row = slots_T.long() // kv.page_size, slots_T.long() % kv.page_size
    k, v = kv.k_part(layer), kv.v_part(layer)
    if kv.dtype == "float32":
        k[page, :, :, row] = k_TKD
        v[page, :, row, :] = v_TKD
    else:
        k[page, :, :, row, :] = k_TKD.reshape(*k_TKD.shape[:2], -1, 2)
        v[page, :, row // 2, :, row % 2] = v_TKD
