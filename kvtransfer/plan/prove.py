"""The proof that a plan is right: every element of every target page is written exactly once, with the
element that belongs there, and nothing else is written. Needs numpy; the rest of this package does not.

How: each source element gets a number that names what it is, the plan's copies are carried out on the
numbers, and the result is compared with the numbers that the target layout asks for. Numbers come from
reshapes and transposes of the inner order's dims, the copies from strides, so one checks the other.

For a span with fewer tokens nothing is left to prove: copies keep to their two pages, and a row below
`num_tokens` lies in pages that exist on both sides.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtransfer.plan.layout import ReplicaLayout
from kvtransfer.plan.order import AXES, Part
from kvtransfer.plan.relayout import PageAt, RelayoutPlan, StridedCopy
from pdserve.errors import InternalError

Numbers = npt.NDArray[np.int64]


def prove(plan: RelayoutPlan) -> None:
    """Raises InternalError, saying what is wrong, unless the plan fills each target page exactly once and
    right."""
    span = plan.span_tokens
    sources = {at: number_page(plan.source, at, plan.source, span) for at in _pages(plan, plan.source)}
    wanted = {at: number_page(plan.target, at, plan.source, span) for at in _pages(plan, plan.target)}
    got = {at: np.full(numbers.size, -1, np.int64) for at, numbers in wanted.items()}
    written = dict.fromkeys(wanted, 0)
    for copy in plan.copies:
        _check_bounds(copy, sources, wanted)
        place = view(got[copy.target], copy, target=True)
        place[...] = view(sources[copy.source], copy, target=False)
        written[copy.target] += place.size
    for at, numbers in wanted.items():
        _compare(at, numbers, got[at], written[at])


def view(page: npt.NDArray[np.generic], copy: StridedCopy, *, target: bool) -> npt.NDArray[np.generic]:
    """A copy's elements of a page, one dim for each loop."""
    start = copy.target_start if target else copy.source_start
    strides = tuple((loop.target if target else loop.source) * page.itemsize for loop in copy.loops)
    shape = tuple(loop.extent for loop in copy.loops)
    return np.lib.stride_tricks.as_strided(page[start:], shape, strides)


def number_page(layout: ReplicaLayout, at: PageAt, homes: ReplicaLayout, span_tokens: int) -> Numbers:
    """For each element of a page what it is: a number of (layer, part, KV head, token of the span, head dim).

    homes: the layout that says which layer's KV a layer has.
    """
    rank, page = at
    heads = np.array(layout.heads(rank))[:, None, None]
    tokens = (page * layout.page_size + np.arange(layout.page_size))[None, :, None]
    dims = np.arange(layout.head_dim)[None, None, :]
    names = sorted(part.name for part in layout.parts)
    found = []
    for layer in layout.stored:
        for part in layout.parts:
            place = homes.home(layer) * len(names) + names.index(part.name)
            numbers = ((place * layout.num_kv_heads + heads) * span_tokens + tokens) * layout.head_dim + dims
            found.append(arrange(numbers, part))
    return np.concatenate(found)


def arrange(elements: Numbers, part: Part) -> Numbers:
    """Elements [heads, rows, head dim] in the order of a part, flat."""
    shape: list[int] = []
    place: dict[tuple[str, bool], int] = {}
    for axis, size in zip(AXES, elements.shape, strict=True):
        tile = part.tile(axis)
        place[axis, False], place[axis, True] = len(shape), len(shape) + 1
        shape += [size // tile, tile]
    cut = {dim.axis for dim in part.dims if dim.extent}
    order = [place[dim.axis, bool(dim.extent)] for dim in part.dims]
    order += [place[axis, True] for axis in AXES if axis not in cut]
    order += [place["h", False]] * part.of_all_heads
    return elements.reshape(shape).transpose(order).reshape(-1)


def _pages(plan: RelayoutPlan, layout: ReplicaLayout) -> list[PageAt]:
    num_pages = layout.pages_for(plan.span_tokens)
    return [(rank, page) for rank in range(len(layout.ranks)) for page in range(num_pages)]


def _check_bounds(
    copy: StridedCopy, source_pages: dict[PageAt, Numbers], target_pages: dict[PageAt, Numbers]
) -> None:
    for pages, at, start, strides in (
        (source_pages, copy.source, copy.source_start, [loop.source for loop in copy.loops]),
        (target_pages, copy.target, copy.target_start, [loop.target for loop in copy.loops]),
    ):
        counts = [loop.extent for loop in copy.loops]
        if at not in pages or min((start, *strides)) < 0 or min((1, *counts)) < 1:
            raise InternalError(f"a re-layout plan names page {at}, which there is not, or goes backwards")
        last = start + sum((n - 1) * stride for n, stride in zip(counts, strides, strict=True))
        if last >= pages[at].size:
            raise InternalError(f"a re-layout plan leaves page {at}: element {last} of {pages[at].size}")


def _compare(at: PageAt, wanted: Numbers, got: Numbers, written: int) -> None:
    missing, wrong = int((got < 0).sum()), int(((got >= 0) & (got != wanted)).sum())
    if missing or wrong or written != wanted.size:
        raise InternalError(
            f"a re-layout plan is wrong for target (rank, page) {at}: of {wanted.size} elements {missing} "
            f"are not written, {wrong} get another element, and {written} writes are planned"
        )
