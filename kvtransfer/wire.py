"""The data plane's own frames: a fixed header with magic, version and lengths, a body, and maybe one page.

What lives here: the bytes of every frame and strict limits. What does not: moving them over a socket
(`kvtransfer.stream`), what a frame means to a server or reader.

    reader → source   HELLO(pool, layout, key, ticket) · READ(key, ticket, pages and generations) · CANCEL
    source → reader   WELCOME(pool, sizes) or REFUSED; for each page one of PAGE, STALE, DENIED, DROPPED

The pages of one READ have the sequences that follow each other from the frame's own.
REGION, ASK and TELL belong to the nixl transport (`kvtransfer.nixl.frames`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from kvtransfer.ticket import MAX_TICKET_BYTES
from pdserve.types import Key

MAGIC = b"PDKV"
VERSION = 2
HEADER = struct.Struct(">4sBBHQII")  # magic, version, kind, code, sequence, body bytes, payload bytes
MAX_NAME_BYTES = 512
MAX_PAGES_PER_READ = 256
_PLACE = struct.Struct(">QQ")  # page, generation
MAX_BODY_BYTES = MAX_TICKET_BYTES + 2 * MAX_NAME_BYTES + 64 + MAX_PAGES_PER_READ * _PLACE.size
MAX_REGION_BYTES = 64 * 1024
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
    REGION = 10
    ASK = 11
    TELL = 12


class Code(IntEnum):
    """Why a REFUSED or DENIED."""

    NONE = 0
    BAD_TICKET = 1
    WRONG_POOL = 2
    WRONG_LAYOUT = 3
    NO_SUCH_PAGE = 4


_PAGE_FRAME = struct.Struct(">8sQII")
_PAGE_BEGIN = struct.pack(">4sBBH", MAGIC, VERSION, Kind.PAGE, 0)
_MAX_BODIES: dict[int, int] = {Kind.REGION: MAX_REGION_BYTES, Kind.PAGE: 0}


class WireError(Exception):
    """The other end broke the rules of this file. The connection is of no more use."""


@dataclass(slots=True, kw_only=True)
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
    """A reader's wish for pages of one request, with the ticket that allows it. pages: (page, generation), 1
    to MAX_PAGES_PER_READ of them."""

    key: Key
    ticket: bytes
    pages: Sequence[tuple[int, int]]

    def pack(self, sequence: int) -> bytes:
        """The whole frame. sequence: of the first page."""
        places = b"".join(_PLACE.pack(page, generation) for page, generation in self.pages)
        return pack(Kind.READ, sequence=sequence, body=_key(self.key) + _blob(self.ticket) + places)

    @classmethod
    def unpack(cls, body: bytes) -> Read:
        """Raises WireError."""
        fields = _Fields(body)
        key, ticket, places = fields.key(), fields.blob(MAX_TICKET_BYTES), fields.rest()
        if not 1 <= len(places) / _PLACE.size <= MAX_PAGES_PER_READ or len(places) % _PLACE.size:
            raise WireError("a read of a forbidden number of pages")
        return cls(key=key, ticket=ticket, pages=list(_PLACE.iter_unpack(places)))


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


def page_frame(sequence: int, page_bytes: int) -> bytes:
    """What `pack` makes of a PAGE, for whoever sends many."""
    return _PAGE_FRAME.pack(_PAGE_BEGIN, sequence, 0, page_bytes)


def unpack(header: bytes | memoryview, expect: frozenset[Kind], page_bytes: int) -> tuple[Frame, int, int]:
    """A frame as far as its header tells it, and the bytes of body and payload to come.

    expect, page_bytes: see `kvtransfer.stream.FrameReceiver`. Raises WireError.
    """
    magic, version, kind, code, sequence, body_bytes, payload_bytes = HEADER.unpack(header)
    if magic != MAGIC or version != VERSION or kind not in expect:
        raise WireError("not a frame that is welcome here")
    wanted_payload = page_bytes if kind == Kind.PAGE else 0
    max_body = _MAX_BODIES.get(kind, MAX_BODY_BYTES)
    if body_bytes > max_body or payload_bytes != wanted_payload:
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

    def rest(self) -> bytes:
        return self._take(len(self._body) - self._at)

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
