"""Which part of a model each tensor-parallel rank has: heads, KV heads, MLP columns, vocabulary rows. Pure.

What lives here: numbers. What does not: weights (`weights`), communication (`group`), processes.

Heads go by KV head, since a query head must lie where its keys are. H query heads, K KV heads, G = H / K:

    ranks <= K   each rank has a run of whole KV heads; the first ones have one more where it does not divide
    ranks >  K   each KV head is copied to a run of ranks, which divide its G query heads between them

    H 9, K 3     2 ranks: KV {0, 1} with heads 0..5 | KV {2} with heads 6..8
                 4 ranks: KV {0} with 0, 1 | KV {0} with 2 | KV {1} with 3..5 | KV {2} with 6..8
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Protocol

from pdserve.errors import ConfigError

MLP_UNIT = 16
"""MLP columns are split in runs of this length where there are enough of them: whole vectors stay whole."""


class Shape(Protocol):
    """What is split, in elements (a `ModelConfig` has it)."""

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def intermediate_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's part, as ranges of the whole model's indices; none is empty.

    heads: query heads, in order of rank without gaps. kv_heads: those of `heads`; more than one rank may have
    the same. mlp: columns of gate and up, rows of down. vocab: rows of embedding and head.
    """

    rank: int
    heads: range
    kv_heads: range
    mlp: range
    vocab: range


def split(total: int, parts: int, unit: int = 1) -> tuple[range, ...]:
    """0..total in `parts` runs that differ by at most one unit; the first ones are longer.

    unit: runs begin at multiples of it, unless there are fewer units than parts.
    """
    if total // unit < parts:
        unit = 1
    units = -(-total // unit)
    longer, least = units % parts, units // parts
    starts = [unit * (i * least + min(i, longer)) for i in range(parts)] + [total]
    return tuple(range(a, b) for a, b in itertools.pairwise(starts))


def shards(shape: Shape, size: int) -> tuple[Shard, ...]:
    """The parts of `size` ranks, by rank. Raises ConfigError where a rank would have nothing to do."""
    if size < 1:
        raise ConfigError("tp: must be at least 1")
    for count, what in ((shape.num_heads, "query heads"), (shape.intermediate_size, "MLP columns")):
        if size > count:
            raise ConfigError(
                f"tp: {size} ranks are more than the model's {count} {what}; use at most {count}"
            )
    if size > shape.vocab_size:
        raise ConfigError(
            f"tp: {size} ranks are more than the model has tokens; use at most {shape.vocab_size}"
        )
    parts = zip(
        _heads(shape.num_heads, shape.num_kv_heads, size),
        split(shape.intermediate_size, size, MLP_UNIT),
        split(shape.vocab_size, size),
        strict=True,
    )
    return tuple(
        Shard(rank=rank, heads=heads, kv_heads=kv_heads, mlp=mlp, vocab=vocab)
        for rank, ((heads, kv_heads), mlp, vocab) in enumerate(parts)
    )


def thread_share(threads: int, size: int, rank: int) -> int:
    """Compute threads of one of `size` ranks that share `threads`: the first have one more, each has one."""
    return max(1, threads // size + (rank < threads % size))


def _heads(num_heads: int, num_kv_heads: int, size: int) -> list[tuple[range, range]]:
    """(query heads, KV heads) by rank."""
    group = num_heads // num_kv_heads
    if size <= num_kv_heads:
        return [(range(kv.start * group, kv.stop * group), kv) for kv in split(num_kv_heads, size)]
    found = []
    for kv, ranks in enumerate(split(size, num_kv_heads)):
        for part in split(group, len(ranks)):
            found.append((range(kv * group + part.start, kv * group + part.stop), range(kv, kv + 1)))
    return found
