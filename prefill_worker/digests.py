"""Byte digests of this worker's own pages, by page. Pure.

A page's digest is computed once, right after it is sealed, and holds as long as the page has that name: what
its bytes say later is compared with it and never replaces it. What lives here: that rule. What does not: when
a page is digested (`kvtransfer.session.prefill`), and the hash (`kvtransfer.digest`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pdserve.kvcache.layout import pages_for
from pdserve.sched.plan import StepPlan, StepResult
from pdserve.types import PageName


def last_pages(
    plan: StepPlan, result: StepResult, owns: Callable[[str], bool], page_size: int
) -> Iterator[tuple[int, int, int]]:
    """(page, its index, valid rows) of what the last steps of prompts in this plan wrote. owns: whether a
    sequence is a prompt for another worker."""
    for step in plan.seqs:
        if owns(step.seq_id) and step.seq_id in result.tokens:
            end = step.start + len(step.token_ids)
            for index in range(step.start // page_size, pages_for(end, page_size)):
                yield step.pages[index], index, min(page_size, end - index * page_size)


class PageDigests:
    """The first digest of each page that has one. One entry per page of the pool at most."""

    def __init__(self) -> None:
        self._by_page: dict[int, tuple[PageName, int, bytes]] = {}

    def put(self, page: PageName, index: int, digest: bytes) -> None:
        """Records a digest; without effect if this page has one for this index. The caller makes sure that
        the page has that name now."""
        if self.get(page, index) is None:
            self._by_page[page.page] = (page, index, digest)

    def get(self, page: PageName, index: int) -> bytes | None:
        """The digest of the page by that very name (generation included) as page `index` of a prompt."""
        known = self._by_page.get(page.page)
        return known[2] if known is not None and known[:2] == (page, index) else None
