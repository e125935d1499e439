"""Which completions a request wants of its prompt: how many, which of them, by beam search or not. Pure.

What lives here: those fields of a request, checked. What does not: all its other fields (`validate`).
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.api import GenerateInput
from pdserve.errors import InvalidRequest

MAX_CHOICES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """n: choices to give. best_of: choices to make of which those are the best; n if all are given."""

    n: int = 1
    best_of: int = 1

    @property
    def num_runs(self) -> int:
        """How many completions are made at once."""
        return self.best_of


def check_wanted(source: GenerateInput) -> Wanted:
    """Raises InvalidRequest that names the field."""
    for name in ("n", "best_of"):
        if not 0 <= getattr(source, name) <= MAX_CHOICES:
            raise InvalidRequest.field(name, f"must be a whole number from 0 to {MAX_CHOICES}.")
    n = source.n or 1
    best_of = source.best_of or n
    if best_of < n:
        raise InvalidRequest.field("best_of", f"is less than n, {n}: make as many at least.")
    return Wanted(n=n, best_of=best_of)
