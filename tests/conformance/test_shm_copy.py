"""The middle of an shm copy: large pages move in parts, and what may happen between two of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from kvtransfer.mover import Copied, PageMover
from kvtransfer.shm.reader import ShmPageReader
from kvtransfer.transport import PageServer, ReadStatus
from tests.conformance.page_host import PAGE_BYTES, Host, content, digest
from tests.conformance.transport_kit import WAIT_S, Destination

PARTS = [1024, PAGE_BYTES // 2, PAGE_BYTES - 2048]


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.pool.close()


@pytest.fixture(scope="module")
def server(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    with host.serving("shm", tmp_path_factory.mktemp("s") / "door") as server:
        yield server


@pytest.fixture
def destination(host: Host) -> Destination:
    return Destination(host.pool.pool_id)


def copying_until(host: Host, server: PageServer, moved: int, then: Callable[[], object]) -> ShmPageReader:
    """A reader whose copy of each page stops once, after `moved` bytes, for `then`."""

    class Stopping(PageMover):
        def move(self, budget_bytes: int) -> list[Copied]:
            first = super().move(moved)
            then()
            return first or super().move(budget_bytes)

    return ShmPageReader(host.reader_config(server), mover=Stopping)


@pytest.mark.parametrize("moved", PARTS)
def test_a_page_freed_in_mid_copy_is_stale(
    host: Host, server: PageServer, destination: Destination, moved: int
) -> None:
    page = 30 + PARTS.index(moved)
    with closing(copying_until(host, server, moved, lambda: host.renew(page))) as reader:
        done = destination.one(reader, page)
    assert (done.status, done.digest) == (ReadStatus.STALE, b"")
    assert not destination.untouched(page)


@pytest.mark.parametrize("moved", PARTS)
def test_a_page_overwritten_in_mid_copy_is_a_mismatch(
    host: Host, server: PageServer, destination: Destination, moved: int
) -> None:
    with closing(copying_until(host, server, moved, lambda: host.flip(40, PAGE_BYTES - 1))) as reader:
        done = destination.one(reader, 40)
    host.flip(40, PAGE_BYTES - 1)
    assert done.status is ReadStatus.MISMATCH
    assert done.digest == digest(bytes(destination.target(40)), 40) != digest(content(40), 40)


@pytest.mark.parametrize("moved", PARTS)
def test_a_read_cancelled_in_mid_copy_just_ends(
    host: Host, server: PageServer, destination: Destination, moved: int
) -> None:
    readers: list[ShmPageReader] = []
    readers.append(copying_until(host, server, moved, lambda: readers[0].cancel(41)))
    with closing(readers[0]) as reader:
        assert destination.one(reader, 41).status is ReadStatus.GOOD
    destination.check_good([41])


@pytest.mark.parametrize("moved", PARTS)
def test_close_in_mid_copy_leaves_the_target_quiet(
    host: Host, server: PageServer, destination: Destination, moved: int
) -> None:
    entered, go = threading.Event(), threading.Event()
    reader = copying_until(host, server, moved, lambda: (entered.set(), go.wait(WAIT_S)))
    destination.read(reader, 42)
    destination.read(reader, 43)
    assert entered.wait(WAIT_S)
    closer = threading.Thread(target=reader.close)
    closer.start()
    go.set()
    closer.join()
    assert {done.read_id for done in destination.wait(2)} == {42, 43}
    before = bytes(destination.memory)
    for page in (42, 43):  # so that a copy that still went on would show
        host.flip(page, PAGE_BYTES - 1)
    assert bytes(destination.memory) == before
    for page in (42, 43):
        host.flip(page, PAGE_BYTES - 1)
    destination.check_good(
        [slot for slot, status in destination.statuses().items() if status is ReadStatus.GOOD]
    )
