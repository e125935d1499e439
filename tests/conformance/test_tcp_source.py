"""A tcp source under bad readers: nothing hangs, nothing stays pinned, nobody else notices."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtransfer.stream import FrameSender
from kvtransfer.transport import PageServer, ReadStatus
from kvtransfer.wire import HEADER, Kind, pack, unpack_whole
from tests.conformance.page_host import (
    NUM_PAGES,
    PAGE_BYTES,
    Host,
    content,
    digest,
)
from tests.conformance.tcp_kit import (
    ANSWERS,
    FRAME_BYTES,
    WELCOME_BYTES,
    dial,
    hello,
    is_closed,
    reading,
    take,
    wait_count,
    wish,
)
from tests.conformance.transport_kit import WAIT_S, Destination, Gate, proxy


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.pool.close()


@pytest.fixture(scope="module")
def server(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    with host.serving("tcp", tmp_path_factory.mktemp("s")) as server:
        yield server


@pytest.fixture
def destination(host: Host) -> Destination:
    return Destination(host.pool.pool_id)


def check_alive(host: Host, server: PageServer) -> None:
    destination = Destination(host.pool.pool_id)
    with reading(host, server.endpoint()) as reader:
        assert destination.one(reader, 3).status is ReadStatus.GOOD


def test_the_default_address_is_loopback(server: PageServer) -> None:
    assert server.endpoint().startswith("127.0.0.1:")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(min_size=HEADER.size, max_size=200), st.booleans())
def test_garbage_closes_its_own_connection_only(
    host: Host, server: PageServer, data: bytes, greeted: bool
) -> None:
    before = server.counters().get("violations", 0)
    with dial(server) as sock:
        if greeted:
            sock.sendall(hello(host))
            assert len(take(sock, WELCOME_BYTES)) == WELCOME_BYTES
        sock.sendall(data)
        assert is_closed(sock)
    assert server.counters()["violations"] == before + 1


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_bent_frames_harm_nothing(host: Host, server: PageServer, data: st.DataObject) -> None:
    stream = bytearray(hello(host) + wish(1, 1) + pack(Kind.CANCEL, sequence=1) + wish(2, 2))
    for at in data.draw(st.lists(st.integers(0, len(stream) - 1), min_size=1, max_size=4)):
        stream[at] ^= data.draw(st.integers(1, 255))
    end = data.draw(st.integers(0, len(stream)))
    with dial(server) as sock:
        with contextlib.suppress(OSError):  # the server may have hung up already
            sock.sendall(stream[:end])
            sock.shutdown(socket.SHUT_WR)
        assert is_closed(sock)
    assert host.wait_pins(0)


def test_the_server_works_after_all_that(host: Host, server: PageServer) -> None:
    check_alive(host, server)
    assert server.counters().get("errors", 0) == 0


def test_one_read_number_twice_is_a_violation(host: Host, server: PageServer) -> None:
    entered, go = threading.Event(), threading.Event()
    host.before_pin = lambda page: (entered.set(), go.wait(WAIT_S))
    with dial(server) as sock:
        sock.sendall(hello(host) + wish(0, 1))
        assert entered.wait(WAIT_S)
        host.before_pin = lambda page: None
        sock.sendall(wish(1, 2) + wish(1, 2))
        go.set()
        assert is_closed(sock)
    assert host.wait_pins(0)


def test_more_reads_than_allowed_are_a_violation(host: Host, tmp_path: Path) -> None:
    with host.serving("tcp", tmp_path, max_queued=4) as server:
        with dial(server) as sock:
            sock.sendall(hello(host) + b"".join(wish(1, number) for number in range(200)))
            assert is_closed(sock)
        assert server.counters()["violations"] == 1
        check_alive(host, server)


def test_a_reader_that_takes_nothing_delays_nobody_and_is_dropped(host: Host, tmp_path: Path) -> None:
    destination = Destination(host.pool.pool_id)
    with host.serving("tcp", tmp_path, stall_s=0.3) as server, dial(server) as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.sendall(hello(host) + b"".join(wish(number % NUM_PAGES, number) for number in range(2000)))
        assert host.wait_pinned()
        with reading(host, server.endpoint()) as reader:
            for slot in range(NUM_PAGES):
                destination.read(reader, slot)
            destination.wait(NUM_PAGES)
            destination.check_good(range(NUM_PAGES))
        # No read before the server has given up: there would be no stall, and between pages no pin is held.
        wait_count(server, "stalled", 1)
        assert host.wait_pins(0)
        assert is_closed(lazy)


@pytest.mark.parametrize("sent", [0, 10, HEADER.size, 100])
def test_a_hello_that_does_not_come_is_not_awaited_for_ever(host: Host, tmp_path: Path, sent: int) -> None:
    with host.serving("tcp", tmp_path, stall_s=0.1) as server, dial(server) as sock:
        sock.sendall(hello(host)[:sent])
        assert is_closed(sock)
        assert server.counters()["stalled"] == 1


def test_a_connection_without_reads_is_closed(host: Host, tmp_path: Path) -> None:
    with host.serving("tcp", tmp_path, idle_s=0.1) as server, dial(server) as sock:
        sock.sendall(hello(host) + wish(1, 1))
        assert len(take(sock, WELCOME_BYTES + FRAME_BYTES)) == WELCOME_BYTES + FRAME_BYTES
        assert is_closed(sock)
        assert server.counters()["idle"] == 1


def test_a_cancelled_wish_is_answered_once(host: Host, server: PageServer) -> None:
    entered, go = threading.Event(), threading.Event()
    host.before_pin = lambda page: (entered.set(), go.wait(WAIT_S))
    with dial(server) as sock:
        sock.sendall(hello(host) + wish(0, 1))
        assert entered.wait(WAIT_S)
        host.before_pin = lambda page: None
        sock.sendall(wish(1, 2) + wish(2, 3) + pack(Kind.CANCEL, sequence=2) + pack(Kind.CANCEL, sequence=9))
        go.set()
        take(sock, WELCOME_BYTES)
        assert take(sock, FRAME_BYTES)[HEADER.size :] == content(0)
        dropped = unpack_whole(take(sock, HEADER.size), ANSWERS)
        assert (dropped.kind, dropped.sequence) == (Kind.DROPPED, 2)
        assert take(sock, FRAME_BYTES)[HEADER.size :] == content(2)


def test_a_cancel_frees_pages_that_a_slow_wire_still_carries(host: Host, tmp_path: Path) -> None:
    """A page of a transfer that is over waits for nobody: what is left of its frame is sent from a copy."""
    with host.serving("tcp", tmp_path, stall_s=600.0) as server, dial(server) as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        numbers = range(1, 2001)
        lazy.sendall(hello(host) + b"".join(wish(number % NUM_PAGES, number) for number in numbers))
        assert host.wait_pinned()
        with host.changed:
            while host.changed.wait(0.5):
                continue  # until the socket is full and nothing moves any more
        assert host.pins
        lazy.sendall(b"".join(pack(Kind.CANCEL, sequence=number) for number in numbers))
        assert host.wait_pins(0), "with the socket as full as before"


def test_a_load_that_was_copied_is_sent_as_it_was() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        memory = bytearray(secrets.token_bytes(4 << 20))
        wanted = b"head" + bytes(memory)
        sender = FrameSender(ours)
        sender.load(b"head", memoryview(memory))
        assert not sender.pump()
        sender.own()
        memory[:] = bytes(len(memory))
        found = b""
        while not sender.pump():
            found += theirs.recv(1 << 20)
        assert found + take(theirs, len(wanted) - len(found)) == wanted


def test_closing_the_server_in_mid_page_drops_the_pin(host: Host, tmp_path: Path) -> None:
    with host.serving("tcp", tmp_path) as server, dial(server) as lazy:
        lazy.sendall(hello(host) + b"".join(wish(number % NUM_PAGES, number) for number in range(2000)))
        assert host.wait_pinned()
        server.close()
        assert host.pins == {}
        assert is_closed(lazy)


def test_pages_overwritten_while_they_wait_in_the_socket_are_a_mismatch(
    host: Host, server: PageServer
) -> None:
    """A source that broke its own rules: the bytes that were not out yet changed under the pin."""
    many = 3000
    destination, gate = Destination(host.pool.pool_id, many), Gate(WELCOME_BYTES + FRAME_BYTES)
    payloads = [content(page) for page in range(NUM_PAGES)]
    with proxy(server.endpoint(), gate) as endpoint, reading(host, endpoint) as reader:
        for slot in range(many):
            page = slot % NUM_PAGES
            destination.read(reader, slot, page=page, digest=digest(payloads[page], slot))
        assert gate.reached.wait(WAIT_S)
        assert host.wait_pinned()
        for page in range(NUM_PAGES):
            host.flip(page, PAGE_BYTES - 1)
        gate.open.set()
        found = destination.wait(many)
    for page in range(NUM_PAGES):
        host.flip(page, PAGE_BYTES - 1)
    assert {done.status for done in found} == {ReadStatus.GOOD, ReadStatus.MISMATCH}
    for done in found:
        good = destination.target(done.read_id) == payloads[done.read_id % NUM_PAGES]
        assert good == (done.status is ReadStatus.GOOD)
        assert done.digest == digest(bytes(destination.target(done.read_id)), done.read_id)
