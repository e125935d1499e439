"""Reads that do not end: cancelled after one lease, their page out of use after another. No read is looked at
twice for it, however many there are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decode_worker.entry import Entry, PromptWork
from decode_worker.pulls import Pulls
from decode_worker.reserve import Reservation, reserve
from kvtransfer.effects import CancelRead, Count, StartRead
from kvtransfer.session.decode import DecodeSession
from kvtransfer.session.guard import RoleContext
from kvtransfer.transport import ReadStatus
from pdserve.kvcache.allocator import PageState
from pdserve.kvcache.manager import PageManager
from pdserve.messages import Announce, Reserve
from pdserve.types import HandoverMode, Key, PageName, PeerRef, SamplingParams

L = 10.0
CTX = RoleContext(
    worker_id="d", incarnation=1, page_size=4, max_context=1000, model="m", numerics="n", secret=b"s" * 16,
    growth_tokens=8, lease_s=L,
)  # fmt: skip


class Kit:
    """One request of several pages at a decode worker."""

    def __init__(self) -> None:
        self.pages = PageManager(64, 7)
        self.pulls = Pulls(CTX, self.pages)
        key = Key(request_id="r")
        call = Reserve(
            key=key, receiver_incarnation=1, ticket=b"", token_ids=tuple(range(20)), num_forced=0,
            sampling=SamplingParams(max_tokens=4), tenant="t", mode=HandoverMode.DISAGGREGATED,
            prefill=PeerRef(worker_id="p", incarnation=2, control=""), deadline_s=1.0,
        )  # fmt: skip
        held = reserve(CTX, self.pages, call, "D:r")
        assert isinstance(held, Reservation)
        session = DecodeSession(key=key, lease_s=L)
        self.entry = Entry(
            session=session,
            call=call,
            held=held,
            ticket_until=1e9,
            accepted_at=0.0,
            arrival=0.0,
            computing=PromptWork(num_tokens=20, page_size=4),
        )

    def start(self, index: int, now: float) -> tuple[int, int]:
        """Read id and target page of one page's pull."""
        announce = Announce(
            key=self.entry.session.key, index=index, page=PageName(pool_id=1, page=index, generation=1),
            valid_rows=4, content_key=self.entry.held.keys[index], digest=bytes(16),
        )  # fmt: skip
        (effect,) = self.pulls.start(self.entry, announce, now)
        assert isinstance(effect, StartRead)
        return effect.read_id, effect.target_page

    def done(self, read_id: int, status: ReadStatus = ReadStatus.FAILED) -> None:
        self.pulls.done(read_id, status, b"", "tcp", (0.0, 0.0))


def test_one_lease_to_the_cancel_and_one_more_to_quarantine() -> None:
    kit = Kit()
    read_id, page = kit.start(0, 100.0)
    assert kit.pulls.next_timer() == 100.0 + L
    assert kit.pulls.tick(100.0 + L - 0.1) == []
    assert kit.pulls.tick(100.0 + L) == [CancelRead(read_id=read_id)]
    assert kit.pulls.next_timer() == 100.0 + 2 * L
    assert kit.pulls.tick(100.0 + 2 * L - 0.1) == []
    assert kit.pages.state(page) is PageState.FILLING
    assert kit.pulls.tick(100.0 + 2 * L) == [Count(name="quarantined")]
    assert kit.pages.state(page) is PageState.QUARANTINED
    assert kit.pulls.next_timer() == float("inf")


def test_a_late_tick_cancels_first_and_gives_the_cancel_its_lease() -> None:
    """After a pause of our own the read was never asked to end: its page must not be lost for that."""
    kit = Kit()
    read_id, page = kit.start(0, 100.0)
    late = 100.0 + 5 * L
    assert kit.pulls.tick(late) == [CancelRead(read_id=read_id)]
    assert kit.pages.state(page) is PageState.FILLING
    assert kit.pulls.next_timer() == late + L
    kit.done(read_id)
    assert kit.pulls.tick(late + L) == []
    assert kit.pages.num_quarantined == 0


@pytest.mark.parametrize("ended", [0, 1, 2])
def test_a_read_that_ended_is_no_more_business(ended: int) -> None:
    kit = Kit()
    reads = [kit.start(index, 100.0 + index)[0] for index in range(3)]
    kit.done(reads[ended], ReadStatus.GOOD)
    left = [read for read in reads if read != reads[ended]]
    assert kit.pulls.tick(100.0 + L + 2) == [CancelRead(read_id=read) for read in left]
    for read in left:
        kit.done(read)
    assert kit.pulls.next_timer() == float("inf")
    assert kit.pulls.cancel(kit.entry) == []


def test_a_request_cancels_its_own_reads_only() -> None:
    kit = Kit()
    mine = [kit.start(index, 0.0)[0] for index in range(2)]
    other = replace(kit.entry, session=DecodeSession(key=Key(request_id="other"), lease_s=L))
    assert kit.pulls.cancel(other) == []
    assert kit.pulls.cancel(kit.entry) == [CancelRead(read_id=read) for read in mine]
