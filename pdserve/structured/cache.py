"""What became of grammars, by tenant: bounded, least recently used first out. Pure; one thread's.

Keys hold the tenant, so that none learns from the time it takes what others have asked for. What does not
live here: compiling and waiting (`store`).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from pdserve.types import Grammar, GrammarKind

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKey:
    """A tenant's grammar. digest: SHA-256 of its text."""

    tenant: str
    kind: GrammarKind
    digest: bytes

    @classmethod
    def of(cls, tenant: str, grammar: Grammar) -> CacheKey:
        """The key of a grammar whose text is Unicode."""
        return cls(tenant=tenant, kind=grammar.kind, digest=hashlib.sha256(grammar.text.encode()).digest())


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLimits:
    """Counts and bytes, of one tenant and of all together."""

    tenant_entries: int = 64
    tenant_bytes: int = 64 << 20
    entries: int = 512
    all_bytes: int = 256 << 20


class GrammarCache(Generic[T]):
    """Values by key. A value that alone is over a limit is not kept."""

    def __init__(self, limits: CacheLimits) -> None:
        self._limits = limits
        self._found: OrderedDict[CacheKey, tuple[T, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: CacheKey) -> T | None:
        """The value, which is now the one used last; None if there is none."""
        entry = self._found.get(key)
        if entry is None:
            return None
        self._found.move_to_end(key)
        return entry[0]

    def put(self, key: CacheKey, value: T, size_bytes: int) -> None:
        """Keeps a value, and drops what is over the limits: the tenant's own oldest first, then anybody's."""
        self._found[key] = (value, size_bytes)
        self._found.move_to_end(key)
        limits = self._limits
        self._shrink(self._of(key.tenant), limits.tenant_entries, limits.tenant_bytes)
        self._shrink(list(self._found), limits.entries, limits.all_bytes)

    def _of(self, tenant: str) -> list[CacheKey]:
        return [key for key in self._found if key.tenant == tenant]

    def _shrink(self, keys: list[CacheKey], most: int, most_bytes: int) -> None:
        """Drops the first of `keys` until the others are within the limits."""
        size = sum(self._found[key][1] for key in keys)
        for at, key in enumerate(keys):
            if len(keys) - at <= most and size <= most_bytes:
                return
            size -= self._found.pop(key)[1]
