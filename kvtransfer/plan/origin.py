"""How a reader gets the pages of a source: whose parts it reads, how large they are, what they become. Pure.

What lives here: that, from the source's layout and the reader's own. What does not: the copies themselves
(`relayout`), which pages a request lacks (`decode_worker.spread`), moving bytes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from kvtransfer.plan.record import parse_layout
from kvtransfer.plan.relayout import RelayoutPlan, compile_plan
from pdserve.errors import Incompatible


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The pages of a source as a reader sees them.

    page_size: tokens of a source page. num_ranks: of the source; an announced digest has 16 bytes of each.
    parts: the source's ranks that are read, in order. page_bytes: of these parts of one page; None: the
    reader's own. layout: the source's as text, where its pages must be re-laid; empty where they are ours.
    """

    page_size: int
    num_ranks: int = 1
    parts: tuple[int, ...] = (0,)
    page_bytes: int | None = None
    layout: str = ""


def same(page_size: int, num_ranks: int) -> Origin:
    """A source whose pages are cut as the reader's own: each rank reads its peer's."""
    return Origin(page_size=page_size, num_ranks=num_ranks, parts=tuple(range(num_ranks)))


@functools.lru_cache(maxsize=64)
def bridge_plan(source: str, target: str) -> RelayoutPlan:
    """The plan from one layout to another, both as text. Raises Incompatible, in words."""
    return compile_plan(parse_layout(source), parse_layout(target))


@functools.lru_cache(maxsize=64)
def bridged(source: str, target: str) -> Origin:
    """A source of another layout. Raises Incompatible, in words."""
    if not target:
        raise Incompatible("this worker's own page layout can not be described; use equal layouts")
    plan = bridge_plan(source, target)
    layout = plan.source
    parts = tuple(sorted({rank for rank, _ in plan.source_pages(plan.span_tokens)}))
    return Origin(
        page_size=layout.page_size,
        num_ranks=len(layout.ranks),
        parts=parts,
        page_bytes=sum(layout.page_bytes(rank) for rank in parts),
        layout=source,
    )
