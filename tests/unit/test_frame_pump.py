"""The frame pump over a socket pair, beside the receiver of Python: wherever bytes are cut, equal ends."""

from __future__ import annotations

import itertools
import select
import socket
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtransfer.stream import FrameReceiver, PeerClosed
from kvtransfer.tcp.pump import NUM_SLOTS
from kvtransfer.wire import HEADER, MAGIC, VERSION, Frame, Kind, WireError, pack
from tests.unit.pump_kit import ANSWERS, WAIT_S, bench, contents, digest

# ---- what comes whole, however it is cut -------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1023, 1024, 1025, 2048, 70_001])
def test_pages_land_in_their_targets_with_their_digests(size: int) -> None:
    pages = contents(3, size)
    with bench(size) as b:
        order = [2, 0, 1]
        b.there.sendall(b"".join(b.page(number, pages[number]) for number in order))
        while len(b.landed) < 3:
            assert b.pump.pump() is None
        assert [(found[0] - 1, found[2]) for found in b.landed] == [(n, digest(pages[n], n)) for n in order]
        assert all(b.holds(number, page) for number, page in enumerate(pages))
        stamps = [found[1] for found in b.landed]
        assert 0 < stamps[0] <= stamps[1] <= stamps[2]
        assert b.pump.begun_at is None


@pytest.mark.parametrize("size", [1, 40, 1100])
def test_one_byte_at_a_time(size: int) -> None:
    pages = contents(2, size)
    with bench(size, 2, first=2**64 - 2) as b:
        data = b.page(0, pages[0]) + pack(Kind.STALE, sequence=77) + b.page(1, pages[1])
        frames, heard = [], 0
        for at in range(len(data)):
            b.there.sendall(data[at : at + 1])
            frame = b.pump.pump()
            frames += [frame] if frame else []
            ended = len(frames) + len(b.landed)
            assert (ended > heard) == (b.pump.begun_at is None)
            heard = ended
        assert [found[2] for found in b.landed] == [digest(page, n) for n, page in enumerate(pages)]
        assert frames == [Frame(kind=Kind.STALE, sequence=77)]


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 2500), st.lists(st.integers(1, 4000), max_size=8), st.integers(0, 2**64 - 4))
def test_cut_anywhere(size: int, cuts: list[int], first: int) -> None:
    pages = contents(3, size)
    with bench(size, first=first) as b:
        data = b.page(0, pages[0]) + pack(Kind.DENIED, code=1, sequence=first + 1) + b.page(2, pages[2])
        data += pack(Kind.DROPPED, sequence=9, body=b"no answer has one, none is refused for it")
        frames = []
        ends = [0, *itertools.accumulate(cuts), len(data)]
        for begin, end in itertools.pairwise(ends):
            b.there.sendall(data[begin:end])
            while (frame := b.pump.pump()) is not None:
                frames.append(frame)
        assert [(frame.kind, frame.code) for frame in frames] == [(Kind.DENIED, 1), (Kind.DROPPED, 0)]
        assert [found[0] for found in b.landed] == [first, first + 2]
        assert [found[2] for found in b.landed] == [digest(pages[n], n) for n in (0, 2)]
        assert b.holds(0, pages[0])
        assert b.untouched(1)
        assert b.holds(2, pages[2])


def test_without_digests_pages_land_alike() -> None:
    (page,) = contents(1, 5000)
    with bench(5000, 1, digests=False) as b:
        b.there.sendall(b.page(0, page))
        b.pump.pump()
        assert b.landed[0][2] == bytes(16)
        assert b.holds(0, page)


def test_one_call_gives_no_more_than_a_bounded_number_of_pages() -> None:
    with bench(1, 200) as b:
        b.there.sendall(b"".join(b.page(number, b"x") for number in range(200)))
        counts = []
        for _ in range(5):
            assert b.pump.pump() is None
            counts.append(len(b.landed))
        assert counts == [64, 128, 192, 200, 200]


def test_a_frame_that_came_with_the_last_page_of_a_call_is_not_left_lying() -> None:
    """Nothing more comes, so nothing would wake the reader for it."""
    with bench(1, 64) as b:
        b.there.sendall(
            b"".join(b.page(number, b"x") for number in range(64)) + pack(Kind.STALE, sequence=77)
        )
        assert b.pump.pump() == Frame(kind=Kind.STALE, sequence=77)
        assert len(b.landed) == 64


# ---- what breaks the rules ---------------------------------------------------------------------------

BROKEN = {
    "magic": HEADER.pack(b"PDKW", VERSION, Kind.PAGE, 0, 1, 0, 100),
    "version": HEADER.pack(MAGIC, VERSION + 1, Kind.PAGE, 0, 1, 0, 100),
    "kind": HEADER.pack(MAGIC, VERSION, Kind.WELCOME, 0, 1, 0, 0),
    "no kind": HEADER.pack(MAGIC, VERSION, 255, 0, 1, 0, 0),
    "a body": HEADER.pack(MAGIC, VERSION, Kind.PAGE, 0, 1, 1, 100),
    "huge body": HEADER.pack(MAGIC, VERSION, Kind.STALE, 0, 1, 2**32 - 1, 0),
    "no payload": HEADER.pack(MAGIC, VERSION, Kind.PAGE, 0, 1, 0, 0),
    "short": HEADER.pack(MAGIC, VERSION, Kind.PAGE, 0, 1, 0, 99),
    "huge": HEADER.pack(MAGIC, VERSION, Kind.PAGE, 0, 1, 0, 2**32 - 1),
    "payload of another": HEADER.pack(MAGIC, VERSION, Kind.STALE, 0, 1, 0, 100),
    "never asked": HEADER.pack(MAGIC, VERSION, Kind.PAGE, 0, 9, 0, 100),
    "no read": HEADER.pack(MAGIC, VERSION, Kind.PAGE, 0, 0, 0, 100),
    "far away": HEADER.pack(MAGIC, VERSION, Kind.PAGE, 0, 1 + NUM_SLOTS, 0, 100),
    "last": HEADER.pack(MAGIC, VERSION, Kind.PAGE, 0, 2**64 - 1, 0, 100),
}


def by_python(header: bytes) -> str:
    """What the receiver of Python says to it."""
    ours, theirs = socket.socketpair()

    def place(sequence: int) -> memoryview:
        if sequence != 1:
            raise WireError("a page nobody asked for")
        return memoryview(bytearray(100))

    with ours, theirs:
        ours.setblocking(False)
        theirs.sendall(header + bytes(200))
        with pytest.raises(WireError) as caught:
            FrameReceiver(ours, expect=ANSWERS, page_bytes=100, place=place).pump()
    return str(caught.value)


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("header", BROKEN.values(), ids=BROKEN)
def test_a_broken_header_is_the_same_violation_as_in_python(header: bytes, before: int) -> None:
    pages = contents(2, 100)
    with bench(100, 2) as b:
        b.there.sendall(b"".join(b.page(1, pages[1]) for _ in range(before)) + header + bytes(200))
        with pytest.raises(WireError) as caught:
            b.pump.pump()
        assert str(caught.value) == by_python(header)
        assert len(b.landed) == before, "what came before it counts"
        assert b.untouched(0)


@pytest.mark.parametrize("answer", [Kind.PAGE, Kind.STALE, Kind.DENIED, Kind.DROPPED])
def test_a_page_after_its_answer_is_a_violation(answer: Kind) -> None:
    with bench(100, 1) as b:
        once = b.page(0, bytes(100)) if answer is Kind.PAGE else pack(answer, sequence=1)
        b.there.sendall(once)
        b.pump.pump()
        before = bytes(b.memory[0])
        b.there.sendall(b.page(0, b"x" * 100))
        with pytest.raises(WireError, match="nobody asked for"):
            b.pump.pump()
        assert bytes(b.memory[0]) == before


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(min_size=24, max_size=24), st.integers(0, 24))
def test_garbage_never_lands(noise: bytes, keep: int) -> None:
    with bench(100, 1) as b:
        good = b.page(0, b"")
        b.there.sendall(good[:keep] + noise[keep:] + bytes(99))
        try:
            b.pump.pump()
        except WireError:
            assert b.untouched(0)
        assert b.landed == []


# ---- ends --------------------------------------------------------------------------------------------


def test_a_peer_that_leaves_after_any_byte_is_noticed_and_what_came_before_counts() -> None:
    pages = contents(2, 300)
    whole = HEADER.size + 300
    for end in range(2 * whole + 1):
        with bench(300, 2) as b:
            b.there.sendall((b.page(0, pages[0]) + b.page(1, pages[1]))[:end])
            b.there.close()
            with pytest.raises(PeerClosed):
                b.pump.pump()
            assert len(b.landed) == end // whole
            assert b.holds(0, pages[0]) == (end >= whole)


def test_a_reset_is_an_end_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    with bench(300, 1, pair=(here, there)) as b:
        there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        there.close()
        select.select([here], [], [], WAIT_S)
        with pytest.raises(PeerClosed):
            b.pump.pump()
