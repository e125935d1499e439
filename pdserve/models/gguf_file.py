"""A strict reader for the header of a GGUF file (ggml's docs/gguf.md, versions 2 and 3, little endian).

What lives here: metadata and the tensor directory, with every count, length, offset and size checked
against the file before anything is allocated. What does not: what the keys mean (`gguf_config`), the
numbers in the tensors (`dequant`).
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from pdserve.errors import ModelError

MAX_HEADER_BYTES = 256 << 20
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_NAME_BYTES = 256
MAX_KEY_BYTES = (1 << 16) - 1
MAX_ELEMENTS = 1 << 40
_STRING, _ARRAY, _BOOL = 8, 9, 7
_LETTERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 10, 11, 12), "BbHhIifQqd", strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTensor:
    """One tensor of the file. shape: outermost first (torch's order). offset: bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFile:
    """A checked GGUF header. metadata: Python values by key. tensors: by name, in file order."""

    path: Path
    size_bytes: int
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def read(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        """The tensor's raw bytes. Raises ModelError if the file has become shorter."""
        raw = np.fromfile(self.path, np.uint8, tensor.num_bytes, offset=tensor.offset)
        if raw.size != tensor.num_bytes:
            _refuse("it became shorter while it was read")
        return raw


def _refuse(why: str) -> NoReturn:
    raise ModelError(f"The GGUF file can not be used: {why}.")


class _Cursor:
    """Bounds-checked reads from the start of a file; fetches the header in growing pieces."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self._data = b""
        self.at = 0

    def _fetch(self, end: int) -> None:
        if end > self._size:
            _refuse("it is shorter than its header says")
        if end > MAX_HEADER_BYTES:
            _refuse(f"its header is longer than {MAX_HEADER_BYTES >> 20} MiB")
        wanted = min(max(2 * len(self._data), 8 << 20, end), self._size, MAX_HEADER_BYTES)
        self._data += self._file.read(wanted - len(self._data))
        if len(self._data) < end:
            _refuse("it became shorter while it was read")

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self._data):
            self._fetch(end)
        piece = self._data[self.at : end]
        self.at = end
        return piece

    def number(self, letter: str) -> Any:
        return struct.unpack("<" + letter, self.take(struct.calcsize("<" + letter)))[0]

    def text(self, what: str, limit: int = MAX_HEADER_BYTES) -> str:
        length = self.number("Q")
        if length > limit:
            _refuse(f"a {what} is longer than {limit} bytes")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError:
            _refuse(f"a {what} is not UTF-8")

    def left(self) -> int:
        return min(self._size, MAX_HEADER_BYTES) - self.at


def _boolean(value: int) -> bool:
    if value > 1:
        _refuse("a Boolean value is neither true nor false")
    return value == 1


def _array(cursor: _Cursor) -> list[Any]:
    kind, count = cursor.number("I"), cursor.number("Q")
    if kind == _STRING:
        if count * 8 > cursor.left():
            _refuse("a list is longer than the file")
        return [cursor.text("text in a list") for _ in range(count)]
    letter = "B" if kind == _BOOL else _LETTERS.get(kind)
    if letter is None:
        _refuse("a list has elements of an unknown type")
    if count * struct.calcsize("<" + letter) > cursor.left():
        _refuse("a list is longer than the file")
    raw = cursor.take(count * struct.calcsize("<" + letter))
    values: list[Any] = np.frombuffer(raw, np.dtype(letter).newbyteorder("<")).tolist()
    return [_boolean(v) for v in values] if kind == _BOOL else values


def _value(cursor: _Cursor) -> Any:
    kind = cursor.number("I")
    if kind == _STRING:
        return cursor.text("text")
    if kind == _ARRAY:
        return _array(cursor)
    if kind == _BOOL:
        return _boolean(cursor.number("B"))
    if kind not in _LETTERS:
        _refuse("a metadata value has an unknown type")
    return cursor.number(_LETTERS[kind])


def _metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text("metadata key", MAX_KEY_BYTES)
        if key in values:
            _refuse("a metadata key is there twice")
        values[key] = _value(cursor)
    return values


def _tensor(cursor: _Cursor) -> GGUFTensor:
    """One directory entry; its offset still counts from the data area."""
    name = cursor.text("tensor name", MAX_NAME_BYTES)
    num_dims = cursor.number("I")
    if not 1 <= num_dims <= 4:
        _refuse("a tensor has no or more than 4 dimensions")
    dims = struct.unpack(f"<{num_dims}Q", cursor.take(8 * num_dims))
    number, offset = cursor.number("I"), cursor.number("Q")
    if not all(1 <= d <= MAX_ELEMENTS for d in dims) or math.prod(dims) > MAX_ELEMENTS:
        _refuse("a tensor is empty or impossibly large")
    if number not in GGMLQuantizationType._value2member_map_:
        _refuse("a tensor has an unknown type")
    kind = GGMLQuantizationType(number)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if dims[0] % block:
        _refuse("a tensor's rows are not a whole number of quantisation blocks")
    size = math.prod(dims) // block * block_bytes
    return GGUFTensor(name=name, shape=tuple(reversed(dims)), kind=kind, offset=offset, num_bytes=size)


def _placed(entries: list[GGUFTensor], start: int, size: int, alignment: int) -> dict[str, GGUFTensor]:
    """The directory with absolute offsets. Refuses misaligned, overlapping, duplicate or outlying tensors."""
    placed: dict[str, GGUFTensor] = {}
    end = start
    for t in sorted(entries, key=lambda e: e.offset):
        at = start + t.offset
        if t.offset % alignment:
            _refuse("a tensor is not aligned")
        if at < end:
            _refuse("two tensors overlap")
        end = at + t.num_bytes
        if end > size:
            _refuse("a tensor lies beyond the end of the file; it may be truncated")
        if t.name in placed:
            _refuse("a tensor name is there twice")
        placed[t.name] = GGUFTensor(name=t.name, shape=t.shape, kind=t.kind, offset=at, num_bytes=t.num_bytes)
    return placed


def _alignment(metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        _refuse("its alignment is not a power of two")
    return alignment


def _parse(path: Path, file: BinaryIO, size: int) -> GGUFFile:
    cursor = _Cursor(file, size)
    if cursor.take(4) != b"GGUF":
        _refuse("it does not begin as a GGUF file does")
    version = cursor.number("I")
    if version not in (2, 3):
        _refuse("it is not of version 2 or 3 in little-endian order")
    num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
    if num_tensors > MAX_TENSORS or num_keys > MAX_KEYS:
        _refuse("it claims too many tensors or metadata keys")
    metadata = _metadata(cursor, num_keys)
    alignment = _alignment(metadata)
    entries = [_tensor(cursor) for _ in range(num_tensors)]
    start = -(-cursor.at // alignment) * alignment
    return GGUFFile(
        path=path, size_bytes=size, metadata=metadata, tensors=_placed(entries, start, size, alignment)
    )


def read_gguf(path: Path) -> GGUFFile:
    """Reads and checks the header of a GGUF file. Raises ModelError for anything it can not trust."""
    try:
        with path.open("rb") as file:
            return _parse(path, file, os.fstat(file.fileno()).st_size)
    except OSError:
        _refuse("it can not be read; check that it exists and its permissions")
