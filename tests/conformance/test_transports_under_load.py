"""What every transport promises when much is asked at once, and when connections and readers come and go."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvtransfer.transport import PageReader, PageServer, ReadDone, ReadStatus
from tests.conformance.page_host import NUM_PAGES, PAGE_BYTES, Host, content, digest, way
from tests.conformance.test_transports import TRANSPORTS
from tests.conformance.transport_kit import WAIT_S, Destination

MANY = 4500
DIALLED_AGAIN = [
    name for name in TRANSPORTS if not name.startswith("nixl")
]  # there an endpoint is one source's


@pytest.fixture(params=TRANSPORTS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.pool.close()


@pytest.fixture
def server(host: Host, name: str, tmp_path: Path) -> Iterator[PageServer]:
    with host.serving(name, tmp_path / "s", max_queued=2 * MANY) as server:
        yield server


@pytest.fixture
def reader(host: Host, name: str, server: PageServer) -> Iterator[PageReader]:
    with closing(way(name).reader(host.reader_config(server))) as reader:
        yield reader


@pytest.fixture
def destination(host: Host) -> Destination:
    return Destination(host.pool.pool_id)


def test_a_part_of_the_pages_touches_no_other(reader: PageReader, destination: Destination) -> None:
    wanted = [slot for slot in range(NUM_PAGES) if slot % 7 in (0, 3)]
    for slot in wanted:
        destination.read(reader, slot)
    destination.wait(len(wanted))
    destination.check_good(wanted)
    assert all(destination.untouched(slot) for slot in range(NUM_PAGES) if slot not in wanted)
    assert destination.guards_whole()


def test_thousands_of_pages_in_flight_come_in_order(host: Host, reader: PageReader) -> None:
    destination = Destination(host.pool.pool_id, MANY)
    payloads = [content(page) for page in range(NUM_PAGES)]
    for slot in range(MANY):
        page = slot % NUM_PAGES
        destination.read(reader, slot, page=page, digest=digest(payloads[page], slot))
    assert [done.read_id for done in destination.wait(MANY)] == list(range(MANY))
    assert set(destination.statuses().values()) == {ReadStatus.GOOD}
    assert all(destination.target(slot) == payloads[slot % NUM_PAGES] for slot in range(MANY))
    assert destination.guards_whole()
    assert reader.counters()["bytes"] == MANY * PAGE_BYTES


def test_a_host_that_is_slow_with_its_pages_delays_no_other_reader(
    host: Host, name: str, server: PageServer, reader: PageReader, destination: Destination
) -> None:
    slow, inside, go = Destination(host.pool.pool_id), threading.Event(), threading.Event()

    def dawdle(done: ReadDone) -> None:
        inside.set()
        assert go.wait(WAIT_S)
        slow.note(done)

    with closing(way(name).reader(host.reader_config(server))) as other:
        for slot in range(NUM_PAGES):
            other.read(slow.request(slot), dawdle)
        assert inside.wait(WAIT_S)
        for slot in range(NUM_PAGES):
            destination.read(reader, slot)
        destination.wait(NUM_PAGES)
        destination.check_good(range(NUM_PAGES))
        assert slow.done == []
        go.set()
        slow.wait(NUM_PAGES)
        slow.check_good(range(NUM_PAGES))


# ---- cancel at every point ---------------------------------------------------------------------------


def test_cancel_before_the_source_was_greeted(reader: PageReader, destination: Destination) -> None:
    destination.read(reader, 0)
    reader.cancel(0)
    destination.read(reader, 1)
    destination.wait(2)
    assert destination.statuses()[0] in (ReadStatus.GOOD, ReadStatus.FAILED)
    destination.check_good([1])


def test_cancel_of_what_waits_behind_a_busy_host(reader: PageReader, destination: Destination) -> None:
    inside, go = threading.Event(), threading.Event()
    reader.read(destination.request(0), lambda done: (inside.set(), go.wait(WAIT_S), destination.note(done)))
    assert inside.wait(WAIT_S)
    for slot in (1, 2, 3):
        destination.read(reader, slot)
    reader.cancel(2)
    assert [(done.read_id, done.detail) for done in destination.wait(1)] == [(2, "cancelled")]
    go.set()
    destination.wait(4)
    destination.check_good([0, 1, 3])
    assert destination.untouched(2)


def test_cancel_after_the_end_does_nothing(reader: PageReader, destination: Destination) -> None:
    assert destination.one(reader, 0).status is ReadStatus.GOOD
    reader.cancel(0)
    assert destination.one(reader, 1).status is ReadStatus.GOOD
    again = destination.one(reader, 0)
    assert (again.read_id, again.status) == (0, ReadStatus.GOOD)


# ---- connections that end ----------------------------------------------------------------------------


def test_what_a_broken_connection_left_is_read_by_the_next_reader(
    host: Host, name: str, destination: Destination, tmp_path: Path
) -> None:
    arrived = threading.Event()

    def note(done: ReadDone) -> None:
        destination.note(done)
        arrived.set()

    with host.serving(name, tmp_path / "one") as server:
        first = way(name).reader(host.reader_config(server))
        for slot in range(NUM_PAGES):
            first.read(destination.request(slot), note)
        assert arrived.wait(WAIT_S)
    first.close()
    statuses = destination.statuses()
    assert len(statuses) == NUM_PAGES
    missing = [slot for slot, status in statuses.items() if status is not ReadStatus.GOOD]
    with (
        host.serving(name, tmp_path / "two") as server,
        closing(way(name).reader(host.reader_config(server))) as second,
    ):
        rest = Destination(host.pool.pool_id)
        for slot in missing:
            rest.read(second, slot, target=destination.target(slot))
        rest.wait(len(missing))
        assert set(rest.statuses().values()) <= {ReadStatus.GOOD}
    assert all(bytes(destination.target(slot)) == content(slot) for slot in range(NUM_PAGES))
    assert destination.guards_whole()


@pytest.mark.parametrize("name", DIALLED_AGAIN)
def test_a_reader_dials_again_when_its_source_is_back(
    host: Host, name: str, destination: Destination, tmp_path: Path
) -> None:
    with host.serving(name, tmp_path / "s") as server:
        config = host.reader_config(server)
        reader = way(name).reader(config)
        assert destination.one(reader, 0).status is ReadStatus.GOOD
    with closing(reader):
        assert destination.one(reader, 1).detail == "peer lost"
        port = int(config.endpoint.rpartition(":")[2]) if ":" in config.endpoint else 0
        with host.serving(name, tmp_path / "s", port=port):
            assert destination.one(reader, 2).status is ReadStatus.GOOD
            assert reader.counters()["connections"] == 2
