"""What the nixl transport says over its control connection, beyond the hello that all transports share.

What lives here: the bytes of three frames and the checks of every number in them. What does not: the hello
(`kvtransfer.hello`), moving frames (`kvtransfer.stream`).

    source → reader   after WELCOME: REGION(base, stride, pages, device, metadata) · TELL(generation)
    reader → source   ASK(page)

A source's endpoint is host:port#fingerprint. It reaches readers over the authenticated control plane, so
the fingerprint tells whether a region, whose metadata goes into foreign C++, is what the source published.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass

from kvtransfer.sockets import split_address
from kvtransfer.wire import HEADER, MAX_REGION_BYTES, Frame, Kind, WireError, pack

HOST_MEMORY = 0
_REGION = struct.Struct(">QQQII")  # base, stride, pages, device, metadata bytes
_U64 = struct.Struct(">Q")
_ADDRESS_LIMIT = 2**57  # of user space, on machines with the largest page tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A source's registered pool: base is the address of page 0 in the source, stride_bytes the distance of
    two pages. metadata: of its NIXL agent, opaque."""

    base: int
    stride_bytes: int
    num_pages: int
    device: int
    metadata: bytes

    def pack(self) -> bytes:
        """The whole frame."""
        sizes = (self.base, self.stride_bytes, self.num_pages, self.device, len(self.metadata))
        return pack(Kind.REGION, body=_REGION.pack(*sizes) + self.metadata)

    @classmethod
    def unpack(cls, body: bytes, *, published: str, num_pages: int, page_bytes: int) -> Region:
        """published: the fingerprint. num_pages, page_bytes: what the welcome said. Raises WireError for a
        region that is not the published one, or can not be a pool."""
        if not hmac.compare_digest(fingerprint(body), published):
            raise WireError("a region that nobody published")
        if not _REGION.size < len(body) <= MAX_REGION_BYTES:
            raise WireError("a region of a forbidden size")
        base, stride, pages, device, size = _REGION.unpack_from(body)
        metadata = body[_REGION.size :]
        good = (
            size == len(metadata)
            and 0 < pages == num_pages
            and device == HOST_MEMORY
            and 0 < page_bytes <= stride
            and 0 < base <= base + stride * pages <= _ADDRESS_LIMIT
        )
        if not good:
            raise WireError("a region that does not add up")
        return cls(base=base, stride_bytes=stride, num_pages=pages, device=device, metadata=metadata)

    def address(self, page: int) -> int:
        """Where a page of the pool lies in the source."""
        assert 0 <= page < self.num_pages
        return self.base + page * self.stride_bytes


def fingerprint(body: bytes) -> str:
    """What the body of a REGION is known by."""
    return hashlib.sha256(body).hexdigest()


def endpoint(address: str, region: bytes) -> str:
    """Where a source is reached, and the fingerprint of the REGION frame it will send."""
    return f"{address}#{fingerprint(region[HEADER.size :])}"


def split_endpoint(text: str) -> tuple[str, int, str]:
    """Host, port and fingerprint. Raises ValueError."""
    address, _, published = text.partition("#")
    return *split_address(address), published


def ask(page: int, sequence: int) -> bytes:
    """The frame that asks for a page's generation."""
    return pack(Kind.ASK, sequence=sequence, body=_U64.pack(page))


def tell(generation: int, sequence: int) -> bytes:
    """The frame that answers it."""
    return pack(Kind.TELL, sequence=sequence, body=_U64.pack(generation))


def number(frame: Frame) -> int:
    """The one number in an ASK or a TELL. Raises WireError."""
    if len(frame.body) != _U64.size:
        raise WireError("a number of another size")
    return int(_U64.unpack(frame.body)[0])
