"""Content keys: the chain hash that says which tokens, under which model and tenant, a page stands for.

Pure. A key is BLAKE2b-128 over its parent's key and the page's token ids; the root binds the tenant's
salt, the model revision and the numerics id (protocol.md §2). Full pages and tails hash in different
domains, and a tail binds its number of valid rows, so that neither can pass for the other.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

KEY_BYTES = 16
_ROOT, _FULL, _TAIL = b"pdserve.kv.root", b"pdserve.kv.full", b"pdserve.kv.tail"


def root_key(*, salt: bytes, model: str, numerics: str) -> bytes:
    """Parent of the first page's key. Fields are length-prefixed, so that no two triples collide."""
    fields = (salt, model.encode(), numerics.encode())
    return _digest(_ROOT, b"".join(struct.pack("<Q", len(field)) + field for field in fields))


class KeyChain:
    """The keys of a growing token sequence's full pages. `keys[i]` stands for pages 0 to i."""

    __slots__ = ("_page_size", "_root", "keys")

    def __init__(self, page_size: int, *, salt: bytes, model: str, numerics: str) -> None:
        self._page_size = page_size
        self._root = root_key(salt=salt, model=model, numerics=numerics)
        self.keys: list[bytes] = []

    def extend(self, token_ids: Sequence[int]) -> list[bytes]:
        """Adds the keys of pages newly filled by `token_ids`, all tokens from the start; returns all keys."""
        size = self._page_size
        for start in range(len(self.keys) * size, len(token_ids) // size * size, size):
            self.keys.append(_page_key(_FULL, self.last, token_ids[start : start + size]))
        return self.keys

    @property
    def last(self) -> bytes:
        """The key that the next page chains to."""
        return self.keys[-1] if self.keys else self._root


def content_keys(
    token_ids: Sequence[int], page_size: int, *, salt: bytes, model: str, numerics: str
) -> tuple[bytes, ...]:
    """Keys of the full pages of `token_ids`, 16 bytes each."""
    return tuple(KeyChain(page_size, salt=salt, model=model, numerics=numerics).extend(token_ids))


def tail_key(token_ids: Sequence[int], page_size: int, *, salt: bytes, model: str, numerics: str) -> bytes:
    """Key of the last page when it is not full. Raises ValueError when the tokens end at a page border."""
    rows = len(token_ids) % page_size
    if not rows:
        raise ValueError("there is no tail: the tokens fill their pages")
    chain = KeyChain(page_size, salt=salt, model=model, numerics=numerics)
    chain.extend(token_ids)
    return _page_key(_TAIL, chain.last, token_ids[len(token_ids) - rows :])


def page_keys(
    token_ids: Sequence[int], page_size: int, *, salt: bytes, model: str, numerics: str
) -> tuple[bytes, ...]:
    """One key per page of `token_ids`, a tail's last: what a transfer announces by index."""
    chain = KeyChain(page_size, salt=salt, model=model, numerics=numerics)
    keys = tuple(chain.extend(token_ids))
    rows = len(token_ids) % page_size
    return (*keys, _page_key(_TAIL, chain.last, token_ids[len(token_ids) - rows :])) if rows else keys


def _page_key(domain: bytes, parent: bytes, token_ids: Sequence[int]) -> bytes:
    return _digest(domain, parent + struct.pack(f"<I{len(token_ids)}I", len(token_ids), *token_ids))


def _digest(domain: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=KEY_BYTES, person=domain).digest()
