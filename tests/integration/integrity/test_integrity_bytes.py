"""Bytes that change, between processes: 100 % refused or repaired, the text always the aggregated one's.

Faults come from outside the processes: the wire is a proxy of the test, memory is written through /proc. On
shm there is no wire: what stands for it is a page that is wrong while decode copies it and right again after.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterable

import pytest

from kvtransfer.wire import HEADER
from pdserve.messages import Announce, Nack, TransferMessage
from pdserve.types import PageName
from tests.support import direct as dx
from tests.support.chaos import Cut, Step
from tests.support.integrity import NUM_PAGES, PROMPT, Bench

Damage = Callable[[bytearray], None]
LAYERS = 30
BLOCK = 1024
"""What the digest takes at once (xxh3's block)."""


def flip(payload: bytearray) -> None:
    payload[len(payload) // 3] ^= 0x40


def swap_layers(payload: bytearray) -> None:
    """Layers 3 and 4 change places; all bytes are there."""
    size = len(payload) // LAYERS
    third, fourth = payload[3 * size : 4 * size], payload[4 * size : 5 * size]
    assert third != fourth
    payload[3 * size : 5 * size] = fourth + third


def on_the_way(bench: Bench, way: str, index: int, damage: Damage, times: int) -> None:
    """Damages page `index` the first so many times that it moves."""
    left = [times]
    if way == "tcp":

        def page(number: int, header: bytes, payload: bytearray) -> Iterable[Step]:
            # The first page asked for is index 0, and so on; what comes again comes after the others.
            if left[0] and (number == index or number >= NUM_PAGES):
                left[0] -= 1
                damage(payload)
            return [header, bytes(payload)]

        bench.proxy.page = page
        return
    pool, good = bench.prefill.pool, bytearray()

    def to_decode(message: TransferMessage) -> list[TransferMessage]:
        if isinstance(message, Announce) and message.index == index and left[0]:
            left[0] -= 1
            good[:] = pool.read(message.page.page)
            bad = bytearray(good)
            damage(bad)
            pool.write(message.page.page, 0, bad)
        return [message]

    def to_prefill(message: TransferMessage) -> list[TransferMessage]:
        if isinstance(message, Nack):
            pool.write(bench.announced()[index].page.page, 0, good)
        return [message]

    bench.relay.to_decode, bench.relay.to_prefill = to_decode, to_prefill


@pytest.mark.parametrize("damage", [flip, swap_layers], ids=["flipped-byte", "wrong-layer"])
@pytest.mark.parametrize("times", [1, 2])
async def test_damage_on_the_way_moves_that_page_again_and_no_other(
    bench: Bench, way: str, damage: Damage, times: int
) -> None:
    on_the_way(bench, way, 2, damage, times)
    came = await bench.run(way)
    came.assert_repaired(resent=times)
    assert bench.nacked() == [2] * times
    assert came.decode["reads_good"] == NUM_PAGES
    assert came.prefill["source_corrupt"] == 0, "the source's page was good all the time"


async def test_a_page_that_never_arrives_intact_is_computed_by_decode(bench: Bench, way: str) -> None:
    on_the_way(bench, way, 2, flip, 99)
    came = await bench.run(way)
    came.assert_computed_by_decode()
    assert came.decode["reads_mismatch"] == 3
    assert came.prefill["source_corrupt"] == 0


async def test_a_byte_that_flips_in_the_target_page_before_it_is_verified(bench: Bench) -> None:
    """tcp: half the page has come, then decode's own memory changes, in the block that has not come whole
    and so is not digested yet. On shm there is no such moment: a word is digested as it is stored; what
    memory does to it after that is a fault after the check."""
    pool, flipped = bench.decode["tcp"].pool, []
    tokens = tuple(token + 7 for token in PROMPT)
    await bench.right("shm", tokens)  # by the other worker: none of these bytes is in this one's memory yet

    def damage(start: bytes) -> Callable[[], None]:
        def wait_and_flip() -> None:
            while not (found := pool.find(start)):  # the first half is on its way into decode's page
                pass
            pool.flip(found[-1], len(start) - 1)
            flipped.append(found)

        return wait_and_flip

    def page(number: int, header: bytes, payload: bytearray) -> Iterable[Step]:
        half = len(payload) // 2 // BLOCK * BLOCK + BLOCK // 2
        if number != 2:
            return [header, bytes(payload)]
        return [header + payload[:half], damage(bytes(payload[:half])), bytes(payload[half:])]

    bench.proxy.page = page
    came = await bench.run("tcp", tokens)
    assert [len(found) for found in flipped] == [1]
    came.assert_repaired(resent=1)


async def test_a_page_that_is_bad_at_the_source_is_not_sent_for_ever(bench: Bench, way: str) -> None:
    pool, done = bench.prefill.pool, []

    def to_decode(message: TransferMessage) -> list[TransferMessage]:
        if isinstance(message, Announce) and message.index == 1 and not done:
            done.append(message)
            pool.flip(message.page.page, 4242)
        return [message]

    bench.relay.to_decode = to_decode
    came = await bench.run(way)
    came.assert_computed_by_decode()
    assert came.prefill["source_corrupt"] == 1
    assert came.decode["reads_mismatch"] == 1
    assert came.ended.ledger.transfer.resent_pages == 0, "it was never moved again"


async def test_swapped_pages_of_one_request(bench: Bench, way: str) -> None:
    """Two announces name each other's page: right bytes, wrong place."""
    held: list[Announce] = []

    def to_decode(message: TransferMessage) -> list[TransferMessage]:
        if not isinstance(message, Announce) or message.index not in (1, 2) or len(held) == 2:
            return [message]
        held.append(message)
        return _exchanged(*held) if len(held) == 2 else []

    bench.relay.to_decode = to_decode
    came = await bench.run(way)
    came.assert_repaired(resent=2)
    assert sorted(bench.nacked()) == [1, 2]


def _exchanged(one: Announce, other: Announce) -> list[TransferMessage]:
    return [_named(one, other.page), _named(other, one.page)]


def _named(message: Announce, page: PageName) -> Announce:
    return Announce(
        key=message.key, index=message.index, page=page, valid_rows=message.valid_rows,
        content_key=message.content_key, digest=message.digest,
    )  # fmt: skip


async def test_a_connection_that_breaks_in_the_middle_of_a_page(bench: Bench, way: str) -> None:
    await bench.run(way)  # there is a connection
    cut = []

    def page(number: int, header: bytes, payload: bytearray) -> Iterable[Step]:
        def end() -> None:
            raise Cut

        if number != 2 or cut:
            return [header, bytes(payload)]
        cut.append(number)
        return [header + payload[: len(payload) // 2], end]

    def to_decode(message: TransferMessage) -> list[TransferMessage]:
        if isinstance(message, Announce) and message.index == 2 and not cut:
            cut.append(2)
            bench.door.cut()
        return [message]

    if way == "tcp":
        bench.proxy.reset()
        bench.proxy.page = page
    else:
        bench.relay.to_decode = to_decode
    came = await bench.run(way)
    assert cut == [2]
    assert came.decode["reads_failed"] >= 1
    came.assert_repaired(resent=came.decode["reads_failed"])


@pytest.mark.parametrize("change", [-1, 1, -4096], ids=["short", "long", "a-block-short"])
async def test_a_frame_of_another_length_than_a_page(bench: Bench, change: int) -> None:
    done = []

    def page(number: int, header: bytes, payload: bytearray) -> Iterable[Step]:
        if done:
            return [header, bytes(payload)]
        done.append(number)
        magic, version, kind, code, sequence, body, size = HEADER.unpack(header)
        return [HEADER.pack(magic, version, kind, code, sequence, body, size + change), bytes(payload)]

    bench.proxy.page = page
    came = await bench.run("tcp")
    assert came.decode["reads_failed"] >= 1
    came.assert_repaired(resent=came.decode["reads_failed"])


async def test_a_pool_that_is_shorter_than_its_header_says_is_not_mapped(bench: Bench) -> None:
    await bench.run("shm")
    given: list[int] = []

    def short(fd: int) -> int:
        made = os.memfd_create("short", os.MFD_ALLOW_SEALING)
        os.write(made, os.pread(fd, 1 << 20, 0))
        given.append(made)
        return made

    bench.door.cut()
    bench.door.descriptor = short
    came = await bench.run("shm")
    for fd in given:
        os.close(fd)
    came.assert_computed_by_decode()
    assert given


async def test_pages_of_two_requests_exchanged_on_the_way(bench: Bench) -> None:
    """tcp: what one request asked for reaches the other, frame by frame."""
    kept: list[tuple[bytes, bytes]] = []
    lock = threading.Lock()

    def page(number: int, header: bytes, payload: bytearray) -> Iterable[Step]:
        with lock:
            kept.append((header, bytes(payload)))
            if len(kept) == 1:
                return []
            if len(kept) == 2:  # the frames of both, each with the other's bytes
                (one, first), (two, second) = kept
                return [one, second, two, first]
        return [header, bytes(payload)]

    other = tuple(token + 1 for token in PROMPT)
    wants = [await bench.right("tcp", tokens) for tokens in (PROMPT, other)]
    bench.proxy.page = page
    asks = [bench.ask("tcp"), bench.ask("tcp", other)]
    got = await asyncio.gather(*(dx.generate(ask) for ask in asks))
    assert [tokens for tokens, _ in got] == wants
    assert sum(ended.ledger.transfer.resent_pages for _, ended in got) == 2
