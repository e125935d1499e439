"""From pages of one layout to pages of another: a plan of strided copies. Pure; nothing is moved here.

What lives here: which rank each KV head is read from, and the copies. What does not: the proof that the
copies are right (`prove`), carrying them out (`kvtransfer.relay`), who may exchange pages at all (`pairing`).

The unit is a *span*: as many tokens as are a whole number of pages on both sides. All spans are re-laid
alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from kvtransfer.plan.layout import ReplicaLayout
from kvtransfer.plan.strides import Loops, Start, fold, fold_all, run, starts, tidy
from pdserve.errors import Incompatible

MAX_SPAN = 1024
"""Tokens; a plan's size, and the time of its proof, go with it."""
PageAt = tuple[int, int]
"""(rank, page of the span)."""
Held = frozenset[int]
"""Target pages of a span, on all ranks, that are there already (prefix hits) and must not be written."""
NONE_HELD: Held = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class StridedCopy:
    """Part of a source page to its place in a target page. Starts and strides in elements of their own side.

    loops: nested, the outermost first; none is one element. rows: the tokens of the span it carries. window:
    of the layers it carries, 0 is all positions.
    """

    source: PageAt
    target: PageAt
    source_start: int
    target_start: int
    loops: Loops
    rows: range
    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayoutPlan:
    """All copies of one span, by target page and place. convert: whether the dtype changes."""

    source: ReplicaLayout
    target: ReplicaLayout
    span_tokens: int
    copies: tuple[StridedCopy, ...]

    @property
    def convert(self) -> bool:
        """Whether elements change their dtype."""
        return self.source.dtype != self.target.dtype

    def source_pages(self, num_tokens: int, held: Held = NONE_HELD) -> tuple[PageAt, ...]:
        """The (rank, page) that are read for a span filled with its first `num_tokens` tokens. A rank whose
        heads are all read elsewhere is not among them, nor is a page whose rows are all in `held`."""
        end, written = self.source.pages_for(self._checked(num_tokens)), self.target_pages(num_tokens, held)
        pages = {copy.source for copy in self.copies if copy.source[1] < end and copy.target in written}
        return tuple(sorted(pages, key=lambda at: (at[1], at[0])))

    def target_pages(self, num_tokens: int, held: Held = NONE_HELD) -> tuple[PageAt, ...]:
        """The (rank, page) that are written for such a span: all but the pages in `held`. Rows from
        `num_tokens` on hold nothing of meaning: what the source has there, or what was there before."""
        pages = [n for n in range(self.target.pages_for(self._checked(num_tokens))) if n not in held]
        return tuple((rank, page) for page in pages for rank in range(len(self.target.ranks)))

    def seen(self, copy: StridedCopy, num_tokens: int, tokens_after: int | None) -> bool:
        """Whether a query sees a copy's rows when `tokens_after` tokens follow the span's `num_tokens`;
        None: all rows count as seen."""
        if copy.window == 0 or tokens_after is None:
            return True
        youngest = min(num_tokens, copy.rows.stop) - 1
        return num_tokens + tokens_after - youngest < copy.window

    def _checked(self, num_tokens: int) -> int:
        if not 1 <= num_tokens <= self.span_tokens:
            raise ValueError(f"a span has 1 to {self.span_tokens} tokens, not {num_tokens}")
        return num_tokens


def compile_plan(
    source: ReplicaLayout, target: ReplicaLayout, *, convert: bool = False, turn: int = 0
) -> RelayoutPlan:
    """The copies that make pages of `target` from pages of `source`.

    convert: whether float32 and bfloat16 may become each other. turn: which of several equally loaded source
    ranks is read; plans of other turns read others. Raises Incompatible, in words, where there is no such
    plan.
    """
    problem = _difference(source, target, convert=convert)
    if problem is not None:
        raise Incompatible(problem)
    readers = _readers(source, turn)
    copies = [
        copy
        for rank in range(len(target.ranks))
        for from_rank in sorted({readers[head] for head in target.heads(rank)})
        for copy in _between(source, from_rank, target, rank, readers)
    ]
    copies.sort(key=lambda copy: (copy.target, copy.target_start, copy.source))
    return RelayoutPlan(
        source=source,
        target=target,
        span_tokens=math.lcm(source.page_size, target.page_size),
        copies=tuple(copies),
    )


@functools.lru_cache(maxsize=256)
def bridge_problem(source: ReplicaLayout, target: ReplicaLayout, *, convert: bool = False) -> str | None:
    """Why pages of `source` can not become pages of `target`, as a sentence for people; None if they can."""
    try:
        compile_plan(source, target, convert=convert)
    except Incompatible as refused:
        return refused.message
    return None


def _difference(source: ReplicaLayout, target: ReplicaLayout, *, convert: bool) -> str | None:
    checks = (
        ("number of layers", len(source.layers), len(target.layers)),
        ("number of KV heads", source.num_kv_heads, target.num_kv_heads),
        ("head dim", source.head_dim, target.head_dim),
        ("set of parts", _part_names(source), _part_names(target)),
    )
    for what, ours, theirs in checks:
        if ours != theirs:
            return f"the {what} differs: {ours} at the source, {theirs} at the target."
    if math.lcm(source.page_size, target.page_size) > MAX_SPAN:
        return (
            f"pages of {source.page_size} and {target.page_size} tokens begin together too seldom; "
            "use page sizes that are multiples of each other."
        )
    if source.dtype != target.dtype and not convert:
        return (
            f"the source has {source.dtype} pages and the target {target.dtype}; "
            "give both one KV dtype, or allow converting pages."
        )
    return _layer_difference(source, target)


def _part_names(layout: ReplicaLayout) -> str:
    return " ".join(sorted(part.name for part in layout.parts))


def _layer_difference(source: ReplicaLayout, target: ReplicaLayout) -> str | None:
    for number, (one, other) in enumerate(zip(source.layers, target.layers, strict=True)):
        if one.window != other.window:
            return f"layer {number} has window {one.window} at the source and {other.window} at the target."
        if None not in (one.shares, other.shares) and one.shares != other.shares:
            return f"layer {number} shares layer {one.shares} at the source and {other.shares} at the target."
    return None


def _readers(source: ReplicaLayout, turn: int) -> dict[int, int]:
    """For each KV head the one rank it is read from: heads with the least choice first, then the least
    loaded."""
    num_ranks = len(source.ranks)
    holders = {
        head: [rank for rank in range(num_ranks) if head in source.heads(rank)]
        for head in range(source.num_kv_heads)
    }
    load = [0] * num_ranks
    found: dict[int, int] = {}
    for head in sorted(holders, key=lambda head: (len(holders[head]), head)):
        found[head] = min(holders[head], key=lambda rank: (load[rank], (rank - turn) % num_ranks))
        load[found[head]] += 1
    return found


def _between(
    source: ReplicaLayout, from_rank: int, target: ReplicaLayout, rank: int, readers: dict[int, int]
) -> Iterator[StridedCopy]:
    """The copies from one rank's pages to another's."""
    there = {head: place for place, head in enumerate(source.heads(from_rank))}
    heads = [
        (there[head], place) for place, head in enumerate(target.heads(rank)) if readers[head] == from_rank
    ]
    for page, from_page, rows in _overlaps(source.page_size, target.page_size):
        at = rows.start % source.page_size, rows.start % target.page_size
        for window, layers in _layers(source, target).items():
            pieces = [
                piece
                for number in range(len(target.parts))
                for piece in _part(source, from_rank, target, rank, number, heads, layers, at, len(rows))
            ]
            for start, loops in fold_all(pieces):
                yield StridedCopy(
                    source=(from_rank, from_page), target=(rank, page), source_start=start.source,
                    target_start=start.target, loops=loops, rows=rows, window=window,
                )  # fmt: skip


def _overlaps(source_size: int, target_size: int) -> Iterator[tuple[int, int, range]]:
    """(target page, source page, tokens of the span that both hold)."""
    at, end = 0, math.lcm(source_size, target_size)
    while at < end:
        stop = min((at // source_size + 1) * source_size, (at // target_size + 1) * target_size)
        yield at // target_size, at // source_size, range(at, stop)
        at = stop


def _layers(source: ReplicaLayout, target: ReplicaLayout) -> dict[int, list[tuple[int, int]]]:
    """By window: (place among the source's stored layers, place among the target's)."""
    place = {layer: number for number, layer in enumerate(source.stored)}
    found: dict[int, list[tuple[int, int]]] = {}
    for number, layer in enumerate(target.stored):
        window = target.layers[layer].window
        found.setdefault(window, []).append((place[source.home(layer)], number))
    return found


def _part(
    source: ReplicaLayout,
    from_rank: int,
    target: ReplicaLayout,
    rank: int,
    number: int,
    heads: list[tuple[int, int]],
    layers: list[tuple[int, int]],
    rows: tuple[int, int],
    num_rows: int,
) -> Iterator[tuple[Start, Loops]]:
    """One part of these layers and heads, from row rows[0] of the source page to row rows[1] of the
    target's."""
    part = target.parts[number]
    from_number = next(n for n, other in enumerate(source.parts) if other.name == part.name)
    ours, theirs = source.parts[from_number].digits(source.sizes(from_rank)), part.digits(target.sizes(rank))
    inner = (
        *run(ours["s"], rows[0], theirs["s"], rows[1], num_rows),
        *run(ours["d"], 0, theirs["d"], 0, target.head_dim),
    )
    (first,) = starts(ours["s"], theirs["s"], [rows])
    sizes = source.part_elems(from_rank), target.part_elems(rank)
    bases = [
        Start(
            (one * len(source.parts) + from_number) * sizes[0],
            (other * len(target.parts) + number) * sizes[1],
        )
        for one, other in layers
    ]
    for head, over_heads in fold(starts(ours["h"], theirs["h"], heads)):
        for base, over_layers in fold(bases):
            yield base + head + first, tidy((*inner, over_heads, over_layers))
