"""The order of elements inside a page's parts, as data: a tag such as "k[h,d/2,s,2] v[h,s/2,d,2]" is the
table row.

What lives here: reading a tag, and the strides that follow from it. What does not: what a page is made of
(`layout`). A tag names the parts of a layer in the order in which they lie, and for each part its dims from
the outermost to the innermost: h KV heads, s rows (tokens) of the page, d head dim. "d/2" walks d in steps
of two, and a later "2" walks the two inside a step, so an axis may be cut once. A part with c in place of d
and without h ("latent[s,c]") is a row of all heads; c is its width.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

AXES = ("h", "s", "d")
PLAIN = "k[s,h,d] v[s,h,d]"
_PART = re.compile(r"([a-z]+)\[([a-z0-9/,]+)\]")
_DIM = re.compile(r"([hsdc])(?:/([1-9][0-9]{0,3}))?|([1-9][0-9]{0,3})")


class Dim(NamedTuple):
    """One dim of a part. axis: "h", "s" or "d". extent: its extent, or 0: whatever the axis leaves."""

    axis: str
    extent: int


class Digit(NamedTuple):
    """One dim as an axis sees it. extent: its steps; stride: elements from one of its steps to the next."""

    extent: int
    stride: int


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a layer. dims: from the outermost to the innermost."""

    name: str
    dims: tuple[Dim, ...]

    @property
    def of_all_heads(self) -> bool:
        """Whether it has no dim for KV heads: then a rank has it once, as head 0."""
        return all(dim.axis != "h" for dim in self.dims)

    def tile(self, axis: str) -> int:
        """Neighbours of an axis that stay together; its length is a multiple of it."""
        return math.prod(dim.extent for dim in self.dims if dim.axis == axis and dim.extent)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Extents of the dims. sizes: length of each axis, a multiple of its tile."""
        return tuple(dim.extent or sizes[dim.axis] // self.tile(dim.axis) for dim in self.dims)

    def digits(self, sizes: Mapping[str, int]) -> dict[str, tuple[Digit, ...]]:
        """For each axis its dims, from coarse to fine: where index i of the axis lies is a sum over them."""
        found: dict[str, tuple[Digit, ...]] = dict.fromkeys(AXES, ())
        stride = 1
        for dim, count in zip(reversed(self.dims), reversed(self.shape(sizes)), strict=True):
            found[dim.axis] = (Digit(count, stride), *found[dim.axis])
            stride *= count
        return found


@functools.lru_cache(maxsize=64)
def parse_order(tag: str) -> tuple[Part, ...]:
    """The parts that a tag names. Raises ValueError for a tag that is not one."""
    words = tag.split(" ")
    found = [_PART.fullmatch(word) for word in words]
    parts = tuple(Part(match[1], tuple(_dims(match[2]))) for match in found if match)
    if len(parts) != len(words) or len({part.name for part in parts}) != len(parts):
        raise ValueError(f"{tag!r} is not an inner order; an example is {PLAIN!r}")
    for part in parts:
        named = sorted(dim.axis for dim in part.dims if not dim.extent)
        if named not in (["d", "h", "s"], ["d", "s"]):
            raise ValueError(f"part {part.name!r} of {tag!r} must name h, s and d once each, or s and c")
    return parts


def _dims(text: str) -> Iterator[Dim]:
    cut: list[Dim] = []
    for word in text.split(","):
        match = _DIM.fullmatch(word)
        if match is None:
            raise ValueError(f"{word!r} is not a dim of an inner order")
        if match[3]:
            inner = next((dim for dim in cut if dim.extent == int(match[3])), None)
            if inner is None:
                raise ValueError(f"{word!r} has no axis before it that is cut by it")
            cut.remove(inner)
            yield inner
            continue
        axis = "d" if match[1] == "c" else match[1]
        yield Dim(axis, 0)
        if match[2]:
            cut.append(Dim(axis, int(match[2])))
    if cut:
        raise ValueError(f"axis {cut[0].axis!r} is cut, but its inner dim is missing")


def offset(digits: tuple[Digit, ...], index: int) -> int:
    """Elements from index 0 of an axis to `index`."""
    total = 0
    for digit in reversed(digits):
        index, rest = divmod(index, digit.extent)
        total += rest * digit.stride
    return total
