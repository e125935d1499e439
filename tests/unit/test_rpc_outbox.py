"""What waits is taken together and in order; a full or closed outbox takes nothing."""

from __future__ import annotations

import asyncio

from pdserve.rpc.outbox import MAX_BATCH, MAX_WAITING, Outbox


async def _outbox(count: int) -> Outbox[int]:
    outbox: Outbox[int] = Outbox()
    assert all(outbox.put(number) for number in range(count))
    return outbox


def test_what_waits_comes_at_once_and_in_order() -> None:
    async def run() -> None:
        outbox = await _outbox(MAX_BATCH + 3)
        assert await outbox.take() == list(range(MAX_BATCH))
        assert await outbox.take() == [MAX_BATCH, MAX_BATCH + 1, MAX_BATCH + 2]

    asyncio.run(run())


def test_a_taker_waits_for_the_first_item() -> None:
    async def run() -> None:
        outbox = await _outbox(0)
        taker = asyncio.create_task(outbox.take())
        await asyncio.wait({taker}, timeout=0)
        assert not taker.done()
        assert outbox.put(7)
        assert await taker == [7]

    asyncio.run(run())


def test_a_full_one_says_so() -> None:
    async def run() -> None:
        outbox = await _outbox(MAX_WAITING)
        assert not outbox.put(0)
        await outbox.take()
        assert outbox.put(0)

    asyncio.run(run())


def test_a_closed_one_wakes_its_taker_with_nothing() -> None:
    async def run() -> None:
        outbox = await _outbox(0)
        taker = asyncio.create_task(outbox.take())
        await asyncio.wait({taker}, timeout=0)
        outbox.close()
        assert await taker == []
        assert not outbox.put(1)

    asyncio.run(run())
