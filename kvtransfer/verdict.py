"""The two checks that decide whether bytes that arrived are the page that was meant. Pure.

What lives here: the rules that every transport's reader and the simulator share. What does not: looking at
generations with the right fences, and computing digests (each transport's own).
"""

from __future__ import annotations

from kvtransfer.transport import ReadStatus


def is_stale(seen: int, named: int) -> bool:
    """Whether a page's generation, seen before or after its bytes were taken, is not the one announced: the
    page went on to somebody else. Not corruption (protocol.md §6)."""
    return seen != named


def is_intact(digest: bytes, announced: bytes) -> bool:
    """Whether the bytes in the target are the bytes that the source announced."""
    return digest == announced


def verdict(*, stale: bool, intact: bool) -> ReadStatus:
    """How a read ended whose bytes are all in the target."""
    if stale:
        return ReadStatus.STALE
    return ReadStatus.GOOD if intact else ReadStatus.MISMATCH
