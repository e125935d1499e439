"""The simulated "model" and its "KV": every row is a hash of the token prefix it was computed from.

So a stream has one right answer, and a row under the wrong request, position or prefix is seen at once (S1).
"""

from __future__ import annotations

import hashlib
from typing import Any

VOCAB = 1000
END_TOKEN = 0


def row_hash(tokens: tuple[int, ...]) -> int:
    """What the "KV row" of the last of these tokens is: it depends on the whole prefix, as real KV does."""
    return int.from_bytes(hashlib.blake2b(repr(tokens).encode(), digest_size=8).digest())


def next_token(tokens: tuple[int, ...]) -> int:
    """The "model": greedy next token after these."""
    return row_hash(tokens) % VOCAB


def reference(prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """The one right answer of a request."""
    tokens = prompt
    while len(tokens) - len(prompt) < max_tokens:
        tokens = (*tokens, next_token(tokens))
        if tokens[-1] == END_TOKEN:
            break
    return tokens[len(prompt) :]


ROWS: dict[int, tuple[int, ...]] = {}


def make_row(prefix: tuple[int, ...]) -> int:
    """A row's value; remembers which prefix made it, so that a reader of the row can be checked."""
    value = row_hash(prefix)
    ROWS[value] = prefix
    return value


def token_of(value: int, row: int, content: Any, pages: tuple[int, ...], size: int) -> int:
    """The token of a row. Breaks if the row was computed for another position or another prefix (S1)."""
    prefix = ROWS[value]
    assert len(prefix) == row + 1, "a row of another position"
    if row:
        before = content[pages[(row - 1) // size]][(row - 1) % size]
        assert ROWS[before] == prefix[:-1], "KV of another prefix under this request"
    return prefix[-1]
