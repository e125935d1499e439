"""GGUF tensor data to float32: our own forms of the common types, the `gguf` package for the rest.

What lives here: numbers from blocks, bit-identical to `gguf.quants.dequantize`. What does not: the file's
directory (`gguf_file`), which tensor is which (`gguf_weights`).

Ours come twice: csrc/dequant.cpp, and with torch for machines where that can not be built.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from pdserve.errors import ConfigError, ModelError
from pdserve.kernels.build import built

Kind = GGMLQuantizationType
CHUNK_ELEMENTS = 1 << 18

_NAMES = """
F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K TQ1_0 TQ2_0 MXFP4 NVFP4
IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ4_NL IQ4_XS
"""
SUPPORTED = frozenset(kind for kind in Kind if kind.name in _NAMES.split())
"""Every type that gguf 0.19 can dequantise."""


def half_at(blocks_NB: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte `at` of each block, as float32 [N, 1]."""
    return blocks_NB[:, at : at + 2].contiguous().view(torch.float16).to(torch.float32)


def nibbles_at(blocks_NB: torch.Tensor, at: int) -> torch.Tensor:
    """32 four-bit numbers [N, 32] from 16 bytes: low halves first, then high halves."""
    packed = blocks_NB[:, at : at + 16]
    return torch.cat([packed & 15, packed >> 4], dim=1)


def _fifth_bits(blocks_NB: torch.Tensor, at: int) -> torch.Tensor:
    """Bit i of the 32-bit word at byte `at`, as 0 or 16 for element i: [N, 32] uint8."""
    spread = blocks_NB[:, at : at + 4].repeat_interleave(8, dim=1)
    bits = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8).repeat(4)
    return ((spread & bits) != 0).to(torch.uint8) << 4


def _q4_0(b: torch.Tensor) -> torch.Tensor:
    return half_at(b, 0) * (nibbles_at(b, 2).to(torch.float32) - 8)


def _q4_1(b: torch.Tensor) -> torch.Tensor:
    return (nibbles_at(b, 4).to(torch.float32) * half_at(b, 0)).add_(half_at(b, 2))


def _q5_0(b: torch.Tensor) -> torch.Tensor:
    return half_at(b, 0) * ((nibbles_at(b, 6) | _fifth_bits(b, 2)).to(torch.float32) - 16)


def _q5_1(b: torch.Tensor) -> torch.Tensor:
    return (half_at(b, 0) * (nibbles_at(b, 8) | _fifth_bits(b, 4)).to(torch.float32)).add_(half_at(b, 2))


def _q8_0(b: torch.Tensor) -> torch.Tensor:
    return b[:, 2:].view(torch.int8).to(torch.float32) * half_at(b, 0)


FAST: dict[GGMLQuantizationType, Callable[[torch.Tensor], torch.Tensor]] = {
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q5_0: _q5_0,
    Kind.Q5_1: _q5_1,
    Kind.Q8_0: _q8_0,
}


def _generic(raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    """Through the gguf package, a cache-sized run of blocks at a time."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    out = np.empty(raw.size // block_bytes * block, np.float32)
    blocks = max(1, CHUNK_ELEMENTS // block)
    with np.errstate(all="ignore"):
        for i in range(0, raw.size // block_bytes, blocks):
            piece = raw[i * block_bytes : (i + blocks) * block_bytes].reshape(1, -1)
            values = quants.dequantize(piece, kind)
            out[i * block : i * block + values.size] = values.reshape(-1)
    return out


def with_torch(
    raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """`dequantise` of a type in FAST, by torch's operators."""
    out = torch.empty(shape, dtype=dtype)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    blocks_NB, out_NE = torch.from_numpy(raw).view(-1, block_bytes), out.view(-1, block)
    for i in range(0, blocks_NB.shape[0], CHUNK_ELEMENTS // block):
        piece = slice(i, i + CHUNK_ELEMENTS // block)
        out_NE[piece] = FAST[kind](blocks_NB[piece])
    return out


@functools.cache
def _library() -> ctypes.CDLL | None:
    """None where it can not be built."""
    try:
        loaded = ctypes.CDLL(str(built(Path(__file__).with_name("csrc"), "dequant")))
    except (ConfigError, OSError):
        return None
    at, number = ctypes.c_void_p, ctypes.c_int
    loaded.pdg_dequantise.argtypes = (at, at, ctypes.c_int64, number, number)
    return loaded


def _native(
    library: ctypes.CDLL,
    raw: npt.NDArray[np.uint8],
    kind: GGMLQuantizationType,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    """On one thread: torch's several wait for each other busily where others want the cores too."""
    made = torch.float32 if dtype is torch.float16 else dtype
    out = torch.empty(shape, dtype=made)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = raw.size // block_bytes
    assert raw.flags.c_contiguous
    assert (blocks * block_bytes, blocks * block) == (raw.size, out.numel())
    short = made is torch.bfloat16
    done = library.pdg_dequantise(out.data_ptr(), raw.ctypes.data, blocks, int(kind), short)
    assert done, "such a type is not here"
    return out.to(dtype)


def dequantise(
    raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """The tensor's values, computed in float32 and then rounded to `dtype`; contiguous, of `shape`.

    raw: all its bytes. Raises ModelError for a type nothing here can read.
    """
    if kind not in SUPPORTED:
        raise ModelError(f"The GGUF file has a tensor of type {kind.name}, which is not supported.")
    data = torch.from_numpy(raw)
    plain = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}.get(kind)
    if plain is not None:
        return data.view(plain).to(dtype).view(shape)
    if kind in FAST:
        library = _library()
        return _native(library, raw, kind, shape, dtype) if library else with_torch(raw, kind, shape, dtype)
    return torch.from_numpy(_generic(raw, kind)).to(dtype).view(shape)
