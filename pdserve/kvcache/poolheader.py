"""The header of a mapped pool: what its fields are and how a foreign one is checked. Bytes only, no memory.

    0        4096                    header_bytes
    | fields | u64 generation x P, padded to 4 KiB | page 0 | page 1 | … each stride_bytes long |

Fields are little-endian; generations are native u64, since only processes of the same machine map them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from pdserve.errors import Incompatible
from pdserve.kvcache.layout import PAGE_ALIGN_BYTES, PageLayout

MAGIC = b"PDSKVPL\x01"
VERSION = 1
GENERATIONS_AT = PAGE_ALIGN_BYTES
_FIELDS = struct.Struct("<8sQQQQQQ64s")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolHeader:
    """Sizes in bytes. pool_id: the pool's 64 random bits. fingerprint: of the page layout."""

    pool_id: int
    num_pages: int
    page_bytes: int
    stride_bytes: int
    fingerprint: str

    @classmethod
    def of(cls, layout: PageLayout, num_pages: int, pool_id: int) -> PoolHeader:
        """The header of a new pool."""
        return cls(
            pool_id=pool_id,
            num_pages=num_pages,
            page_bytes=layout.page_bytes,
            stride_bytes=layout.stride_bytes,
            fingerprint=layout.fingerprint(),
        )

    @property
    def header_bytes(self) -> int:
        """Where page 0 starts."""
        table = -(-self.num_pages * 8 // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES
        return GENERATIONS_AT + table

    @property
    def total_bytes(self) -> int:
        """Size of the whole segment."""
        return self.header_bytes + self.num_pages * self.stride_bytes

    def pack(self) -> bytes:
        """The fields as they lie at offset 0."""
        sizes = (self.pool_id, self.num_pages, self.page_bytes, self.stride_bytes, self.header_bytes)
        return _FIELDS.pack(MAGIC, VERSION, *sizes, self.fingerprint.encode())

    @classmethod
    def parse(cls, data: bytes, *, fingerprint: str, pool_id: int, size_bytes: int) -> PoolHeader:
        """Checks a foreign header against what was registered and the segment's real size.

        Raises Incompatible for anything that does not fit.
        """
        if len(data) < _FIELDS.size:
            raise Incompatible("the peer's page pool is too short to have a header")
        fields = _FIELDS.unpack_from(data)
        magic, version, found_id, num_pages, page_bytes, stride_bytes, header_bytes, raw = fields
        if magic != MAGIC or version != VERSION:
            raise Incompatible("the peer's page pool has another format; run the same version on all workers")
        if found_id != pool_id:
            raise Incompatible("the peer's page pool is not the one it registered")
        if raw.rstrip(b"\0") != fingerprint.encode():
            raise Incompatible("the peer's page layout differs; run all workers with the same model settings")
        header = cls(
            pool_id=pool_id,
            num_pages=num_pages,
            page_bytes=page_bytes,
            stride_bytes=stride_bytes,
            fingerprint=fingerprint,
        )
        header._check_sizes(header_bytes, size_bytes)
        return header

    def _check_sizes(self, header_bytes: int, size_bytes: int) -> None:
        good = (
            self.num_pages >= 1
            and 1 <= self.page_bytes <= self.stride_bytes
            and self.stride_bytes % PAGE_ALIGN_BYTES == 0
            and header_bytes == self.header_bytes
            and size_bytes == self.total_bytes
        )
        if not good:
            raise Incompatible("the peer's page pool has sizes that do not add up")
