"""One client over two router processes: load is spread, and when one is killed the other takes all."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from pdserve.client import AsyncClient, Retry
from pdserve.errors import PdserveError, Unauthenticated, Unavailable
from pdserve.types import Role
from tests.support.byte_model import text_of
from tests.support.router_kit import SECRET, FakeWorker, fleet, until_ready

PROMPT, EXPECTED = "once upon", text_of("once upon", 4)


@asynccontextmanager
async def router(worker: FakeWorker) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A router's process with one worker of this process."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pdserve.cli", "router", "--port", "0", "--metrics-port", "0",
        "--suspect-after-s", "600", "--heartbeat-timeout-s", "600", "--http", "false",
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "PDSERVE_FLEET_SECRET": SECRET.hex()},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        found = re.search(r"listens on (\S+)", (await process.stdout.readline()).decode())
        assert found is not None
        await worker.start()
        assert (await worker.join(found[1])).accepted
        await until_ready(found[1])
        yield process, found[1]
    finally:
        with suppress(Exception):
            await worker.kill()
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def answers(client: AsyncClient, count: int) -> list[str]:
    streams = [client.generate(PROMPT, max_tokens=4) for _ in range(count)]
    return [(await stream.result()).text for stream in streams]


async def test_two_routers_one_of_which_is_killed() -> None:
    one, other = FakeWorker("one", Role.DECODE), FakeWorker("two", Role.DECODE)
    async with (
        router(one) as (process, first),
        router(other) as (_, second),
        AsyncClient(f"{first},{second}", retry=None) as client,
    ):
        assert await answers(client, 8) == [EXPECTED] * 8
        assert (len(one.reserves), len(other.reserves)) == (4, 4)

        one.pause_at = other.pause_at = 2
        held = [client.generate(PROMPT, max_tokens=4) for _ in range(2)]
        assert [(await anext(stream)).index for stream in held] == [0, 0]
        process.send_signal(signal.SIGKILL)  # one of them runs there
        await process.wait()
        other.gate.set()
        ended = await asyncio.gather(*(stream.result() for stream in held), return_exceptions=True)
        assert len([each for each in ended if isinstance(each, PdserveError)]) == 1
        assert [each.text for each in ended if not isinstance(each, BaseException)] == [EXPECTED]

        # What was not admitted goes to the other, though no retry is allowed.
        assert await answers(client, 6) == [EXPECTED] * 6
        assert {(await client.get_model()).model for _ in range(3)} == {"bytes"}
        assert len(other.reserves) == 4 + 1 + 6


async def test_nobody_there_is_unavailable_after_all_attempts() -> None:
    async with AsyncClient(["127.0.0.1:1", "127.0.0.1:2"], retry=Retry(attempts=2, max_wait_s=0.1)) as client:
        with pytest.raises(Unavailable):
            await client.generate(PROMPT).result()
        with pytest.raises(Unavailable):
            await client.get_status()


async def test_a_router_that_wants_a_key_gets_the_clients() -> None:
    worker, key = FakeWorker("d", Role.DECODE), "a-key-of-some-length-0123456789"
    async with fleet(worker, api_key=key) as running:
        async with AsyncClient(running.router.address, api_key=key) as known:
            assert await answers(known, 1) == [EXPECTED]
            assert (await known.get_model()).model == "bytes"
        async with AsyncClient(running.router.address, api_key=key + "x") as stranger:
            for call in (stranger.generate(PROMPT).result(), stranger.get_model()):
                with pytest.raises(Unauthenticated) as caught:
                    await call
                assert key not in caught.value.message
    assert len(worker.reserves) == 1
