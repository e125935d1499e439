"""Reads of pages of another layout: staged, re-laid before they count as read, bounded, cancelled.

The transport is the test's: a read ends when the test says so. Pools and the re-layout are real.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from decode_worker import reads as module
from decode_worker import staging
from decode_worker.reads import Reads
from kvtransfer.effects import CancelRead, Relay, StartRead
from kvtransfer.plan import ReplicaLayout, layout_text
from kvtransfer.transport import ReadDone, ReaderConfig, ReadRequest, ReadStatus
from pdserve.kvcache.layout import PageLayout, rank_pool_id
from pdserve.kvcache.pool import KVPool
from pdserve.types import Key, PageName, PeerRef

KEY = Key(request_id="r")
HEADS = (range(1), range(1, 2))


def whole(page_size: int) -> PageLayout:
    return PageLayout(
        num_layers=1, num_kv_heads=2, head_dim=2, page_size=page_size, dtype="float32",
        inner="k[s,h,d] v[s,h,d]",
    )  # fmt: skip


OURS, THEIRS = ReplicaLayout.of(whole(2), [range(2)]), ReplicaLayout.of(whole(4), HEADS)
PEER = PeerRef(
    worker_id="p", incarnation=2, control="", host_id="here", shm="one;two", layout=layout_text(THEIRS)
)


class Reader:
    """One of the transport's readers: what was asked, and its end when the test says so."""

    def __init__(self, config: ReaderConfig) -> None:
        self.config = config
        self.asked: dict[int, tuple[ReadRequest, Callable[[ReadDone], None]]] = {}

    def read(self, request: ReadRequest, done: Callable[[ReadDone], None]) -> None:
        self.asked[request.read_id] = request, done

    def end(self, read_id: int, values: Any = None, status: ReadStatus = ReadStatus.GOOD) -> None:
        request, done = self.asked.pop(read_id)
        if values is not None:
            np.frombuffer(request.target, np.float32)[:] = values
        stamps = {"arrived_s": 1.0, "verified_s": 2.0} if status is ReadStatus.GOOD else {}
        done(ReadDone(read_id=read_id, status=status, digest=b"d", **stamps))

    def cancel(self, read_id: int) -> None:
        if read_id in self.asked:
            self.end(read_id, status=ReadStatus.FAILED)

    def close(self) -> None:
        pass


class Kit:
    """A decode worker's data plane with that transport."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.readers: dict[str, Reader] = {}
        self.ended: list[tuple[int, ReadStatus]] = []
        self.pool = KVPool.create(whole(2), 8, 5)
        way = types.SimpleNamespace(reader=self._reader)
        monkeypatch.setattr(module, "transport", lambda name: way)
        self.handlers: dict[type, Callable[[Any], None]] = {}
        parts = types.SimpleNamespace(
            pools=(self.pool,), transports=("shm",), host_id="here", tls=None,
            context=types.SimpleNamespace(layout=layout_text(OURS)),
        )  # fmt: skip
        port: Any = types.SimpleNamespace(
            parts=parts, on=self.handlers.__setitem__, feed_soon=lambda make: make(0.0),
            measure=lambda *_: None, loop=types.SimpleNamespace(run_in_executor=lambda _, close: close()),
        )  # fmt: skip
        role: Any = types.SimpleNamespace(read_done=self._done)
        self.reads = Reads(port, role)

    def _reader(self, config: ReaderConfig) -> Reader:
        return self.readers.setdefault(config.endpoint, Reader(config))

    def _done(self, read_id: int, status: ReadStatus, *_: Any) -> list[Any]:
        self.ended.append((read_id, status))
        return []

    def start(
        self, read_id: int, rank: int = 0, peer: PeerRef = PEER, *, pool_id: int = 9,
        blank: tuple[int, ...] = (), **relay: Any,
    ) -> None:  # fmt: skip
        told: dict[str, Any] = {"span_page": 0, "num_tokens": 4, "targets": ((0, 3), (1, 6)), **relay}
        self.handlers[StartRead](
            StartRead(
                read_id=read_id, peer=peer, key=KEY, ticket=b"t", index=0, valid_rows=4, digest=b"d",
                source=PageName(pool_id=pool_id, page=1, generation=0), target_page=3, rank=rank, num_ranks=2,
                relay=Relay(layout=peer.layout, **told), blank=blank,
            )
        )  # fmt: skip

    def rows(self, page: int) -> Any:
        """[part, row, head, dim] of a page of ours."""
        return np.frombuffer(self.pool.page_view(page), np.float32).reshape(2, 2, 2, 2)


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kit]:
    made = Kit(monkeypatch)
    yield made
    made.pool.close()


def test_each_rank_is_read_from_its_own_pool_and_its_heads_go_to_every_page(kit: Kit) -> None:
    kit.start(1, rank=0)
    kit.start(2, rank=1)
    one, two = kit.readers["one"], kit.readers["two"]
    assert (one.config.pool_id, two.config.pool_id) == (9, rank_pool_id(9, 1))
    assert (one.config.shard, two.config.shard) == (0, 1)
    assert one.config.page_bytes == THEIRS.page_bytes(0)
    theirs = np.arange(16, dtype=np.float32).reshape(2, 4, 1, 2)  # part, row, head, dim
    one.end(1, theirs.ravel())
    assert (kit.rows(3)[:, :, 1] == 0).all(), "the other rank's head is not there yet"
    two.end(2, 100 + theirs.ravel())
    for page, rows in ((3, slice(0, 2)), (6, slice(2, 4))):
        assert (kit.rows(page)[:, :, 0] == theirs[:, rows, 0]).all()
        assert (kit.rows(page)[:, :, 1] == 100 + theirs[:, rows, 0]).all()
    assert kit.ended == [(1, ReadStatus.GOOD), (2, ReadStatus.GOOD)]


@pytest.mark.parametrize("status", [ReadStatus.MISMATCH, ReadStatus.STALE, ReadStatus.FAILED])
def test_what_is_not_verified_goes_nowhere(kit: Kit, status: ReadStatus) -> None:
    kit.start(1)
    kit.readers["one"].end(1, 7.0, status)
    assert kit.ended == [(1, status)]
    assert not kit.rows(3).any()


def test_pages_that_are_there_are_not_written(kit: Kit) -> None:
    kit.start(1, targets=((1, 6),), held=frozenset({0}))
    kit.readers["one"].end(1, 7.0)
    assert not kit.rows(3).any()
    assert (kit.rows(6)[:, :, 0] == 7).all()


def test_a_plan_that_fails_is_a_read_that_fails(kit: Kit) -> None:
    kit.start(1, targets=((5, 6),))
    kit.readers["one"].end(1, 7.0)
    assert kit.ended == [(1, ReadStatus.FAILED)]


def test_reads_beyond_the_limit_wait_in_order_and_can_be_cancelled(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = THEIRS.page_bytes(0)
    monkeypatch.setattr(staging.Staging.__init__, "__defaults__", (2 * size,))
    for read_id in range(1, 6):
        kit.start(read_id)
    one = kit.readers["one"]
    assert set(one.asked) == {1, 2}
    kit.handlers[CancelRead](CancelRead(read_id=3))
    assert kit.ended == [(3, ReadStatus.FAILED)]
    kit.handlers[CancelRead](CancelRead(read_id=1))
    assert set(one.asked) == {2, 4}
    other = PeerRef(
        worker_id="q", incarnation=7, control="", host_id="here", shm="three;four", layout=PEER.layout
    )
    kit.start(6, peer=other)
    assert set(kit.readers["three"].asked) == {6}, "another peer does not wait for this one"
    one.end(2, 1.0)
    one.end(4, 1.0)
    one.end(5, 1.0)
    assert [read_id for read_id, _ in kit.ended] == [3, 1, 2, 4, 5]


def test_a_worker_that_is_over_leaves_no_memory(kit: Kit) -> None:
    kit.start(1)
    kit.readers["one"].end(1, 1.0)
    kit.reads.forget(PEER)
    assert kit.reads._staging == {}


def test_a_worker_that_is_over_in_the_midst_of_a_read_leaves_no_memory_after_it(kit: Kit) -> None:
    kit.start(1)
    kit.reads.forget(PEER)
    assert kit.reads._staging
    kit.readers["one"].end(1, status=ReadStatus.FAILED)
    assert kit.reads._staging == {}


def test_pools_that_a_peer_makes_up_share_no_reader(kit: Kit) -> None:
    """By the right numbers one rank's pool has the id that another's has elsewhere."""
    kit.start(1, rank=0)
    kit.start(2, rank=1)
    shifted = (9 - rank_pool_id(0, 1)) % 2**64
    kit.start(3, rank=1, pool_id=shifted)
    pools_and_ranks = [(name[2], name[3]) for name in kit.reads._readers]
    assert pools_and_ranks == [(9, 0), (rank_pool_id(9, 1), 1), (9, 1)]


def test_what_no_page_of_theirs_reaches_is_cleared(kit: Kit) -> None:
    kit.pool.storage.fill_(1)
    kit.start(1, blank=(6,))
    assert kit.rows(3).any()
    assert not kit.rows(6).any()
