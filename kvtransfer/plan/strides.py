"""Index runs as nested strided loops over two memories, and few loops out of many. Integers only.

What lives here: the arithmetic that `relayout` is made of. What does not: pages, heads, layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvtransfer.plan.order import Digit, offset
from pdserve.errors import Incompatible


class Loop(NamedTuple):
    """`extent` steps; each goes so many elements on in the source and in the target."""

    extent: int
    source: int
    target: int


class Start(NamedTuple):
    """Where the source and the target begin, in elements."""

    source: int
    target: int

    def __add__(self, other: tuple[int, ...]) -> Start:  # type: ignore[override]
        return Start(self.source + other[0], self.target + other[1])


Loops = tuple[Loop, ...]


def walk(digits: tuple[Digit, ...], start: int, count: int) -> list[Digit]:
    """Indices [start, start + count) of an axis as loops from fine to coarse, the first at `offset(digits,
    start)`.

    Raises Incompatible for a run that ends inside a tile it does not begin in.
    """
    loops: list[Digit] = []
    for digit in reversed(digits):
        start, rest = divmod(start, digit.extent)
        if rest + count <= digit.extent:
            return [*loops, Digit(count, digit.stride)]
        if rest or count % digit.extent:
            break
        loops.append(digit)
        count //= digit.extent
    raise Incompatible("page sizes cut through the tiles of an inner order; use sizes of whole tiles")


def pair(source: Iterable[Digit], target: Iterable[Digit]) -> Loops:
    """Both walks of one run (fine to coarse, equal lengths) as common loops.

    Raises Incompatible where the tiles of one do not nest in the other's.
    """
    loops: list[Loop] = []
    ones, others = list(reversed(list(source))), list(reversed(list(target)))
    while ones and others:
        one, other = ones.pop(), others.pop()
        count = min(one.extent, other.extent)
        if one.extent % count or other.extent % count:
            raise Incompatible("the tiles of the two inner orders do not nest; use orders whose tiles do")
        loops.append(Loop(count, one.stride, other.stride))
        for left, digit in ((ones, one), (others, other)):
            if digit.extent > count:
                left.append(Digit(digit.extent // count, digit.stride * count))
    return tuple(loops)


def run(
    source: tuple[Digit, ...], source_at: int, target: tuple[Digit, ...], target_at: int, n: int
) -> Loops:
    """The loops that take n indices from `source_at` on to `target_at` on."""
    return pair(walk(source, source_at, n), walk(target, target_at, n))


def starts(
    source: tuple[Digit, ...], target: tuple[Digit, ...], pairs: Iterable[tuple[int, int]]
) -> list[Start]:
    """Where each (source index, target index) lies."""
    return [Start(offset(source, one), offset(target, other)) for one, other in pairs]


def tidy(loops: Iterable[Loop]) -> Loops:
    """The same copies with as few loops as can be, the target's largest stride outermost."""
    left = sorted((loop for loop in loops if loop.extent > 1), key=lambda loop: (loop.target, loop.source))
    found: list[Loop] = []
    for loop in left:
        inner = found[-1] if found else None
        if inner and (loop.source, loop.target) == (inner.extent * inner.source, inner.extent * inner.target):
            found[-1] = Loop(inner.extent * loop.extent, inner.source, inner.target)
        else:
            found.append(loop)
    return tuple(reversed(found))


def fold(places: Sequence[Start]) -> list[tuple[Start, Loop]]:
    """Places as few arithmetic runs, each its first place and a loop. No run goes backwards or stands
    still."""
    found: list[tuple[Start, Loop]] = []
    at = 0
    while at < len(places):
        step, count = _step(places, at), 1
        while step and at + count < len(places) and places[at + count] == places[at + count - 1] + step:
            count += 1
        found.append((places[at], Loop(count, *(step or (0, 0)))))
        at += count
    return found


def _step(places: Sequence[Start], at: int) -> tuple[int, int] | None:
    if at + 1 == len(places):
        return None
    source = places[at + 1].source - places[at].source
    target = places[at + 1].target - places[at].target
    return (source, target) if source > 0 and target > 0 else None


def fold_all(pieces: Iterable[tuple[Start, Loops]]) -> list[tuple[Start, Loops]]:
    """Copies that differ by a constant step become one, as often as that helps; in the order of the
    target."""
    current = list(pieces)
    while True:
        groups: dict[Loops, list[Start]] = {}
        for start, loops in sorted(current, key=lambda piece: piece[0].target):
            groups.setdefault(loops, []).append(start)
        folded = [
            (start, tidy((*loops, loop))) for loops, places in groups.items() for start, loop in fold(places)
        ]
        if len(folded) == len(current):
            return sorted(folded, key=lambda piece: piece[0].target)
        current = folded
