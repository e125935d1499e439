"""Carries out re-layout plans: bytes of source pages to their places in target pages, proven first.

What lives here: the compiled executor (csrc/relay.cpp, built with the mover), and a plain one over numpy of
equal signature, its reference. What does not: plans and their proof (`kvtransfer.plan`), whose pages these
are, digests and generations (the mover's and the readers').

A page is given as its address or as a buffer; an address must stay good for `page_bytes(rank)` bytes.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvtransfer.mover import library
from kvtransfer.plan.layout import ReplicaLayout
from kvtransfer.plan.prove import prove, view
from kvtransfer.plan.relayout import NONE_HELD, Held, PageAt, RelayoutPlan, StridedCopy
from pdserve.errors import Incompatible, InternalError

Page = int | memoryview | bytearray
Pages = Mapping[PageAt, Page]
MAX_LOOPS = 10
LINE_BYTES = 64
# Mirrors `Step`: source and target page, their starts, kind, unit, depth; then counts and both sides' steps.
_STEP = struct.Struct(f"={7 + 3 * MAX_LOOPS}Q")
_KINDS = {("float32", "bfloat16"): 1, ("bfloat16", "float32"): 2}


class Relayout(Protocol):
    """A plan that can be carried out. For one thread at a time; makes no copy of a page."""

    plan: RelayoutPlan

    def execute(
        self,
        *,
        source_pages: Pages,
        target_pages: Pages,
        num_tokens: int,
        held: Held = NONE_HELD,
        tokens_after: int | None = None,
    ) -> int:
        """Writes the target pages of a span from its source pages; how many copies that took.

        source_pages: any of `plan.source_pages(num_tokens, held)`, by (rank, page of the span); those not
        given now are for another call. target_pages: all that the given source pages write to, out of
        `plan.target_pages(num_tokens, held)`. num_tokens: tokens of the span that are filled, from its first.
        held: pages of the span that the target has already; nothing is written there.
        tokens_after: tokens of the context behind them; then rows of windowed layers that no later query sees
        are left out, and such target pages are no good to a prefix cache. None: nothing is left out. Raises
        InternalError for pages that are not the plan's, missing, or too short.
        """
        ...


class NativeRelayout:
    """Compiled; runs without the interpreter lock."""

    def __init__(self, plan: RelayoutPlan) -> None:
        """Proves the plan. Raises InternalError if it is wrong, ConfigError where there is no compiler,
        Incompatible for more loops than the executor has."""
        prove(plan)
        self.plan = plan
        self._guard = _Guard(plan)
        self._relay: Callable[..., int] = library().kvt_relay
        self._sources = _Slots(plan.source, plan.span_tokens)
        self._targets = _Slots(plan.target, plan.span_tokens)
        self._windows = any(copy.window for copy in plan.copies)
        self._steps = self._packed(plan.copies)

    def execute(
        self,
        *,
        source_pages: Pages,
        target_pages: Pages,
        num_tokens: int,
        held: Held = NONE_HELD,
        tokens_after: int | None = None,
    ) -> int:
        """See `Relayout.execute`."""
        self._guard.check(source_pages, target_pages, num_tokens, held)
        steps, count = self._steps, len(self.plan.copies)
        if self._windows and tokens_after is not None:
            copies = [c for c in self.plan.copies if self.plan.seen(c, num_tokens, tokens_after)]
            steps, count = self._packed(copies), len(copies)
        return self._relay(steps, count, self._sources.fill(source_pages), self._targets.fill(target_pages))

    def _packed(self, copies: Sequence[StridedCopy]) -> Any:
        packed = b"".join(
            _STEP.pack(
                self._sources.place[copy.source], self._targets.place[copy.target], *_fields(self.plan, copy)
            )
            for copy in copies
        )
        return ctypes.create_string_buffer(packed, len(packed))


class PlainRelayout:
    """The reference, over numpy: one assignment of strided views for each copy."""

    def __init__(self, plan: RelayoutPlan) -> None:
        """Proves the plan. Raises InternalError if it is wrong."""
        prove(plan)
        self.plan = plan
        self._guard = _Guard(plan)

    def execute(
        self,
        *,
        source_pages: Pages,
        target_pages: Pages,
        num_tokens: int,
        held: Held = NONE_HELD,
        tokens_after: int | None = None,
    ) -> int:
        """See `Relayout.execute`."""
        self._guard.check(source_pages, target_pages, num_tokens, held)
        done = 0
        for copy in self.plan.copies:
            if copy.source not in source_pages or copy.target not in target_pages:
                continue
            if not self.plan.seen(copy, num_tokens, tokens_after):
                continue
            source = _elements(source_pages[copy.source], self.plan.source, copy.source[0])
            target = _elements(target_pages[copy.target], self.plan.target, copy.target[0])
            moved = view(source, copy, target=False)
            view(target, copy, target=True)[...] = converted(moved, target.dtype)
            done += 1
        return done


def converted(bits: npt.NDArray[Any], wanted: np.dtype[Any]) -> npt.NDArray[Any]:
    """Bits of float32 (uint32) and bfloat16 (uint16) as the other: round to nearest, ties to even; a NaN
    stays one, made quiet."""
    if bits.dtype == wanted:
        return bits
    if wanted == np.uint32:
        return bits.astype(np.uint32) << 16
    rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, (bits >> 16) | 0x40, rounded).astype(np.uint16)


class _Guard:
    """What pages `execute` may have; known by number of tokens after the first time."""

    def __init__(self, plan: RelayoutPlan) -> None:
        self._plan = plan
        self._sizes = [
            [layout.page_bytes(rank) for rank in range(len(layout.ranks))]
            for layout in (plan.source, plan.target)
        ]
        self._known: dict[tuple[int, Held], tuple[dict[PageAt, frozenset[PageAt]], frozenset[PageAt]]] = {}

    def check(self, sources: Pages, targets: Pages, num_tokens: int, held: Held) -> None:
        """Raises InternalError unless they may be re-laid."""
        known = self._known.get((num_tokens, held))
        reads, writes = known or self._learn(num_tokens, held)
        for at in sources:
            if at not in reads:
                raise InternalError(f"a re-layout got source (rank, page) {at}, which its plan does not read")
            if not reads[at] <= targets.keys():
                raise InternalError(f"a re-layout lacks a target page of source (rank, page) {at}")
        if not targets.keys() <= writes:
            raise InternalError("a re-layout got target pages that its plan does not write")
        for sizes, pages in ((self._sizes[0], sources), (self._sizes[1], targets)):
            for (rank, _), page in pages.items():
                if not isinstance(page, int) and len(page) != sizes[rank]:
                    raise InternalError(f"a page of rank {rank} has {sizes[rank]} bytes, not {len(page)}")

    def _learn(
        self, num_tokens: int, held: Held
    ) -> tuple[dict[PageAt, frozenset[PageAt]], frozenset[PageAt]]:
        writes = frozenset(self._plan.target_pages(num_tokens, held))
        reads = {
            at: frozenset(copy.target for copy in self._plan.copies if copy.source == at) & writes
            for at in self._plan.source_pages(num_tokens, held)
        }
        self._known[num_tokens, held] = reads, writes
        return reads, writes


class _Slots:
    """The array of page addresses of one side, by place."""

    def __init__(self, layout: ReplicaLayout, span_tokens: int) -> None:
        pages = range(layout.pages_for(span_tokens))
        self.place = {
            (rank, page): number
            for number, (rank, page) in enumerate((r, p) for r in range(len(layout.ranks)) for p in pages)
        }
        self._array = (ctypes.c_void_p * len(self.place))()

    def fill(self, pages: Pages) -> Any:
        """The array with these pages' addresses and null for all others; good until the next call."""
        ctypes.memset(self._array, 0, ctypes.sizeof(self._array))
        for at, page in pages.items():
            self._array[self.place[at]] = page if isinstance(page, int) else _address(page)
        return self._array


def _address(page: memoryview | bytearray) -> int:
    return np.frombuffer(page, np.uint8).ctypes.data


def _elements(page: Page, layout: ReplicaLayout, rank: int) -> npt.NDArray[Any]:
    dtype = np.dtype(np.uint32 if layout.dtype_bytes == 4 else np.uint16)
    if isinstance(page, int):
        page = memoryview((ctypes.c_char * layout.page_bytes(rank)).from_address(page)).cast("B")
    found: npt.NDArray[Any] = np.frombuffer(page, dtype)
    return found


def _fields(plan: RelayoutPlan, copy: StridedCopy) -> list[int]:
    """A step without its pages: starts, kind, unit, depth, counts, steps; in bytes."""
    ours, theirs = plan.source.dtype_bytes, plan.target.dtype_bytes
    loops = [(loop.extent, loop.source * ours, loop.target * theirs) for loop in copy.loops]
    unit = ours
    if loops and loops[-1][1:] == (ours, theirs):
        unit = ours * loops.pop()[0]
    if unit < LINE_BYTES and len(loops) > 1:
        # The row loop of the innermost plane follows the source, as the column loop follows the target.
        row = min(loops[:-1], key=lambda loop: loop[1])
        loops = [*(loop for loop in loops[:-1] if loop is not row), row, loops[-1]]
    loops = [(1, 0, 0)] * (2 - len(loops)) + loops
    if len(loops) > MAX_LOOPS:
        raise Incompatible("the two page layouts are too unlike for the executor; use simpler inner orders")
    kind = _KINDS.get((plan.source.dtype, plan.target.dtype), 0)
    columns = [[*column, *[0] * (MAX_LOOPS - len(loops))] for column in zip(*loops, strict=True)]
    starts = [copy.source_start * ours, copy.target_start * theirs]
    return [*starts, kind, unit, len(loops), *(value for column in columns for value in column)]
