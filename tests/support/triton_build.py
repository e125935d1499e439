"""Compiles the Triton kernels for an H200 (sm_90), which needs no GPU.

python -m tests.support.triton_build     prints one JSON object: by kernel, instructions of its PTX
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pdserve.kernels.triton import grouped_linear, page_copy, paged_attention

SM_90 = GPUTarget("cuda", 90, 32)


def build(
    kernel: Any,
    pointers: Mapping[str, str],
    constants: Mapping[str, Any],
    floats: tuple[str, ...] = (),
    **how: int,
) -> str:
    """PTX of a kernel whose pointers and numbers are multiples of 16. pointers: element types by name."""
    types, values, even = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            types[name], values[(place,)] = "constexpr", constants[name]
            continue
        types[name] = f"*{pointers[name]}" if name in pointers else "fp32" if name in floats else "i32"
        if name not in floats:
            even[(place,)] = [["tt.divisibility", 16]]
    built = triton.compile(ASTSource(kernel, types, values, even), target=SM_90, options=how)
    assert built.asm["cubin"]
    ptx: str = built.asm["ptx"]
    return ptx


def grouped(rows: int) -> str:
    """For 8 experts and so many rows, in bfloat16."""
    block_m, block_n, warps, stages = grouped_linear._tile(rows, 8, torch.bfloat16)
    constants = {
        "BLOCK_G": 8, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": 64, "BAND": 8, "WHOLE_K": True,
        "WIDEN": False,
    }  # fmt: skip
    pointers = {"out": "bf16", "x": "bf16", "weights": "bf16", "offsets": "i64"}
    return build(grouped_linear._grouped_kernel, pointers, constants, num_warps=warps, num_stages=stages)


def attention(dtype: str) -> str:
    """Head dim 128, four query heads of a KV head."""
    paired = dtype == "bf16"
    constants = {
        "GROUP": 4, "GROUP_PAD": 16, "DIM": 128, "PAGE": 16, "PART": paged_attention.PART,
        "BLOCK": paged_attention.BLOCK, "PAIRED": paired, "WIDEN": False,
    }  # fmt: skip
    pointers = {
        "part_out": "fp32", "part_max": "fp32", "part_sum": "fp32", "q": dtype,
        "kv": "i32" if paired else "fp32", "block_tables": "i32", "context_lens": "i32",
    }  # fmt: skip
    return build(paged_attention._part_kernel, pointers, constants, ("scale",), num_warps=4, num_stages=3)


def main() -> int:
    """Builds all and prints what the tests look at."""
    sums = {"out": "bf16", "part_out": "fp32", "part_max": "fp32", "part_sum": "fp32", "context_lens": "i32"}
    copy = {"to": "i32", "source": "i32", "to_pages": "i64", "pages": "i64"}
    texts = {
        "grouped few rows": grouped(8),
        "grouped many rows": grouped(4096),
        "attention bf16": attention("bf16"),
        "attention fp32": attention("fp32"),
        "sums of parts": build(
            paged_attention._sum_kernel, sums, {"DIM": 128, "PART": paged_attention.PART}, num_warps=1
        ),
        "page copy": build(page_copy._copy_kernel, copy, {"BLOCK": page_copy.BLOCK}),
    }
    marks = ("wgmma.mma_async", "mma.sync", "cp.async.cg.shared.global", "v4.b32", "st.local")
    print(json.dumps({name: {mark: ptx.count(mark) for mark in marks} for name, ptx in texts.items()}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
