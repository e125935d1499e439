"""The key-value part of a GGUF file as plain Python values, read with bounds checks and nothing else.

Source: the GGUF specification (versions 2 and 3, little-endian). Tensors are not read here: that is the model
loader's part. Every size in the file is checked against what is left of it before it is used.
"""

from __future__ import annotations

import array
import mmap
import struct
import sys
from pathlib import Path
from typing import Any

from pdserve.errors import ModelError

MAX_KEYS = 1 << 16
MAX_ARRAY = 1 << 24
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}
_HEADER = struct.Struct("<4sIQQ")  # magic, version, tensors, keys
_LEN = struct.Struct("<Q")
_TYPE = struct.Struct("<I")
_ARRAY_HEAD = struct.Struct("<IQ")


class _Cursor:
    """A position in the file's bytes; every read is checked."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._size, self._at = data, len(data), 0

    def take(self, count: int) -> bytes:
        if count > self._size - self._at:
            raise ModelError("The GGUF file is cut short: its metadata is longer than the file.")
        part = self._data[self._at : self._at + count]
        self._at += count
        return part

    def unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack(self.take(form.size))

    def text(self) -> str:
        try:
            return str(self.take(*self.unpack(_LEN)), "utf-8")
        except UnicodeDecodeError:
            raise ModelError("The GGUF file is damaged: a text in its metadata is not UTF-8.") from None

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY and depth < 3:
            return self._array(depth)
        if kind not in _SCALARS:
            raise ModelError("The GGUF file is damaged or too new: a metadata value has an unknown type.")
        (number,) = self.unpack(struct.Struct("<" + _SCALARS[kind]))
        return bool(number) if kind == _BOOL else number

    def _array(self, depth: int) -> list[Any]:
        kind, count = self.unpack(_ARRAY_HEAD)
        if count > MAX_ARRAY:
            raise ModelError("The GGUF file is damaged: a list in its metadata is too long.")
        if kind not in _SCALARS:
            return [self.value(kind, depth + 1) for _ in range(count)]
        numbers = array.array(_SCALARS[kind])
        numbers.frombytes(self.take(count * numbers.itemsize))
        if sys.byteorder == "big":
            numbers.byteswap()
        return [bool(n) for n in numbers] if kind == _BOOL else numbers.tolist()


def read_gguf_metadata(path: str | Path) -> dict[str, Any]:
    """All metadata of a GGUF file by key. Raises ModelError for a file that is not sound."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return _values(mapped)
    except (OSError, ValueError):
        raise ModelError("The GGUF file can not be read: it is missing, empty or not readable.") from None


def _values(data: mmap.mmap) -> dict[str, Any]:
    cursor = _Cursor(data)
    magic, version, _, num_keys = cursor.unpack(_HEADER)
    if magic != b"GGUF":
        raise ModelError("The file is not a GGUF file.")
    if version not in (2, 3):
        raise ModelError("The GGUF file has a version that is not supported: convert it to version 3.")
    if num_keys > MAX_KEYS:
        raise ModelError("The GGUF file is damaged: it claims too many metadata keys.")
    found: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.text()
        if key in found:
            raise ModelError("The GGUF file is damaged: a metadata key appears twice.")
        (kind,) = cursor.unpack(_TYPE)
        found[key] = cursor.value(kind)
    return found
