"""A strict reader for safetensors files (the format's README: 8-byte length, JSON header, data).

What lives here: the tensor directory of one file, checked against the file's size, and reading single
tensors. What does not: shards and names (`hf_directory`).
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
import torch

from pdserve.errors import ModelError
from pdserve.models.json_file import parse_object

MAX_HEADER_BYTES = 100 << 20
MAX_TENSORS = 1 << 16
MAX_NAME = 512
MAX_DIMS = 8
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PACKED = {
    "I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""Types that only quantised models may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a file. offset: bytes from the file's start."""

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    num_bytes: int

    @property
    def is_float(self) -> bool:
        """Whether it may be a weight as it is."""
        return self.dtype in _DTYPES.values()

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """The values, converted to `dtype`. Raises ModelError if the file has become shorter."""
        raw = np.fromfile(self.path, np.uint8, self.num_bytes, offset=self.offset)
        if raw.size != self.num_bytes:
            _refuse("it became shorter while it was read")
        return torch.from_numpy(raw).view(self.dtype).to(dtype).view(self.shape)


def _refuse(why: str) -> NoReturn:
    raise ModelError(f"A safetensors file of the model can not be used: {why}.")


def _counts(value: Any, limit: int) -> tuple[int, ...]:
    """A list of at most `limit` non-negative integers."""
    if not isinstance(value, list) or len(value) > limit:
        _refuse("a tensor's description is malformed")
    if any(isinstance(v, bool) or not isinstance(v, int) or not 0 <= v < 1 << 62 for v in value):
        _refuse("a tensor's description is malformed")
    return tuple(value)


def _entry(path: Path, entry: Any, start: int, quantised: bool) -> StoredTensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        _refuse("a tensor's description is malformed")
    known = _DTYPES | _PACKED if quantised else _DTYPES
    dtype = known.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        _refuse("a tensor has a type other than float64, float32, float16 and bfloat16")
    shape = _counts(entry["shape"], MAX_DIMS)
    offsets = _counts(entry["data_offsets"], 2)
    if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        _refuse("a tensor's size does not match its shape")
    if math.prod(shape) == 0:
        _refuse("a tensor is empty")
    return StoredTensor(
        path=path, shape=shape, dtype=dtype, offset=start + offsets[0], num_bytes=offsets[1] - offsets[0]
    )


def _check_cover(tensors: dict[str, StoredTensor], start: int, size: int) -> None:
    """The data area must be filled exactly, without gaps and overlaps."""
    end = start
    for tensor in sorted(tensors.values(), key=lambda t: t.offset):
        if tensor.offset != end:
            _refuse("its tensors overlap or leave gaps")
        end += tensor.num_bytes
    if end != size:
        _refuse("its length does not match its header; it may be truncated")


def _parse(path: Path, file: BinaryIO, size: int, quantised: bool) -> dict[str, StoredTensor]:
    if size < 10:
        _refuse("it is too short")
    (length,) = struct.unpack("<Q", file.read(8))
    if length > min(size - 8, MAX_HEADER_BYTES):
        _refuse("its header is longer than the file or the limit")
    header = parse_object(file.read(length), "A safetensors header")
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS or any(len(name) > MAX_NAME for name in header):
        _refuse("it has too many tensors or too long names")
    start = 8 + length
    tensors = {name: _entry(path, entry, start, quantised) for name, entry in header.items()}
    _check_cover(tensors, start, size)
    return tensors


def read_safetensors(path: Path, *, quantised: bool = False) -> dict[str, StoredTensor]:
    """The tensors of a file by name. quantised: integers and FP8 are taken too. Raises ModelError for
    anything it can not trust.
    """
    try:
        if not path.is_file():
            _refuse("it is missing")
        with path.open("rb") as file:
            return _parse(path, file, os.fstat(file.fileno()).st_size, quantised)
    except OSError:
        _refuse("it can not be read; check its permissions")
