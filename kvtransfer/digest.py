"""Byte digests of KV pages (protocol.md §2): xxh3-128, against accident only; tickets and TLS meet malice.

What lives here: the digest of one page, of which a header says what the bytes are, and the digest of all
digests announced in an epoch. What does not: content keys (`pdserve.kvcache.prefix`), who compares digests.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import xxhash

DIGEST_BYTES = 16
HEADER_BYTES = 1024
"""Of the header before the payload, padded with zeros: one block of xxh3, so that whoever copies a page can
digest the very pieces that it stores (csrc/mover.cpp)."""
_PAGE_HEADER = struct.Struct(
    ">4sIIIQIH"
)  # magic, first layer, last layer, shard, index, valid rows, len(layout)
_INDEX_AND_ROWS = struct.Struct(">QI")
_PAIR = struct.Struct(">QH")  # index, bytes of its digest
_INDEX_AT = 16
_PAGE_MAGIC = b"PDP2"
_ALL_MAGIC = b"PDA1"


def page_header(*, layout: str, layer_first: int, layer_last: int, shard: int) -> bytes:
    """The HEADER_BYTES before a page's payload, with index and valid rows 0. Raises ValueError for a layout
    name that does not fit."""
    name = layout.encode()
    header = _PAGE_HEADER.pack(_PAGE_MAGIC, layer_first, layer_last, shard, 0, 0, len(name)) + name
    if len(header) > HEADER_BYTES:
        raise ValueError("the layout's name is too long")
    return header.ljust(HEADER_BYTES, b"\0")


class PageDigester:
    """Digests pages that differ in index, valid rows and bytes only. For one thread."""

    def __init__(self, header: bytes) -> None:
        """header: see `page_header`."""
        self._header = bytearray(header)

    def __call__(self, payload: memoryview, *, index: int, valid_rows: int) -> bytes:
        """See `page_digest`."""
        _INDEX_AND_ROWS.pack_into(self._header, _INDEX_AT, index, valid_rows)
        hasher = xxhash.xxh3_128(self._header)
        hasher.update(payload)
        return bytes(hasher.digest())


def page_digest(
    payload: memoryview,
    *,
    layout: str,
    layer_first: int,
    layer_last: int,
    shard: int,
    index: int,
    valid_rows: int,
) -> bytes:
    """16 bytes over what a page is and its bytes, independent of where it lies.

    payload: the page's bytes, contiguous. layout: fingerprint of the page layout. layer_first..layer_last:
    layers held, the last one included. shard: the tensor-parallel part. index: position in the prompt, in
    pages. valid_rows: tokens in the page. Large payloads are hashed without the interpreter lock.
    """
    header = page_header(layout=layout, layer_first=layer_first, layer_last=layer_last, shard=shard)
    return PageDigester(header)(payload, index=index, valid_rows=valid_rows)


def digest_of_digests(pairs: Iterable[tuple[int, bytes]], record: bytes = b"") -> bytes:
    """16 bytes over (index, digest) pairs, in whatever order they come, and a record that belongs to them.
    A digest is 16 bytes for each rank's part of the page. Raises ValueError for an index given twice or a
    digest of another length."""
    ordered = sorted(pairs)
    indices, lengths = {index for index, _ in ordered}, {len(digest) for _, digest in ordered}
    bad = len(indices) < len(ordered) or (ordered and ordered[0][0] < 0)
    if bad or any(not size or size % DIGEST_BYTES for size in lengths):
        raise ValueError("page digests must be 16 bytes for each rank, one per index")
    hasher = xxhash.xxh3_128(_ALL_MAGIC + struct.pack(">Q", len(record)) + record)
    hasher.update(b"".join([_PAIR.pack(index, len(digest)) + digest for index, digest in ordered]))
    return bytes(hasher.digest())
