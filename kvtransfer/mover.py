"""The compiled page mover: copies pages between mapped pools and digests them on the way (csrc/mover.cpp).

What lives here: building and loading it, and the memory in which a batch of copies is described to it. The
library holds the re-layout's executor and tcp's frame pump too. What does not: which pages to copy
(`kvtransfer.shm.reader`), the digest of a page that is not copied (`kvtransfer.digest`), re-layout
(`kvtransfer.relay`), frames (`kvtransfer.tcp.pump`).
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtransfer.digest import HEADER_BYTES
from pdserve.errors import ConfigError
from pdserve.kernels.build import built

_SOURCES = Path(__file__).with_name("csrc")
# Mirrors `Piece`: source, target, generation, wanted, index, valid rows, state, digest, moved, lanes.
_PIECE = struct.Struct("=7Q16sQ64s")
_RESULT = struct.Struct("=Q16s")
_RESULT_AT = 48
_STALE = 2


@dataclass(frozen=True, slots=True)
class Copy:
    """One page to copy. source, generation: addresses in the peer's mapping. wanted: the generation it must
    have. target: writable, contiguous, a page long. index, valid_rows: for the digest."""

    source: int
    target: memoryview
    generation: int
    wanted: int
    index: int
    valid_rows: int


@dataclass(frozen=True, slots=True)
class Copied:
    """How a copy ended. stale: the page had or got another generation; then there is no digest."""

    stale: bool
    digest: bytes


class PageMover:
    """A batch of copies at a time. For one thread; copies run without the interpreter lock."""

    def __init__(self, *, page_bytes: int, capacity: int, header: bytes | None) -> None:
        """header: see `kvtransfer.digest.page_header`; None copies without digests, to measure it."""
        assert header is None or len(header) == HEADER_BYTES
        self._move = library().kvt_move
        self._page_bytes, self._header = page_bytes, header
        self._pieces = bytearray(capacity * _PIECE.size)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._pieces))
        self._held: list[ctypes.c_char] = []
        self._ended = 0

    def load(self, copies: Sequence[Copy]) -> None:
        """Sets the next batch, at most `capacity`; what is left of the last one is forgotten."""
        self._held = [ctypes.c_char.from_buffer(copy.target) for copy in copies]
        self._ended = 0
        for number, (copy, held) in enumerate(zip(copies, self._held, strict=True)):
            fields = (copy.source, ctypes.addressof(held), copy.generation, copy.wanted, copy.index)
            _PIECE.pack_into(self._pieces, number * _PIECE.size, *fields, copy.valid_rows, 0, b"", 0, b"")

    @property
    def busy(self) -> bool:
        """Whether copies are left."""
        return self._ended < len(self._held)

    def move(self, budget_bytes: int) -> list[Copied]:
        """Copies about `budget_bytes` more; the copies that ended with that, in order. A large page takes
        several calls, so that none of them is long."""
        first, left = self._ended, len(self._held) - self._ended
        pieces = self._address + first * _PIECE.size
        self._ended += self._move(self._header, pieces, left, self._page_bytes, budget_bytes)
        if not self.busy:
            self._held = []
            ended, self._ended = self._ended, 0
            return self._results(first, ended)
        return self._results(first, self._ended)

    def _results(self, first: int, end: int) -> list[Copied]:
        found = (
            _RESULT.unpack_from(self._pieces, number * _PIECE.size + _RESULT_AT)
            for number in range(first, end)
        )
        return [Copied(state == _STALE, digest) for state, digest in found]


@functools.cache
def library() -> ctypes.CDLL:
    """The mover, built on first use. Raises ConfigError where it can not be built."""
    path = built(_SOURCES, "page-mover")
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError:
        raise ConfigError("the page mover can not be loaded; empty the cache folder and try again") from None
    size = ctypes.c_int64
    loaded.kvt_move.restype = size
    loaded.kvt_move.argtypes = (ctypes.c_char_p, ctypes.c_void_p, size, size, size)
    loaded.kvt_relay.restype = size
    loaded.kvt_relay.argtypes = (ctypes.c_void_p, size, ctypes.c_void_p, ctypes.c_void_p)
    loaded.kvt_pump_bytes.restype = loaded.kvt_receive.restype = loaded.kvt_call_off.restype = size
    loaded.kvt_pump_bytes.argtypes = ()
    loaded.kvt_receive.argtypes = (ctypes.c_void_p, size, size, size)
    loaded.kvt_call_off.argtypes = (ctypes.c_void_p,)
    return loaded
