"""The frame pump and other threads: cancels at every point, signals, and who takes the pages at all."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from kvtransfer.reads import Pending
from kvtransfer.tcp import visit
from kvtransfer.tcp.pump import PagePump
from kvtransfer.tcp.reader import TcpPageReader
from kvtransfer.transport import ReadDone, ReadRequest, ReadStatus
from kvtransfer.wire import HEADER, Kind, Welcome, pack
from pdserve import failpoints
from pdserve.types import PageName
from tests.unit.pump_kit import KEY, WAIT_S, Bench, bench, config, contents, digest

# ---- cancel ------------------------------------------------------------------------------------------


def test_a_read_cancelled_at_every_byte_is_either_untouched_or_whole() -> None:
    pages = contents(2, 200)
    for at in range(2 * (HEADER.size + 200) + 1):
        with bench(200, 2) as b:
            data = b.page(0, pages[0]) + b.page(1, pages[1])
            b.there.sendall(data[:at])
            b.pump.pump()
            off = b.table.cancel(1)
            assert (off is None) == (at >= 2 * HEADER.size + 200), "begun, so it just ends"
            b.there.sendall(data[at:])
            b.pump.pump()
            assert [found[0] for found in b.landed] == [1, 2]
            assert bool(b.landed[1][1]) == (off is None)
            assert b.holds(0, pages[0])
            assert b.untouched(1) if off else b.holds(1, pages[1])


def test_a_read_cancelled_before_it_is_lent_takes_nothing() -> None:
    with bench(70_000, 2) as b:
        (again,) = [b.reads[0]]
        assert b.table.cancel(0) is again
        again.sequence = 50
        b.table.lend([again], b.pump.lend, b.pump.call_off)
        b.there.sendall(pack(Kind.PAGE, sequence=50, payload_bytes=70_000) + b"x" * 70_000)
        b.pump.pump()
        assert b.landed == [(50, 0, b.landed[0][2])]
        assert b.untouched(0)


def test_cancels_race_with_pages_and_every_read_ends_once() -> None:
    """One thread cancels while the pump takes: what was called off stays as it was, all others are whole."""
    num, size = 400, 4096
    pages = contents(num, size)
    with bench(size, num) as b:
        ended: list[Pending] = []
        go = threading.Event()

        def cancel() -> None:
            go.wait(WAIT_S)
            ended.extend(filter(None, map(b.table.cancel, range(0, num, 2))))

        def send() -> None:
            b.there.sendall(b"".join(b.page(number, pages[number]) for number in range(num)))

        threads = [threading.Thread(target=cancel), threading.Thread(target=send)]
        for thread in threads:
            thread.start()
        b.waits = True
        while len(b.landed) < num:
            b.pump.pump()
            go.set()
        for thread in threads:
            thread.join()
        b.table.verify_all([(b.reads[found[0] - 1], found[2]) for found in b.landed if found[1]])
        assert [found[0] for found in b.landed] == [1 + number for number in range(num)]
        called_off = {pending.request.read_id for pending in ended}
        assert {found[0] - 1 for found in b.landed if not found[1]} == called_off
        assert all(b.untouched(n) if n in called_off else b.holds(n, pages[n]) for n in range(num))
        assert sorted(done.read_id for done in b.done) == list(range(num))
        cancelled = {done.read_id for done in b.done if done.status is ReadStatus.FAILED}
        assert cancelled == called_off


# ---- waiting -----------------------------------------------------------------------------------------


@pytest.fixture
def waiting() -> Iterator[Bench]:
    with bench(100, 2) as b:
        b.waits = True
        yield b


def test_it_waits_for_more_only_for_a_while(waiting: Bench) -> None:
    assert waiting.pump.pump() is None
    waiting.there.sendall(waiting.page(0, bytes(100))[:50])
    assert waiting.pump.pump() is None
    assert waiting.pump.begun_at is not None
    assert waiting.landed == []


def test_a_signal_that_is_set_ends_the_wait_but_not_what_is_there(waiting: Bench) -> None:
    waiting.wake.set()
    waiting.there.sendall(waiting.page(0, bytes(100)))
    assert waiting.pump.pump() is None
    assert len(waiting.landed) == 1


# ---- who takes which way -----------------------------------------------------------------------------


@pytest.mark.parametrize(("faults", "compiled"), [("", True), ("wire=stall:0*1", False)])
def test_where_faults_may_be_asked_for_python_takes_the_pages(
    monkeypatch: pytest.MonkeyPatch, faults: str, compiled: bool
) -> None:
    monkeypatch.setattr(failpoints, "_state", None)
    failpoints.require_allowed({failpoints.VARIABLE: faults, failpoints.TESTING: "1"})
    made: list[PagePump] = []

    def make(*args: Any, **more: Any) -> PagePump:
        made.append(PagePump(*args, **more))
        return made[-1]

    monkeypatch.setattr(visit, "PagePump", make)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reading = replace(config(100), endpoint=f"127.0.0.1:{listener.getsockname()[1]}")
        destination, done = bytearray(100), queue.SimpleQueue[ReadDone]()
        with closing(TcpPageReader(reading)) as reader:
            reader.read(
                ReadRequest(
                    read_id=1, key=KEY, ticket=b"", source=PageName(pool_id=1, page=3, generation=1),
                    index=0, valid_rows=16, digest=digest(b"x" * 100, 0), target=memoryview(destination),
                ),
                done.put,
            )  # fmt: skip
            with listener.accept()[0] as source:
                source.sendall(Welcome(pool_id=1, num_pages=4, page_bytes=100).pack())
                heard = bytearray()
                while (Kind.READ not in kinds(heard)) and (more := source.recv(4096)):
                    heard += more
                source.sendall(pack(Kind.PAGE, sequence=1, payload_bytes=100) + b"x" * 100)
                end = done.get(timeout=WAIT_S)
    assert (end.status, bytes(destination)) == (ReadStatus.GOOD, b"x" * 100)
    assert end.arrived_s is not None
    assert end.verified_s is not None
    assert end.arrived_s <= end.verified_s
    assert bool(made) == compiled


def kinds(stream: bytes | bytearray) -> list[int]:
    """The kinds of the whole frames in it."""
    found, at = [], 0
    while at + HEADER.size <= len(stream):
        _, _, kind, _, _, body, payload = HEADER.unpack_from(stream, at)
        at += HEADER.size + body + payload
        found += [kind] if at <= len(stream) else []
    return found
