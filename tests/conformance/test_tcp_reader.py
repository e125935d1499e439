"""A tcp reader under bad sources and cancels at every point: each read ends once, no byte goes astray."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtransfer.transport import PageServer, ReadStatus
from kvtransfer.wire import HEADER, Kind, Welcome, pack
from tests.conformance import tcp_kit
from tests.conformance.page_host import (
    NUM_PAGES,
    PAGE_BYTES,
    Host,
    content,
)
from tests.conformance.tcp_kit import (
    FRAME_BYTES,
    WELCOME_BYTES,
    dial,
    hello,
    is_closed,
    reading,
    take,
    wish,
)
from tests.conformance.transport_kit import WAIT_S, Destination, Gate, cut_after, proxy, slices


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.pool.close()


@pytest.fixture(params=["compiled", "python"], autouse=True)
def pages_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs over both ways to take pages."""
    monkeypatch.setattr(tcp_kit, "PAGES_BY", request.param)


@pytest.fixture(scope="module")
def server(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    with host.serving("tcp", tmp_path_factory.mktemp("s")) as server:
        yield server


@pytest.fixture
def destination(host: Host) -> Destination:
    return Destination(host.pool.pool_id)


# ---- cancel at every point ---------------------------------------------------------------------------


def test_a_read_cancelled_before_its_first_byte_ends_at_once(
    host: Host, server: PageServer, destination: Destination
) -> None:
    entered, go = threading.Event(), threading.Event()
    host.before_pin = lambda page: (entered.set(), go.wait(WAIT_S))
    with reading(host, server.endpoint()) as reader:
        for slot in range(5):
            destination.read(reader, slot)
        assert entered.wait(WAIT_S)
        host.before_pin = lambda page: None
        for slot in (0, 1, 3):
            reader.cancel(slot)
        assert [(done.read_id, done.detail) for done in destination.wait(3)] == [
            (slot, "cancelled") for slot in (0, 1, 3)
        ]
        destination.read(reader, 1, page=7)
        go.set()
        destination.wait(6)
        assert [done.read_id for done in destination.done[3:]] == [2, 4, 1]
    assert bytes(destination.target(1)) == content(7)
    assert destination.untouched(0)
    assert destination.untouched(3)


@pytest.mark.parametrize("arrived", [1, PAGE_BYTES // 2, PAGE_BYTES - 1])
def test_a_read_cancelled_in_mid_page_ends_as_it_ends(
    host: Host, server: PageServer, destination: Destination, arrived: int
) -> None:
    gate = Gate(WELCOME_BYTES + HEADER.size + arrived)
    with proxy(server.endpoint(), gate) as endpoint, reading(host, endpoint) as reader:
        destination.read(reader, 0)
        destination.read(reader, 1)
        assert gate.reached.wait(WAIT_S)
        assert destination.wait_touched(0)
        reader.cancel(0)
        reader.cancel(1)
        assert [done.read_id for done in destination.wait(1)] == [1]
        gate.open.set()
        destination.wait(2)
        assert destination.one(reader, 2).status is ReadStatus.GOOD
    destination.check_good([0, 2])
    assert destination.untouched(1)


def test_close_in_mid_page_leaves_the_target_quiet(
    host: Host, server: PageServer, destination: Destination
) -> None:
    gate = Gate(WELCOME_BYTES + HEADER.size + 100)
    with proxy(server.endpoint(), gate) as endpoint, reading(host, endpoint) as reader:
        destination.read(reader, 0)
        assert gate.reached.wait(WAIT_S)
        reader.close()
        assert [done.detail for done in destination.done] == ["closed"]
        before = bytes(destination.memory)
        gate.open.set()
        assert bytes(destination.memory) == before


# ---- towards the reader ------------------------------------------------------------------------------


def test_pages_come_whole_one_byte_at_a_time(
    host: Host, server: PageServer, destination: Destination
) -> None:
    with proxy(server.endpoint(), slices) as endpoint, reading(host, endpoint) as reader:
        for slot in range(3):
            destination.read(reader, slot)
        destination.wait(3)
        destination.check_good(range(3))
    assert destination.guards_whole()


@pytest.mark.parametrize(
    "limit",
    [
        0,
        1,
        HEADER.size,
        WELCOME_BYTES - 1,
        WELCOME_BYTES,
        WELCOME_BYTES + 5,
        WELCOME_BYTES + HEADER.size,
        WELCOME_BYTES + FRAME_BYTES // 2,
        WELCOME_BYTES + FRAME_BYTES - 1,
        WELCOME_BYTES + FRAME_BYTES + 7,
    ],
)
def test_a_connection_cut_anywhere_fails_what_did_not_arrive(
    host: Host, server: PageServer, destination: Destination, limit: int
) -> None:
    with proxy(server.endpoint(), cut_after(limit)) as endpoint, reading(host, endpoint) as reader:
        for slot in range(4):
            destination.read(reader, slot)
        destination.wait(4)
    arrived = max(0, (limit - WELCOME_BYTES) // FRAME_BYTES)
    statuses = destination.statuses()
    assert [statuses[slot] for slot in range(arrived, 4)] == [ReadStatus.FAILED] * (4 - arrived)
    destination.check_good(range(arrived))
    assert destination.guards_whole()
    assert host.wait_pins(0)


@contextmanager
def rogue(script: Callable[[socket.socket], None]) -> Iterator[str]:
    """The endpoint of a source that runs `script` on each connection and then waits for its end."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                with sock:
                    script(sock)
                    is_closed(sock)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield "{}:{}".format(*listener.getsockname())
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def welcome(host: Host, **changes: int) -> bytes:
    values = {"pool_id": host.pool.pool_id, "num_pages": NUM_PAGES, "page_bytes": PAGE_BYTES} | changes
    return Welcome(**values).pack()


def greet_and_hear(sock: socket.socket, host: Host) -> None:
    """Plays a good source as far as the reader's first wish, which has sequence 1."""
    take(sock, len(hello(host)))
    sock.sendall(welcome(host))
    take(sock, len(wish(0, 1)))


@pytest.mark.parametrize(
    "answer",
    [
        pack(Kind.PAGE, sequence=99, payload_bytes=PAGE_BYTES) + bytes(PAGE_BYTES),
        pack(Kind.PAGE, sequence=1, payload_bytes=PAGE_BYTES + 1) + bytes(PAGE_BYTES + 1),
        pack(Kind.PAGE, sequence=1, payload_bytes=2**32 - 1) + bytes(PAGE_BYTES),
        pack(Kind.STALE, sequence=99),
        pack(Kind.READ, sequence=1),
        pack(Kind.WELCOME),
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
    ids=["unasked", "long page", "huge page", "unasked stale", "a read", "second welcome", "other protocol"],
)
def test_a_source_that_breaks_the_rules_places_nothing(
    host: Host, destination: Destination, answer: bytes
) -> None:
    def script(sock: socket.socket) -> None:
        greet_and_hear(sock, host)
        sock.sendall(answer)

    with rogue(script) as endpoint, reading(host, endpoint) as reader:
        done = destination.one(reader, 0)
        assert (done.status, done.detail) == (ReadStatus.FAILED, "protocol violation")
    assert destination.untouched(0)
    assert destination.guards_whole()


@pytest.mark.parametrize(
    "change",
    [{"pool_id": 5}, {"page_bytes": PAGE_BYTES * 2}, {"page_bytes": 0}],
    ids=["pool", "large", "none"],
)
def test_a_welcome_to_another_pool_is_not_taken(
    host: Host, destination: Destination, change: dict[str, int]
) -> None:
    with (
        rogue(lambda sock: sock.sendall(welcome(host, **change))) as endpoint,
        reading(host, endpoint) as reader,
    ):
        assert destination.one(reader, 0).detail == "protocol violation"


@pytest.mark.parametrize("begins", [False, True], ids=["silent", "greets, then silent"])
def test_a_silent_source_is_given_up(host: Host, destination: Destination, begins: bool) -> None:
    with (
        rogue(lambda sock: sock.sendall(welcome(host) if begins else b"")) as endpoint,
        reading(host, endpoint, stall_s=0.1) as reader,
    ):
        for slot in range(3):
            destination.read(reader, slot)
        assert {done.detail for done in destination.wait(3)} == {"stalled"}


def test_a_page_that_never_ends_is_given_up(host: Host, destination: Destination) -> None:
    def script(sock: socket.socket) -> None:
        greet_and_hear(sock, host)
        sock.sendall(pack(Kind.PAGE, sequence=1, payload_bytes=PAGE_BYTES))
        with contextlib.suppress(OSError):
            for number in itertools.count():
                sock.sendall(bytes([number % 256]))
                if select_closed(sock, 0.02):
                    return

    with rogue(script) as endpoint, reading(host, endpoint, stall_s=0.2) as reader:
        assert destination.one(reader, 0).detail == "stalled"


def select_closed(sock: socket.socket, timeout_s: float) -> bool:
    """Whether the other end closes within the time."""
    sock.settimeout(timeout_s)
    try:
        while sock.recv(65536):
            pass
    except TimeoutError:
        return False
    return True


def test_nobody_there_fails_at_once(host: Host, destination: Destination) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = "{}:{}".format(*taken.getsockname())
    with reading(host, endpoint) as reader:
        for slot in range(3):
            destination.read(reader, slot)
        assert {done.detail for done in destination.wait(3)} == {"peer lost"}


def test_a_quiet_connection_is_dialled_anew(host: Host, tmp_path: Path) -> None:
    destination = Destination(host.pool.pool_id)
    with host.serving("tcp", tmp_path, idle_s=0.05) as server, reading(host, server.endpoint()) as reader:
        assert destination.one(reader, 0).status is ReadStatus.GOOD
        with dial(server) as other:
            other.sendall(hello(host))
            assert is_closed(other)
        assert destination.one(reader, 1).status is ReadStatus.GOOD
        assert reader.counters()["connections"] == 2
