"""The workload set: the same four cases for us and for every peer. No I/O and no clock here."""

from __future__ import annotations

import random
from dataclasses import dataclass

Metric = str
PREFILL, DECODE, THROUGHPUT = "prefill", "decode", "throughput"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the table. A run sends `concurrency` requests at once, `repeats` times one after the other.

    metric: prefill (prompt tokens over time to first token), decode (tokens/s from first to last token) or
    throughput (output tokens over wall time). All counts in tokens.
    """

    name: str
    metric: Metric
    unit: str
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    repeats: int = 1


CASES: tuple[Case, ...] = (
    Case(
        name="prefill_1024",
        metric=PREFILL,
        unit="prompt tokens/s",
        prompt_tokens=1024,
        output_tokens=1,
        concurrency=1,
        repeats=3,
    ),
    Case(
        name="decode_batch_1",
        metric=DECODE,
        unit="output tokens/s",
        prompt_tokens=64,
        output_tokens=128,
        concurrency=1,
    ),
    Case(
        name="concurrent_8",
        metric=THROUGHPUT,
        unit="output tokens/s",
        prompt_tokens=256,
        output_tokens=64,
        concurrency=8,
    ),
    Case(
        name="concurrent_32",
        metric=THROUGHPUT,
        unit="output tokens/s",
        prompt_tokens=256,
        output_tokens=64,
        concurrency=32,
    ),
)

# Random ids from the middle of the vocabulary: no control tokens, no unused rows at its end.
FIRST_ID, LAST_ID = 1_000, 48_000


class Prompts:
    """Unique random prompts: no two share a page, so no prefix cache can help anyone."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def take(self, case: Case) -> list[list[int]]:
        """`case.concurrency` fresh prompts of token ids."""
        return [
            [self._random.randrange(FIRST_ID, LAST_ID) for _ in range(case.prompt_tokens)]
            for _ in range(case.concurrency)
        ]
