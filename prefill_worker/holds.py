"""Transfer holds of this worker's own pages, and the digests that go with them. Pure.

What lives here: taking and dropping the holder, and which digest a page is announced with. What does not:
when (`kvtransfer.session.prefill`).
"""

from __future__ import annotations

from kvtransfer.effects import Effect
from kvtransfer.session import prefill_events as table
from pdserve.kvcache.allocator import Holder, HolderKind, PageState
from pdserve.kvcache.manager import PageManager
from pdserve.messages import Outcome
from pdserve.sched.plan import PageReady
from pdserve.types import Key, PageName
from prefill_worker.digests import PageDigests
from prefill_worker.entry import Entry
from prefill_worker.replies import compute


class Holds:
    """All transfer holds of one prefill worker. Called by the control thread only."""

    def __init__(self, pages: PageManager) -> None:
        self._pages = pages
        self._digests = PageDigests()
        self._put_off: list[Holder] = []

    def sealed(self, entry: Entry, event: PageReady) -> table.Sealed:
        """The page as the session knows it, with its first digest if it comes from the cache."""
        page = self._pages.name(event.page)
        return table.Sealed(
            index=event.index, page=page, valid_rows=event.valid_rows, content_key=entry.keys[event.index],
            digest=self._digests.get(page, event.index) if event.cached else None,
        )  # fmt: skip

    def take(self, entry: Entry, hold: table.PHold) -> list[Effect]:
        """Holds a page for a transfer. Its digest is computed once in its life, however often it is sent."""
        page = hold.page.page
        if self._pages.name(page) != hold.page or self._pages.state(page) is not PageState.SEALED:
            # Asked for late: the page went on to somebody else. Decode computes the rest itself.
            entry.todo.append(table.Stop(outcome=Outcome.EXPIRED, detail="the page is gone"))
            return []
        self._pages.hold(page, _transfer(entry.session.key))
        known = self._digests.get(hold.page, hold.index)
        if known is None:
            return [compute(entry.session.key, hold)]
        entry.todo.append(table.Digested(index=hold.index, page=hold.page, digest=known))
        return []

    def drop(self, key: Key, page: PageName) -> None:
        """Decode has it, or the transfer is over."""
        self._pages.drop(page.page, _transfer(key))

    def put_off(self, seq_id: str) -> None:
        """A sequence's own hold on its pages goes at `rest` only: messages come first."""
        self._put_off.append(Holder(HolderKind.REQUEST, seq_id))

    @property
    def num_put_off(self) -> int:
        """Holders that `rest` will drop."""
        return len(self._put_off)

    def rest(self) -> None:
        """Drops what was put off."""
        for holder in self._put_off:
            self._pages.drop_all(holder)
        self._put_off.clear()

    def digested(self, index: int, page: PageName, digest: bytes) -> bool:
        """Records a digest. False: the page went on to somebody else while it was read."""
        if self._pages.name(page.page) != page:
            return False
        self._digests.put(page, index, digest)
        return True


def _transfer(key: Key) -> Holder:
    return Holder(HolderKind.TRANSFER, str(key))
