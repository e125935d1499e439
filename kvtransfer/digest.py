"""Byte digests of KV pages (protocol.md §2): xxh3-128, against accident only; tickets and TLS meet malice.

What lives here: the digest of one page, of which a header says what the bytes are, and the digest of all
digests announced in an epoch. What does not: content keys (`pdserve.kvcache.prefix`), who compares digests.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import xxhash

DIGEST_BYTES = 16
_PAGE_HEADER = struct.Struct(
    ">4sIIIQIH"
)  # magic, first layer, last layer, shard, index, valid rows, len(layout)
_PAGE_MAGIC = b"PDP1"
_ALL_MAGIC = b"PDA1"


def page_hasher(
    *, layout: str, layer_first: int, layer_last: int, shard: int, index: int, valid_rows: int
) -> xxhash.xxh3_128:
    """A hasher that has taken the header of `page_digest`: update it with the payload, then `digest()`."""
    name = layout.encode()
    header = _PAGE_HEADER.pack(_PAGE_MAGIC, layer_first, layer_last, shard, index, valid_rows, len(name))
    return xxhash.xxh3_128(header + name)


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
    hasher = page_hasher(
        layout=layout,
        layer_first=layer_first,
        layer_last=layer_last,
        shard=shard,
        index=index,
        valid_rows=valid_rows,
    )
    hasher.update(payload)
    return bytes(hasher.digest())


def digest_of_digests(pairs: Iterable[tuple[int, bytes]], record: bytes = b"") -> bytes:
    """16 bytes over (index, digest) pairs, in whatever order they come, and a record that belongs to them.
    Raises ValueError for an index given twice or a digest of another length."""
    hasher = xxhash.xxh3_128(_ALL_MAGIC + struct.pack(">Q", len(record)) + record)
    last = -1
    for index, digest in sorted(pairs):
        if index <= last or len(digest) != DIGEST_BYTES:
            raise ValueError("page digests must be 16 bytes each, one per index")
        hasher.update(struct.pack(">Q", index) + digest)
        last = index
    return bytes(hasher.digest())
