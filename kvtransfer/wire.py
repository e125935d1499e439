"""The data plane's own frames: a fixed header with magic, version and lengths, a body, and maybe one page.

What lives here: the bytes of every frame, strict limits, and non-blocking receiving and sending that never
copies a page. What does not: what a frame means to a server or reader, threads, time-outs.

    reader → source   HELLO(pool, layout, key, ticket) · READ(page, generation, key, ticket) · CANCEL
    source → reader   WELCOME(pool, sizes) or REFUSED; for each READ one of PAGE, STALE, DENIED, DROPPED
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from kvtransfer.ticket import MAX_TICKET_BYTES
from pdserve.types import Key

MAGIC = b"PDKV"
VERSION = 1
HEADER = struct.Struct(">4sBBHQII")  # magic, version, kind, code, sequence, body bytes, payload bytes
MAX_NAME_BYTES = 512
MAX_BODY_BYTES = MAX_TICKET_BYTES + 2 * MAX_NAME_BYTES + 64
_IDENTITY = struct.Struct(">QQ")


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    READ = 4
    CANCEL = 5
    PAGE = 6
    STALE = 7
    DENIED = 8
    DROPPED = 9


class Code(IntEnum):
    """Why a REFUSED or DENIED."""

    NONE = 0
    BAD_TICKET = 1
    WRONG_POOL = 2
    WRONG_LAYOUT = 3
    NO_SUCH_PAGE = 4


class WireError(Exception):
    """The other end broke the rules of this file. The connection is of no more use."""


class PeerClosed(Exception):
    """The other end closed the connection, in order, between or within frames."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A received frame. A PAGE's payload lies where `place` put it. sequence: of the READ it is about."""

    kind: Kind
    code: int = 0
    sequence: int = 0
    body: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A reader's first frame: whose pages it wants, and a ticket for one of its keys."""

    pool_id: int
    layout: str
    key: Key
    ticket: bytes

    def pack(self) -> bytes:
        """The whole frame."""
        body = struct.pack(">Q", self.pool_id) + _text(self.layout) + _key(self.key) + _blob(self.ticket)
        return pack(Kind.HELLO, body=body)

    @classmethod
    def unpack(cls, body: bytes) -> Hello:
        """Raises WireError."""
        fields = _Fields(body)
        hello = cls(
            pool_id=fields.u64(), layout=fields.text(), key=fields.key(), ticket=fields.blob(MAX_TICKET_BYTES)
        )
        fields.end()
        return hello


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """A source's answer to a good hello."""

    pool_id: int
    num_pages: int
    page_bytes: int

    def pack(self) -> bytes:
        """The whole frame."""
        return pack(Kind.WELCOME, body=struct.pack(">QQQ", self.pool_id, self.num_pages, self.page_bytes))

    @classmethod
    def unpack(cls, body: bytes) -> Welcome:
        """Raises WireError."""
        fields = _Fields(body)
        welcome = cls(pool_id=fields.u64(), num_pages=fields.u64(), page_bytes=fields.u64())
        fields.end()
        return welcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A reader's wish for one page, with the ticket that allows it."""

    page: int
    generation: int
    key: Key
    ticket: bytes

    def pack(self, sequence: int) -> bytes:
        """The whole frame."""
        body = struct.pack(">QQ", self.page, self.generation) + _key(self.key) + _blob(self.ticket)
        return pack(Kind.READ, sequence=sequence, body=body)

    @classmethod
    def unpack(cls, body: bytes) -> Read:
        """Raises WireError."""
        fields = _Fields(body)
        read = cls(
            page=fields.u64(), generation=fields.u64(), key=fields.key(), ticket=fields.blob(MAX_TICKET_BYTES)
        )
        fields.end()
        return read


def sendable(key: Key, ticket: bytes) -> bool:
    """Whether a frame can carry them; a source would take what is longer for a violation."""
    counts = key.term, key.epoch
    return (
        len(ticket) <= MAX_TICKET_BYTES
        and len(key.request_id.encode()) <= MAX_NAME_BYTES
        and all(0 <= count < 2**64 for count in counts)
    )


def pack(kind: Kind, *, code: int = 0, sequence: int = 0, body: bytes = b"", payload_bytes: int = 0) -> bytes:
    """Header and body of a frame; `payload_bytes` follow it."""
    return HEADER.pack(MAGIC, VERSION, kind, code, sequence, len(body), payload_bytes) + body


def unpack(header: bytes | memoryview, expect: frozenset[Kind], page_bytes: int) -> tuple[Frame, int, int]:
    """A frame as far as its header tells it, and the bytes of body and payload to come.

    expect, page_bytes: see FrameReceiver. Raises WireError.
    """
    magic, version, kind, code, sequence, body_bytes, payload_bytes = HEADER.unpack(header)
    if magic != MAGIC or version != VERSION or kind not in expect:
        raise WireError("not a frame that is welcome here")
    wanted_payload = page_bytes if kind == Kind.PAGE else 0
    if body_bytes > MAX_BODY_BYTES or payload_bytes != wanted_payload:
        raise WireError("a frame of a forbidden size")
    return Frame(kind=Kind(kind), code=code, sequence=sequence), body_bytes, payload_bytes


def unpack_whole(data: bytes, expect: frozenset[Kind]) -> Frame:
    """The one frame without payload that `data` is. Raises WireError."""
    if len(data) < HEADER.size:
        raise WireError("a frame is too short")
    frame, body_bytes, _ = unpack(data[: HEADER.size], expect, 0)
    if len(data) != HEADER.size + body_bytes:
        raise WireError("a frame of another size than it says")
    return Frame(kind=frame.kind, code=frame.code, sequence=frame.sequence, body=data[HEADER.size :])


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
        self._restart()

    def _restart(self) -> None:
        self._frame: Frame | None = None
        self._body = memoryview(b"")
        self._payload_bytes = 0
        self._view, self._at = self._header, 0
        self.begun_at = None

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
        try:
            count = self._sock.recv_into(self._view[self._at :])
        except BlockingIOError:
            return False
        except ConnectionError as error:
            raise PeerClosed from error
        if count == 0:
            raise PeerClosed
        if self.begun_at is None:
            self.begun_at = time.monotonic()
        self._at += count
        return True

    def _open_frame(self) -> None:
        self._frame, body_bytes, self._payload_bytes = unpack(self._header, self.expect, self._page_bytes)
        self._body = memoryview(bytearray(body_bytes))
        self._view, self._at = self._body, 0

    def _open_payload(self, frame: Frame) -> None:
        assert self._place is not None
        self._view, self._at = self._place(frame.sequence), 0
        assert len(self._view) == self._payload_bytes
        self._payload_bytes = 0

    def _close_frame(self, frame: Frame) -> Frame:
        body = bytes(self._body)
        self._restart()
        return Frame(kind=frame.kind, code=frame.code, sequence=frame.sequence, body=body)


class FrameSender:
    """Puts one load of bytes after another on a non-blocking stream socket, without copying them.

    begun_at: monotonic seconds when the load under way began, or None.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.begun_at: float | None = None
        self._sock = sock
        self._parts: list[memoryview] = []

    @property
    def busy(self) -> bool:
        """Whether a load is under way."""
        return bool(self._parts)

    def load(self, *parts: bytes | memoryview) -> None:
        """Sets the next load. Only when not busy; the memory must stay as it is until `pump` returns True."""
        assert not self._parts
        self._parts = [memoryview(part) for part in parts if len(part)]
        self.begun_at = time.monotonic()

    def pump(self) -> bool:
        """Sends what the socket takes now; True when the load is out. Raises PeerClosed."""
        while self._parts:
            try:
                count = self._sock.sendmsg(self._parts)
            except BlockingIOError:
                return False
            except ConnectionError as error:
                raise PeerClosed from error
            self._drop(count)
        self.begun_at = None
        return True

    def _drop(self, count: int) -> None:
        while self._parts and count >= len(self._parts[0]):
            count -= len(self._parts.pop(0))
        if count:
            self._parts[0] = self._parts[0][count:]


class _Fields:
    """Reads a body field by field; raises WireError for anything that does not add up."""

    def __init__(self, body: bytes) -> None:
        self._body, self._at = body, 0

    def u64(self) -> int:
        return int.from_bytes(self._take(8), "big")

    def blob(self, limit: int) -> bytes:
        size = int.from_bytes(self._take(2), "big")
        if size > limit:
            raise WireError("a field is too long")
        return self._take(size)

    def text(self) -> str:
        try:
            return self.blob(MAX_NAME_BYTES).decode()
        except UnicodeDecodeError as error:
            raise WireError("a name is not UTF-8") from error

    def key(self) -> Key:
        return Key(request_id=self.text(), term=self.u64(), epoch=self.u64())

    def end(self) -> None:
        if self._at != len(self._body):
            raise WireError("a body is too long")

    def _take(self, size: int) -> bytes:
        part = self._body[self._at : self._at + size]
        if len(part) != size:
            raise WireError("a body is too short")
        self._at += size
        return part


def _blob(value: bytes) -> bytes:
    return struct.pack(">H", len(value)) + value


def _text(value: str) -> bytes:
    return _blob(value.encode())


def _key(key: Key) -> bytes:
    return _text(key.request_id) + _IDENTITY.pack(key.term, key.epoch)
