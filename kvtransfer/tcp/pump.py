"""Page frames taken by compiled code, at the destination end of a plain connection (csrc/pump.cpp).

What lives here: the memory that is shared with it, and who may call a read off. What does not: asking, and
what an answer means (`kvtransfer.tcp.visit`); frames that are no pages (`kvtransfer.stream`).
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Callable, Sequence

from kvtransfer.listener import Signal
from kvtransfer.mover import library
from kvtransfer.reads import Pending, State
from kvtransfer.stream import FrameReceiver, PeerClosed
from kvtransfer.wire import HEADER, Frame, Kind, WireError

NUM_SLOTS = 1024
"""Reads that may be asked at once. A sequence's slot is that of its low bits."""
WAIT_MS = 5
"""How long compiled code waits for more before it lets Python look at its deadlines."""
# Mirror `Slot` (sequence, target, index, valid rows, state) and `Landed` (sequence, when, digest).
_SLOT = struct.Struct("=5Q")
_LANDED = struct.Struct("=QQ16s")
_FREE, _ASKED, _CALLED_OFF = 0, 1, 3
_DRY, _FULL, _OTHER, _CLOSED = range(4)


class _State(ctypes.Structure):
    """Mirrors the head of `Pump`."""

    _fields_ = (
        *((name, ctypes.c_void_p if name in ("slots", "header", "slot") else ctypes.c_uint64)
          for name in ("slots", "mask", "page_bytes", "header", "begun_ns", "have", "slot", "at", "digested",
                       "num_landed")),
        ("lanes", ctypes.c_uint64 * 8),
        ("frame", ctypes.c_uint8 * HEADER.size),
        ("landed", ctypes.c_uint8 * (64 * _LANDED.size)),
    )  # fmt: skip


Landed = Callable[[Sequence[tuple[int, int, bytes]]], None]
"""Told of pages that came, in order: (sequence, monotonic ns when the last byte was in, digest). The time is
0 if the read had been called off; then nothing was written. Without a header digests mean nothing."""


class PagePump:
    """In place of a `FrameReceiver` once the greeting is over. For one thread, but for `call_off`."""

    def __init__(
        self,
        sock: socket.socket,
        wake: Signal,
        *,
        expect: frozenset[Kind],
        page_bytes: int,
        header: bytes | None,
        landed: Landed,
        may_wait: Callable[[], bool],
    ) -> None:
        """expect: see FrameReceiver. header: see `kvtransfer.digest.page_header`; None takes no digests.
        may_wait: whether nothing but more pages, or `wake`, is waited for now."""
        assert page_bytes > 0
        self._sock, self._wake, self._told, self._may_wait = sock, wake, landed, may_wait
        self._others = FrameReceiver(sock, expect=expect, page_bytes=page_bytes, place=_nobody_asked)
        self._receive, self._call_off = library().kvt_receive, library().kvt_call_off
        self._memory = bytearray(library().kvt_pump_bytes())
        self._slots = bytearray(NUM_SLOTS * _SLOT.size)
        self._slots_at = ctypes.addressof(ctypes.c_char.from_buffer(self._slots))
        self._state = state = _State.from_buffer(self._memory)
        self._state_at = ctypes.addressof(state)
        self._landed = memoryview(self._memory)[_State.landed.offset :]
        self._header = header and ctypes.create_string_buffer(header, len(header))
        state.slots, state.mask, state.page_bytes = self._slots_at, NUM_SLOTS - 1, page_bytes
        state.header = ctypes.addressof(self._header) if self._header else None

    @property
    def begun_at(self) -> float | None:
        """See FrameReceiver."""
        begun_ns = self._state.begun_ns
        return begun_ns / 1e9 if begun_ns else self._others.begun_at

    def lend(self, asked: Sequence[Pending]) -> None:
        """These reads' pages may come from now on. Under the ReadTable's lock: none is called off meanwhile.
        No page NUM_SLOTS sequences before one of them is still to come."""
        for pending in asked:
            request, sequence = pending.request, pending.sequence
            at = (sequence & NUM_SLOTS - 1) * _SLOT.size
            if pending.state is State.ASKED:
                target = ctypes.addressof(ctypes.c_char.from_buffer(request.target))
                _SLOT.pack_into(self._slots, at, sequence, target, request.index, request.valid_rows, _ASKED)
            else:
                _SLOT.pack_into(self._slots, at, sequence, 0, 0, 0, _CALLED_OFF)

    def call_off(self, sequence: int) -> bool:
        """Whether a read's page has not begun, and now never will. Any thread, while the read is pending."""
        return bool(self._call_off(self._slots_at + (sequence & NUM_SLOTS - 1) * _SLOT.size))

    def pump(self) -> Frame | None:
        """The next whole frame that is no page, or None if the socket has no more now, or pages came for a
        while. Raises WireError, PeerClosed or OSError, after it told of the pages that came before."""
        while self._others.begun_at is None:
            wait_ms = WAIT_MS if self._may_wait() else 0
            found = self._receive(self._state_at, self._sock.fileno(), self._wake.fileno(), wait_ms)
            num_landed = self._state.num_landed
            if num_landed:
                self._told(list(_LANDED.iter_unpack(self._landed[: num_landed * _LANDED.size])))
            if found == _OTHER:
                self._others.take_up(bytes(self._state.frame))
            elif found == _FULL or (found == _DRY and not num_landed):
                return None
            elif found != _DRY:
                raise _lost(found)
        frame = self._others.pump()
        if frame is not None:
            self._free(frame.sequence)
        return frame

    def _free(self, sequence: int) -> None:
        """The read was answered without its page, which may not come any more."""
        at = (sequence & NUM_SLOTS - 1) * _SLOT.size
        if _SLOT.unpack_from(self._slots, at)[0] == sequence:
            _SLOT.pack_into(self._slots, at, sequence, 0, 0, 0, _FREE)


def _nobody_asked(sequence: int) -> memoryview:
    raise WireError("a page nobody asked for")


def _lost(found: int) -> Exception:
    """What an end of receiving means: the peer has left, or an error number."""
    if found == _CLOSED:
        return PeerClosed()
    error = OSError(-found, os.strerror(-found))
    return PeerClosed() if isinstance(error, ConnectionError) else error
