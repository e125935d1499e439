"""The simulated "model" and its "KV": a row names the whole token prefix that it was computed from.

Prefixes are interned, by tenant: row n is the number of (row of the prefix before it, token). So a row
under the wrong request, position, prefix or tenant is another number and is seen at once (S1), and
comparing a page is comparing a few integers. A greedy stream has one right answer; a sampled one depends
on who sampled it, so that a delivered token that somebody samples again shows.
"""

from __future__ import annotations

from collections.abc import Sequence

VOCAB = 1000
END_TOKEN = 0
ENDS_ONE_IN = 41


class Texts:
    """All prefixes of one run. Row numbers are above 0; 0 is memory that nobody wrote."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int | str, int], int] = {}
        self._roots: dict[str, int] = {}

    def root(self, tenant: str) -> int:
        """What the first token of a tenant's prompts is chained to."""
        return self._roots.setdefault(tenant, -1 - len(self._roots))

    def row(self, before: int, token: int) -> int:
        """The row of a token after the prefix that ends with row `before`."""
        return self._rows.setdefault((before, token), len(self._rows) + 1)

    def chain(self, tenant: str, tokens: Sequence[int]) -> list[int]:
        """The rows of all tokens."""
        row, rows = self.root(tenant), []
        for token in tokens:
            row = self.row(row, token)
            rows.append(row)
        return rows


def sample(row: int, sampler: int) -> int:
    """The token after a prefix. sampler: 0 is greedy; others give another text each."""
    mixed = hash((row, sampler, 7919))
    return END_TOKEN if mixed % ENDS_ONE_IN == 0 else 1 + mixed % (VOCAB - 1)


def reference(texts: Texts, tenant: str, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """The one right answer of a greedy request."""
    row = texts.chain(tenant, prompt)[-1]
    answer: list[int] = []
    while len(answer) < max_tokens:
        answer.append(sample(row, 0))
        if answer[-1] == END_TOKEN:
            break
        row = texts.row(row, answer[-1])
    return tuple(answer)
