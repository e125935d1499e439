"""Frames over a non-blocking stream socket, in and out, without copying a page.

What lives here: a receiver that fills the target memory itself, a sender that takes pool memory as it is.
What does not: the frames' bytes (`kvtransfer.wire`), threads, waiting and time-outs (`kvtransfer.listener`).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from kvtransfer.wire import HEADER, Frame, Kind, unpack

_NOTHING = memoryview(b"")


class PeerClosed(Exception):
    """The other end closed the connection, in order, between or within frames."""


class FrameReceiver:
    """Takes frames off a non-blocking stream socket, one at a time.

    expect: kinds that are welcome now; anything else is a violation. page_bytes: the only payload size.
    place: asked for the memory of a PAGE's payload by sequence; raises WireError for one never asked for.
    begun_at: monotonic seconds when the frame under way began, or None.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        expect: frozenset[Kind],
        page_bytes: int = 0,
        place: Callable[[int], memoryview] | None = None,
    ) -> None:
        self.expect = expect
        self.begun_at: float | None = None
        self._sock, self._page_bytes, self._place = sock, page_bytes, place
        self._header = memoryview(bytearray(HEADER.size))
        self._ahead, self._placed = 0, False
        self._begun_ahead_at: float | None = None
        self._restart()

    def _restart(self) -> None:
        self._frame: Frame | None = None
        self._body = _NOTHING
        self._payload_bytes = 0
        self._view, self._at = self._header, self._ahead
        self._ahead = 0
        self.begun_at = self._begun_ahead_at
        self._begun_ahead_at = None

    def take_up(self, header: bytes) -> None:
        """Goes on behind a header that somebody else took off the socket. Only between frames."""
        assert self._at == 0
        self._header[:] = header
        self._at = HEADER.size
        self.begun_at = time.monotonic()

    def pump(self) -> Frame | None:
        """The next whole frame, or None if the socket has no more now. Raises WireError, PeerClosed."""
        while True:
            while self._at < len(self._view):
                if not self._receive():
                    return None
            if self._frame is None:
                self._open_frame()
            elif self._payload_bytes:
                self._open_payload(self._frame)
            else:
                return self._close_frame(self._frame)

    def _receive(self) -> bool:
        wanted = len(self._view) - self._at
        try:
            count = self._take(self._view[self._at :])
        except BlockingIOError:
            return False
        except ConnectionError as error:
            raise PeerClosed from error
        if count == 0:
            raise PeerClosed
        if self.begun_at is None:
            self.begun_at = time.monotonic()
        if count > wanted:
            self._ahead, count = count - wanted, wanted
            self._begun_ahead_at = time.monotonic()
        self._at += count
        return True

    def _take(self, view: memoryview) -> int:
        """Receives into `view`; behind a page's end goes on into the next header, which saves a call per
        page."""
        if not self._placed:
            return self._sock.recv_into(view)
        return self._sock.recvmsg_into((view, self._header))[0]

    def _open_frame(self) -> None:
        self._frame, body_bytes, self._payload_bytes = unpack(self._header, self.expect, self._page_bytes)
        self._body = memoryview(bytearray(body_bytes)) if body_bytes else _NOTHING
        self._view, self._at = self._body, 0

    def _open_payload(self, frame: Frame) -> None:
        assert self._place is not None
        self._view, self._at = self._place(frame.sequence), 0
        assert len(self._view) == self._payload_bytes
        self._payload_bytes, self._placed = 0, True

    def _close_frame(self, frame: Frame) -> Frame:
        body = bytes(self._body)
        self._placed = False
        self._restart()
        return Frame(kind=frame.kind, code=frame.code, sequence=frame.sequence, body=body) if body else frame


class FrameSender:
    """Puts one load of bytes after another on a non-blocking stream socket, without copying them.

    begun_at: monotonic seconds when the load under way began, or None.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.begun_at: float | None = None
        self._sock = sock
        self._parts: list[bytes | memoryview] = []
        self._left = 0

    @property
    def busy(self) -> bool:
        """Whether a load is under way."""
        return bool(self._parts)

    def load(self, *parts: bytes | memoryview) -> None:
        """Sets the next load. Only when not busy; the memory must stay as it is until `pump` returns True."""
        assert not self._parts
        self._parts = [part for part in parts if len(part)]
        self._left = sum(map(len, self._parts))
        self.begun_at = time.monotonic()

    def own(self) -> None:
        """Copies what is left of the load, so that the memory it came from is free at once."""
        self._parts = [bytes(part) for part in self._parts]

    def pump(self) -> bool:
        """Sends what the socket takes now; True when the load is out. Raises PeerClosed."""
        while self._parts:
            try:
                count = self._sock.sendmsg(self._parts)
            except BlockingIOError:
                return False
            except ConnectionError as error:
                raise PeerClosed from error
            self._left -= count
            if self._left:
                self._drop(count)
            else:
                self._parts = []
        self.begun_at = None
        return True

    def _drop(self, count: int) -> None:
        while self._parts and count >= len(self._parts[0]):
            count -= len(self._parts.pop(0))
        if count:
            self._parts[0] = memoryview(self._parts[0])[count:]
