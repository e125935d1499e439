"""The data plane's frames: what is packed reads back, anything else is a violation and nothing worse."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.stream import FrameReceiver, FrameSender, PeerClosed
from kvtransfer.wire import (
    HEADER,
    MAGIC,
    MAX_BODY_BYTES,
    MAX_PAGES_PER_READ,
    VERSION,
    Frame,
    Hello,
    Kind,
    Read,
    Welcome,
    WireError,
    pack,
    unpack_whole,
)
from pdserve.types import Key

ALL = frozenset(Kind)
u64 = st.integers(0, 2**64 - 1)
keys = st.builds(Key, request_id=st.text(max_size=20), term=u64, epoch=u64)
tickets = st.binary(max_size=300)
hellos = st.builds(Hello, pool_id=u64, layout=st.text(max_size=20), key=keys, ticket=tickets)
places = st.lists(st.tuples(u64, u64), min_size=1, max_size=MAX_PAGES_PER_READ)
reads = st.builds(Read, key=keys, ticket=tickets, pages=places)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    one.setblocking(False)
    with one, other:
        yield one, other


@given(hellos)
def test_a_hello_reads_back(hello: Hello) -> None:
    assert Hello.unpack(unpack_whole(hello.pack(), ALL).body) == hello


@given(reads, u64)
def test_a_read_reads_back(read: Read, sequence: int) -> None:
    frame = unpack_whole(read.pack(sequence), ALL)
    assert (Read.unpack(frame.body), frame.sequence, frame.kind) == (read, sequence, Kind.READ)


@pytest.mark.parametrize("count", [0, MAX_PAGES_PER_READ + 1])
def test_a_read_of_no_page_or_too_many_is_a_violation(count: int) -> None:
    frame = Read(key=Key(request_id="r"), ticket=b"t", pages=[(1, 1)] * count).pack(1)
    with pytest.raises(WireError):
        Read.unpack(frame[HEADER.size :])


@given(u64, u64, u64)
def test_a_welcome_reads_back(pool_id: int, num_pages: int, page_bytes: int) -> None:
    welcome = Welcome(pool_id=pool_id, num_pages=num_pages, page_bytes=page_bytes)
    assert Welcome.unpack(unpack_whole(welcome.pack(), ALL).body) == welcome


def test_every_shorter_or_longer_body_is_a_violation() -> None:
    key = Key(request_id="r", term=1, epoch=1)
    bodies = (
        (Hello, Hello(pool_id=1, layout="ab", key=key, ticket=b"t" * 9).pack()[HEADER.size :]),
        (Read, Read(key=key, ticket=b"t" * 9, pages=[(1, 1)]).pack(1)[HEADER.size :]),
        (Welcome, Welcome(pool_id=1, num_pages=1, page_bytes=1).pack()[HEADER.size :]),
    )
    for kind, body in bodies:
        for wrong in [body[:end] for end in range(len(body))] + [body + b"\0"]:
            with pytest.raises(WireError):
                kind.unpack(wrong)


@given(st.binary(max_size=400))
def test_garbage_is_a_violation(data: bytes) -> None:
    with pytest.raises(WireError):
        unpack_whole(data, ALL)
    for kind in (Hello, Read):
        try:
            kind.unpack(data)
        except WireError:
            continue
        assert len(data) >= 8


def test_a_name_that_is_no_text_is_a_violation() -> None:
    body = Hello(pool_id=1, layout="ab", key=Key(request_id="r"), ticket=b"").pack()[HEADER.size :]
    with pytest.raises(WireError):
        Hello.unpack(body.replace(b"ab", b"\xff\xfe"))


@pytest.mark.parametrize(
    "header",
    [
        HEADER.pack(b"GET ", VERSION, Kind.HELLO, 0, 0, 0, 0),
        HEADER.pack(MAGIC, VERSION + 1, Kind.HELLO, 0, 0, 0, 0),
        HEADER.pack(MAGIC, VERSION, Kind.WELCOME, 0, 0, 0, 0),
        HEADER.pack(MAGIC, VERSION, 200, 0, 0, 0, 0),
        HEADER.pack(MAGIC, VERSION, Kind.HELLO, 0, 0, MAX_BODY_BYTES + 1, 0),
        HEADER.pack(MAGIC, VERSION, Kind.HELLO, 0, 0, 2**32 - 1, 0),
        HEADER.pack(MAGIC, VERSION, Kind.HELLO, 0, 0, 0, 1),
        HEADER.pack(MAGIC, VERSION, Kind.PAGE, 0, 0, 0, 99),
        HEADER.pack(MAGIC, VERSION, Kind.PAGE, 0, 0, 0, 0),
    ],
    ids=["magic", "version", "unexpected", "unknown", "long", "huge", "payload", "wrong page", "no page"],
)
def test_a_wrong_header_is_a_violation(pair: tuple[socket.socket, socket.socket], header: bytes) -> None:
    here, there = pair
    receiver = FrameReceiver(here, expect=frozenset({Kind.HELLO, Kind.PAGE}), page_bytes=100)
    there.sendall(header)
    with pytest.raises(WireError):
        receiver.pump()


@pytest.mark.parametrize("cut", [0, 30, 128, 129, 140, 255, 256, 257, 300])
def test_pages_back_to_back_each_land_in_their_place(
    pair: tuple[socket.socket, socket.socket], cut: int
) -> None:
    here, there = pair
    pages = [memoryview(bytearray(100)) for _ in range(3)]
    receiver = FrameReceiver(here, expect=ALL, page_bytes=100, place=lambda sequence: pages[sequence])
    data = b""
    for number in range(3):
        data += pack(Kind.PAGE, sequence=number, payload_bytes=100) + bytes([number + 1]) * 100
    data += pack(Kind.STALE, sequence=9)
    seen: list[int] = []
    for part in (data[:cut], data[cut:]):
        there.sendall(part)
        while (frame := receiver.pump()) is not None:
            seen.append(frame.sequence)
    assert seen == [0, 1, 2, 9]
    assert [bytes(page) for page in pages] == [bytes([number + 1]) * 100 for number in range(3)]
    assert receiver.begun_at is None


def test_frames_come_byte_by_byte_with_a_page_in_place(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    page = bytearray(100)
    receiver = FrameReceiver(here, expect=ALL, page_bytes=100, place=lambda sequence: memoryview(page))
    data = pack(Kind.STALE, sequence=4) + pack(Kind.PAGE, sequence=5, payload_bytes=100) + bytes(range(100))
    data += pack(Kind.REFUSED, code=3, body=b"why")
    frames: list[Frame] = []
    for at in range(len(data)):
        there.sendall(data[at : at + 1])
        frame = receiver.pump()
        assert (frame is None) == (receiver.begun_at is not None)
        if frame is not None:
            frames.append(frame)
    assert frames == [
        Frame(kind=Kind.STALE, sequence=4),
        Frame(kind=Kind.PAGE, sequence=5),
        Frame(kind=Kind.REFUSED, code=3, body=b"why"),
    ]
    assert page == bytes(range(100))
    there.close()
    with pytest.raises(PeerClosed):
        receiver.pump()


def test_a_load_leaves_whole_through_a_full_socket(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    sender, payload = FrameSender(here), bytes(range(256)) * 8192
    sender.load(b"head", memoryview(payload), b"")
    got = bytearray()
    while not sender.pump():
        assert sender.busy
        assert sender.begun_at is not None
        got += there.recv(100_000)
    assert (sender.busy, sender.begun_at) == (False, None)
    here.close()
    while data := there.recv(100_000):
        got += data
    assert got == b"head" + payload
