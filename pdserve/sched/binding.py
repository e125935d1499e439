"""A sequence's pages from binding to sealing: prefix hits, reservation, growth, copy-on-write, publishing.

The only part of the scheduler that talks to the `PageManager`. It decides nothing about who goes first.
Ranges of a block table and who may write them:

    | shared hits (sealed, never written) | own sealed pages | the page being filled | reserved pages |
    0                             num_shared      num_computed // page_size               len(pages)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from pdserve.kvcache.allocator import CACHE, PageState
from pdserve.kvcache.contentkeys import KeyChain
from pdserve.kvcache.layout import pages_for
from pdserve.kvcache.manager import PageManager
from pdserve.sched.config import SchedConfig
from pdserve.sched.plan import PageReady
from pdserve.sched.sequence import Seq

_WRITABLE = frozenset({PageState.RESERVED, PageState.FILLING})


class PageBinder:
    """Binds, fills and seals pages of sequences under their request holders."""

    def __init__(self, config: SchedConfig, manager: PageManager) -> None:
        self._config = config
        self._manager = manager
        self._page_size = config.page_size
        self._nothing = [0] * manager.homes.num_homes

    # ---- before a step -------------------------------------------------------------------------------

    def bind(
        self, seq: Seq, *, keep_back: Sequence[int] | None = None, home: int | None = None
    ) -> int | None:
        """Gives a waiting sequence a writable place for every row of its tokens, all or nothing.

        Returns how many leading tokens came from the prefix cache just now, or None when pages lack.
        keep_back: pages to leave to others, by home. home: the only one to take; None: any. Both are for
        sequences without pages; the others stay where they are.
        """
        if seq.pages:
            return 0 if self._complete(seq) else None
        keys = self._hit_keys(seq)
        total = pages_for(len(seq.tokens), self._page_size)
        chosen = self._manager.choose(keys, total, keep_back or self._nothing, home)
        if chosen is None:
            return None
        hits = self._manager.match_and_hold(keys, seq.holder, chosen)
        fresh = self._manager.reserve(total - len(hits), seq.holder, home=chosen)
        assert fresh is not None, "a home was chosen that has no room"
        seq.pages = hits + fresh
        seq.num_shared = len(hits)
        seq.num_computed = len(hits) * self._page_size
        return seq.num_computed

    def cached_rows(self, seq: Seq) -> int:
        """Rows that a sequence without pages would get from the prefix cache as it is now; holds nothing."""
        return 0 if seq.pages else len(self._manager.match(self._hit_keys(seq))) * self._page_size

    def home(self, seq: Seq) -> int | None:
        """Where its pages are; None without pages."""
        return self._manager.homes.home(seq.pages[0]) if seq.pages else None

    def homes(self, seq: Seq) -> list[int]:
        """Where it may have its pages, the roomiest first."""
        own = self.home(seq)
        if own is not None:
            return [own]
        return sorted(range(len(self._nothing)), key=self._manager.available_at, reverse=True)

    def by_home(self, seqs: Iterable[Seq]) -> list[int]:
        """How many of these sequences, which have pages, each home has."""
        found = Counter(map(self.home, seqs))
        return [found[home] for home in range(len(self._nothing))]

    def fits_without(self, seq: Seq, others: list[Seq], home: int) -> bool:
        """Whether `bind` or `grow` would succeed in a home of `homes` if the other sequences, which are there
        too, gave all their pages back."""
        available = self._manager.available_at(home)
        short = seq.missing_pages(self._page_size) + len(self._unwritable(seq)) - available
        if short > sum(len(other.pages) for other in others) + len(seq.tokens) // self._page_size:
            return False  # cheap, and nearly always right
        gone = {other.holder for other in others} | {CACHE}
        gained = {page for other in others for page in other.pages if self._manager.holders(page) <= gone}
        hits = () if seq.pages else self._manager.match(self._hit_keys(seq), home)
        held = sum(page not in gained and self._manager.holders(page) != {CACHE} for page in hits)
        return short <= len(gained) + held

    def grow(self, seq: Seq) -> bool:
        """Makes sure that a running sequence's rows have pages, taking what is missing if it is available."""
        missing = seq.missing_pages(self._page_size)
        fresh = self._manager.reserve(missing, seq.holder)
        if fresh is None:
            return False
        seq.pages += fresh
        return True

    def release(self, seq: Seq) -> None:
        """Drops the sequence's request holder everywhere; transfer holders and pins stay."""
        self._manager.drop_all(seq.holder)
        seq.forget_pages()

    def open_rows(self, seq: Seq, end: int) -> list[int]:
        """Marks pages of rows [num_computed, end) as filling; returns those written from their row 0 on."""
        first = seq.num_computed // self._page_size
        pages = seq.pages[first : pages_for(end, self._page_size)]
        for page in pages:
            self._manager.fill(page)
        return list(pages[1:] if seq.num_computed % self._page_size else pages)

    # ---- after a step --------------------------------------------------------------------------------

    def seal_full(self, seq: Seq, start: int) -> list[PageReady]:
        """Seals and publishes the pages that rows [start, num_computed) made full."""
        ready = []
        for index in range(start // self._page_size, seq.num_computed // self._page_size):
            self._manager.seal(seq.pages[index], self._page_size)
            self._publish(seq, index)
            ready.append(self._ready(seq, index, self._page_size, cached=False))
        return ready

    def seal_tail(self, seq: Seq) -> list[PageReady]:
        """Seals the last page with the rows it has, if it is not full; never published."""
        index, rows = divmod(seq.num_computed, self._page_size)
        if not rows:
            return []
        self._manager.seal(seq.pages[index], rows)
        return [self._ready(seq, index, rows, cached=False)]

    def hits(self, seq: Seq, num_tokens: int) -> list[PageReady]:
        """What to tell about the leading pages that came from the prefix cache."""
        indices = range(num_tokens // self._page_size)
        return [self._ready(seq, index, self._page_size, cached=True) for index in indices]

    def drop_replaced(self, seq: Seq) -> None:
        """The copies are done: gives up the pages that were copied."""
        for page in seq.replaced:
            self._manager.drop(page, seq.holder)
        seq.replaced = ()

    # ---- inside --------------------------------------------------------------------------------------

    def _complete(self, seq: Seq) -> bool:
        """Adds what a handed-over block table lacks, and replaces what may not be written."""
        stale = self._unwritable(seq)
        missing = seq.missing_pages(self._page_size)
        fresh = self._manager.reserve(missing + len(stale), seq.holder)
        if fresh is None:
            return False
        table = [*seq.pages, *fresh[len(stale) :]]
        for index, page in zip(stale, fresh, strict=False):
            old, table[index] = table[index], page
            if index * self._page_size < seq.num_computed:  # it has rows: copy them, keep it until then
                self._manager.fill(page)
                seq.copies += ((old, page),)
                seq.replaced += (old,)
            else:
                self._manager.drop(old, seq.holder)
        seq.pages = tuple(table)
        seq.num_shared = min([seq.num_shared, *stale])
        return True

    def _unwritable(self, seq: Seq) -> list[int]:
        """Indices of bound pages at or after the next row that are shared or sealed."""
        first = seq.num_computed // self._page_size
        return [
            index
            for index in range(first, len(seq.pages))
            if index < seq.num_shared or self._manager.state(seq.pages[index]) not in _WRITABLE
        ]

    def _publish(self, seq: Seq, index: int) -> None:
        keys = self._keys(seq)
        if keys:
            self._manager.publish(seq.pages[index], keys[index], keys[index - 1] if index else None)

    def _hit_keys(self, seq: Seq) -> list[bytes]:
        """Keys to look up: never all tokens: a row is left to compute, and every row that is looked at."""
        rows, evaluate = len(seq.tokens) - 1, seq.spec.evaluate
        if evaluate is not None:
            rows = evaluate.first_row(len(seq.tokens))
        return self._keys(seq)[: rows // self._page_size]

    def _keys(self, seq: Seq) -> list[bytes]:
        """Content keys of the full pages of its tokens; none when it stays out of the prefix cache."""
        if not (self._config.prefix_caching and seq.spec.use_prefix_cache):
            return []
        if seq.chain is None:
            salt, config = seq.spec.cache_salt, self._config
            seq.chain = KeyChain(self._page_size, salt=salt, model=config.model, numerics=config.numerics)
        return seq.chain.extend(seq.tokens)

    def _ready(self, seq: Seq, index: int, rows: int, *, cached: bool) -> PageReady:
        page = seq.pages[index]
        return PageReady(seq_id=seq.seq_id, index=index, page=page, valid_rows=rows, cached=cached)
