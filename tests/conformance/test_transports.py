"""What every transport promises, checked over all of them against a real pool."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvtransfer.nixl.agent import available
from kvtransfer.transport import PageReader, PageServer, ReadStatus, names, register, transport
from pdserve.errors import ConfigError
from pdserve.types import Key
from tests.conformance.page_host import (
    NUM_PAGES,
    PAGE_BYTES,
    Host,
    SourceProcess,
    content,
    digest,
    suite_certs,
    ticket,
    way,
)
from tests.conformance.transport_kit import Destination, other_key

TRANSPORTS = ["shm", "tcp", "tcp+python", "tcp+tls", *(["nixl", "nixl+tls"] if available() else [])]


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
    with host.serving(name, tmp_path / "s") as server:
        yield server


@pytest.fixture
def reader(host: Host, name: str, server: PageServer) -> Iterator[PageReader]:
    with closing(way(name).reader(host.reader_config(server))) as reader:
        yield reader


@pytest.fixture
def destination(host: Host) -> Destination:
    return Destination(host.pool.pool_id)


@pytest.fixture(scope="module", params=TRANSPORTS)
def process(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SourceProcess]:
    suite_certs()
    process = SourceProcess(request.param, tmp_path_factory.mktemp("source") / "s")
    process.name = request.param
    yield process
    process.end()


@pytest.fixture
def far(process: SourceProcess) -> Iterator[PageReader]:
    with closing(way(process.name).reader(process.reader_config())) as reader:
        yield reader


# ---- from a process of its own -----------------------------------------------------------------------


def test_pages_come_whole_from_another_process(process: SourceProcess, far: PageReader) -> None:
    destination = Destination(process.pool_id)
    for slot in random.Random(1).sample(range(NUM_PAGES), NUM_PAGES):
        destination.read(far, slot)
    destination.wait(NUM_PAGES)
    destination.check_good(range(NUM_PAGES))
    assert destination.guards_whole()
    assert all(done.digest == digest(content(done.read_id), done.read_id) for done in destination.done)


def test_reads_are_served_in_order(process: SourceProcess, far: PageReader) -> None:
    destination = Destination(process.pool_id)
    order = random.Random(2).sample(range(NUM_PAGES), NUM_PAGES)
    for slot in order:
        destination.read(far, slot)
    assert [done.read_id for done in destination.wait(NUM_PAGES)] == order


def test_a_page_that_was_freed_is_stale(process: SourceProcess, far: PageReader) -> None:
    destination = Destination(process.pool_id)
    generation = process.do("generation", 9)
    assert destination.one(far, 9, generation=generation).status is ReadStatus.GOOD
    process.do("renew", 9)
    if not process.name.startswith(
        "nixl"
    ):  # there the digest decides, and these bytes are still the right ones
        assert destination.one(far, 10, page=9, generation=generation).status is ReadStatus.STALE
        assert destination.untouched(10)
    process.do("flip", 9, 77)
    assert destination.one(far, 12, page=9, generation=generation).status is ReadStatus.STALE
    process.do("flip", 9, 77)
    assert destination.one(far, 11, page=9, generation=generation + 1).status is ReadStatus.GOOD
    assert bytes(destination.target(11)) == content(9)


@pytest.mark.parametrize("at", [0, 1234, PAGE_BYTES - 1])
def test_one_wrong_byte_is_a_mismatch(process: SourceProcess, far: PageReader, at: int) -> None:
    destination = Destination(process.pool_id)
    process.do("flip", 20, at)
    done = destination.one(far, 20)
    process.do("flip", 20, at)
    assert done.status is ReadStatus.MISMATCH
    assert done.digest == digest(bytes(destination.target(20)), 20) != digest(content(20), 20)
    assert destination.one(far, 20).status is ReadStatus.GOOD


def test_a_source_that_is_killed_ends_every_read(name: str, tmp_path: Path) -> None:
    process = SourceProcess(name, tmp_path / "s")
    destination = Destination(process.pool_id)
    with closing(way(name).reader(process.reader_config())) as reader:
        assert destination.one(reader, 0).status is ReadStatus.GOOD
        for slot in range(1, 40):
            destination.read(reader, slot)
        process.kill()
        for slot in range(40, NUM_PAGES):
            destination.read(reader, slot)
        destination.wait(NUM_PAGES)
        statuses = destination.statuses()
        assert set(statuses.values()) <= {ReadStatus.GOOD, ReadStatus.FAILED}
        assert all(statuses[slot] is ReadStatus.FAILED for slot in range(40, NUM_PAGES))
        destination.check_good([slot for slot, status in statuses.items() if status is ReadStatus.GOOD])
        again = Destination(process.pool_id)
        assert again.one(reader, 0).detail == "peer lost"


# ---- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"garbage",
        ticket(secret=b"another secret, 16 bytes or more"),
        ticket(expires=1.0),
        ticket(incarnation=1),
        other_key()[1],
    ],
    ids=["absent", "garbage", "forged", "expired", "other incarnation", "other key"],
)
def test_a_bad_ticket_gets_no_byte(reader: PageReader, destination: Destination, wrong: bytes) -> None:
    done = destination.one(reader, 0, ticket=wrong)
    assert (done.status, done.detail) == (ReadStatus.FAILED, "bad ticket")
    assert destination.untouched(0)


def test_a_bad_ticket_does_not_spoil_the_reads_of_others(
    reader: PageReader, destination: Destination
) -> None:
    key, good = other_key()
    destination.read(reader, 0, ticket=b"bad")
    destination.read(reader, 1)
    destination.read(reader, 2, key=key, ticket=good)
    destination.wait(3)
    assert destination.statuses()[0] is ReadStatus.FAILED
    destination.check_good([1, 2])


def test_a_page_outside_the_pool_is_refused(reader: PageReader, destination: Destination) -> None:
    for slot, page in enumerate((NUM_PAGES, 2**32, 2**63)):
        done = destination.one(reader, slot, page=page, digest=bytes(16))
        assert (done.status, done.detail) == (ReadStatus.FAILED, "no such page")
    assert destination.one(reader, 5).status is ReadStatus.GOOD
    assert [destination.untouched(slot) for slot in range(3)] == [True] * 3


def test_a_page_of_another_pool_is_not_asked_for(reader: PageReader, destination: Destination) -> None:
    done = destination.one(reader, 0, pool_id=1)
    assert (done.status, done.detail) == (ReadStatus.FAILED, "wrong pool")


@pytest.mark.parametrize(
    "change",
    [
        {"ticket": bytes(5000)},
        {"key": Key(request_id="r" * 600)},
        {"key": Key(request_id="r", term=-1)},
        {"key": Key(request_id="r", epoch=2**64)},
        {"generation": -1},
        {"page": -1, "digest": b""},
    ],
)
def test_what_no_frame_can_carry_fails_alone(
    reader: PageReader, destination: Destination, change: dict[str, object]
) -> None:
    destination.read(reader, 0)
    destination.read(reader, 1, **change)
    destination.read(reader, 2)
    destination.wait(3)
    assert {done.detail for done in destination.done if done.read_id == 1} == {"unsendable"}
    destination.check_good([0, 2])


@pytest.mark.parametrize(
    ("change", "detail"), [({"pool_id": 12}, "wrong pool"), ({"layout": "00"}, "wrong layout")]
)
def test_a_source_that_is_another_one_is_not_read(
    host: Host, name: str, server: PageServer, change: dict[str, object], detail: str
) -> None:
    destination = Destination(int(change.get("pool_id", host.pool.pool_id)))
    with closing(way(name).reader(host.reader_config(server, **change))) as reader:
        done = destination.one(reader, 0)
    assert (done.status, done.detail) == (ReadStatus.FAILED, detail)
    assert destination.untouched(0)
    assert server.counters()["refused"] == 1


def test_a_target_of_the_wrong_kind_is_the_hosts_mistake(
    reader: PageReader, destination: Destination
) -> None:
    short = destination.target(0)[:-1]
    for target in (short, destination.target(0).toreadonly(), memoryview(bytearray(2 * PAGE_BYTES))[::2]):
        with pytest.raises(ValueError, match="target"):
            destination.read(reader, 0, target=target)
    assert destination.one(reader, 0).status is ReadStatus.GOOD
    assert destination.guards_whole()


# ---- cancel and close --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_every_read_ends_once_however_it_is_cancelled(
    reader: PageReader, destination: Destination, seed: int
) -> None:
    chance = random.Random(seed)
    for slot in range(NUM_PAGES):
        destination.read(reader, slot)
        if chance.random() < 0.5:
            reader.cancel(chance.randrange(slot + 1))
    reader.cancel(NUM_PAGES + 1)
    destination.wait(NUM_PAGES)
    reader.close()
    statuses = destination.statuses()
    assert set(statuses.values()) <= {ReadStatus.GOOD, ReadStatus.FAILED}
    assert {done.detail for done in destination.done} <= {"", "cancelled"}
    destination.check_good([slot for slot, status in statuses.items() if status is ReadStatus.GOOD])
    assert destination.guards_whole()


def test_close_ends_every_read(host: Host, name: str, server: PageServer, destination: Destination) -> None:
    reader = way(name).reader(host.reader_config(server))
    for slot in range(NUM_PAGES):
        destination.read(reader, slot)
    reader.close()
    assert len(destination.statuses()) == NUM_PAGES
    before = bytes(destination.memory)
    late = destination.request(0)
    reader.read(late, destination.note)
    assert destination.done[-1].detail == "closed"
    reader.close()
    assert bytes(destination.memory) == before


def test_a_read_id_may_be_used_again_but_not_twice_at_once(
    host: Host, reader: PageReader, destination: Destination
) -> None:
    inside, go = threading.Event(), threading.Event()

    def hold(done: object) -> None:
        inside.set()
        go.wait(20)

    reader.read(destination.request(0), hold)
    assert inside.wait(20)
    destination.read(reader, 1)
    with pytest.raises(ValueError, match="pending"):
        destination.read(reader, 1)
    go.set()
    destination.wait(1)
    assert destination.one(reader, 1).status is ReadStatus.GOOD


def test_a_callback_that_raises_stops_nobody(
    reader: PageReader, destination: Destination, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(done: object) -> None:
        raise RuntimeError("a host's mistake")

    reader.read(destination.request(0), broken)
    assert destination.one(reader, 1).status is ReadStatus.GOOD
    assert "done callback failed" in caplog.text


def test_close_is_allowed_inside_a_callback(
    host: Host, name: str, server: PageServer, destination: Destination
) -> None:
    reader = way(name).reader(host.reader_config(server))
    reader.read(destination.request(0), lambda done: (reader.close(), destination.note(done)))
    destination.read(reader, 1)
    assert destination.wait(2)[1].detail in {"closed", ""}


def test_a_closed_server_leaves_no_thread_and_no_descriptor(host: Host, name: str, tmp_path: Path) -> None:
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    destination = Destination(host.pool.pool_id)
    with host.serving(name, tmp_path / "s") as server:
        readers = [way(name).reader(host.reader_config(server)) for _ in range(3)]
        for slot, reader in enumerate(readers):
            assert destination.one(reader, slot).status is ReadStatus.GOOD
    for slot, reader in enumerate(readers):
        assert destination.one(reader, 10 + slot).status is ReadStatus.FAILED
        reader.close()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


# ---- others on the same server -----------------------------------------------------------------------


def test_readers_do_not_mix(host: Host, name: str, server: PageServer) -> None:
    destinations = [Destination(host.pool.pool_id) for _ in range(4)]
    readers = [way(name).reader(host.reader_config(server)) for _ in destinations]
    for slot in range(NUM_PAGES):
        for reader, destination in zip(readers, destinations, strict=True):
            destination.read(reader, slot)
    for destination in destinations:
        destination.wait(NUM_PAGES)
        destination.check_good(range(NUM_PAGES))
    for reader in readers:
        assert reader.counters()["good"] == NUM_PAGES
        assert reader.counters()["bytes"] == NUM_PAGES * PAGE_BYTES
        reader.close()


def test_more_connections_than_allowed_are_closed(host: Host, name: str, tmp_path: Path) -> None:
    destination = Destination(host.pool.pool_id)
    with host.serving(name, tmp_path / "s", max_connections=1) as server:
        with closing(way(name).reader(host.reader_config(server))) as first:
            assert destination.one(first, 0).status is ReadStatus.GOOD
            with closing(way(name).reader(host.reader_config(server))) as second:
                assert destination.one(second, 1).detail == "peer lost"
            assert destination.one(first, 2).status is ReadStatus.GOOD
        assert server.counters()["over_limit"] == 1


# ---- the registry ------------------------------------------------------------------------------------


def test_the_registry_knows_its_transports_and_says_so() -> None:
    assert {name.partition("+")[0] for name in TRANSPORTS} <= set(names())
    with pytest.raises(ConfigError, match="choose one of shm, tcp"):
        transport("pigeon")
    with pytest.raises(ValueError, match="already"):
        register("tcp", lambda: transport("shm"))
