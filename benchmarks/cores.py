"""Threads and cores of one prefill and one decode worker that share a machine, with the real product.

    python -m benchmarks.cores [--rounds 2]

Router and workers as `pdserve up --precision fast` configures them, once for each way to share the cores; all
are started, then measured in turns, idle ones waiting without spinning. Cases: 8 and 32 requests at once (256
in, 64 out: output tokens/s), and 8 chats that decode while 4 prompts of 2,000 tokens arrive, one every half
second (inter-token latency of the chats from the first arrival on; time to the prompts' first tokens). The
table of docs/decisions/0011-threads-and-cores.md comes from here. Writes benchmarks/results/cores.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import machine
from benchmarks.cases import FIRST_ID, LAST_ID
from benchmarks.report import percentile
from benchmarks.stack import Stack
from pdserve.client import AsyncClient
from pdserve.config import ServeConfig
from pdserve.types import Role

RESULTS = Path(__file__).resolve().parent / "results" / "cores.json"
CHATS, CHAT_TOKENS = 8, 200
PROMPTS, PROMPT_TOKENS, EVERY_S = 4, 2000, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How the workers share the cores. threads: of each, as a share of the cores. pinned: half each."""

    name: str
    threads: float
    nice: int = 0
    pinned: bool = False


WAYS = (
    Way(name="all cores each, prefill at nice 10", threads=1, nice=10),
    Way(name="all cores each", threads=1),
    Way(name="all cores each, prefill at nice 19", threads=1, nice=19),
    Way(name="half the cores each, pinned", threads=0.5, pinned=True),
    Way(name="threads for half the cores each", threads=0.5),
)


@contextmanager
def started(way: Way) -> Iterator[Stack]:
    """A stack that shares the cores so."""
    cores = sorted(os.sched_getaffinity(0))
    config = ServeConfig(
        precision="fast", threads=max(1, int(len(cores) * way.threads)), prefill_nice=way.nice,
        kv_memory=384 << 20, prefix_caching=False,
    ).resolved()  # fmt: skip
    stack = Stack(config)
    try:
        if way.pinned:
            half = len(cores) // 2
            for worker in stack.status().workers:
                mine = cores[:half] if worker.record.role is Role.PREFILL else cores[half:]
                _pin(worker.record.pid, mine)
        yield stack
    finally:
        stack.stop()


def _pin(pid: int, cores: list[int]) -> None:
    for thread in psutil.Process(pid).threads():
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setaffinity(thread.id, cores)


class Client:
    """Requests of random tokens to one stack."""

    def __init__(self, address: str) -> None:
        self._client = AsyncClient(address, retry=None)
        self._random = random.Random(7)

    async def one(
        self, prompt_tokens: int, max_tokens: int, first: asyncio.Event | None = None
    ) -> list[float]:
        """When each token arrived."""
        prompt = [self._random.randrange(FIRST_ID, LAST_ID) for _ in range(prompt_tokens)]
        times: list[float] = []
        stream = self._client.generate(
            token_ids=prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, no_prefix_cache=True
        )
        async for chunk in stream:
            times += [time.perf_counter()] * len(chunk.token_ids)
            if first is not None:
                first.set()
        return times

    async def at_once(self, count: int) -> float:
        """Output tokens/s of so many requests."""
        began = time.perf_counter()
        await asyncio.gather(*(self.one(256, 64) for _ in range(count)))
        return count * 64 / (time.perf_counter() - began)

    async def mixed(self) -> dict[str, float]:
        """Chats while long prompts arrive."""
        firsts = [asyncio.Event() for _ in range(CHATS)]
        chats = [asyncio.create_task(self.one(128, CHAT_TOKENS, first)) for first in firsts]
        await asyncio.gather(*(first.wait() for first in firsts))
        began = time.perf_counter()
        longs = await asyncio.gather(*(self._later(number) for number in range(PROMPTS)))
        tokens = [[t for t in await chat if t >= began] for chat in chats]
        gaps = [b - a for times in tokens for a, b in itertools.pairwise(times)]
        return {
            "itl_p50_ms": 1000 * (percentile(gaps, 50) or 0),
            "itl_p99_ms": 1000 * (percentile(gaps, 99) or 0),
            "itl_max_ms": 1000 * max(gaps, default=0),
            "long_ttft_ms": 1000 * statistics.mean(longs),
            "chat_tokens_per_s": sum(map(len, tokens)) / (max(map(max, tokens)) - began),
        }

    async def _later(self, number: int) -> float:
        await asyncio.sleep(number * EVERY_S)
        began = time.perf_counter()
        return (await self.one(PROMPT_TOKENS, 2))[0] - began

    async def round(self) -> dict[str, float]:
        """All cases once."""
        found = {"concurrent_8": await self.at_once(8), "concurrent_32": await self.at_once(32)}
        return found | await self.mixed()

    async def close(self) -> None:
        """Ends the connection."""
        await self._client.close()


async def measure(addresses: Sequence[str], rounds: int) -> list[list[dict[str, float]]]:
    """Rounds of each stack, in turns; each round begins with another one."""
    found: list[list[dict[str, float]]] = [[] for _ in addresses]
    for number in range(rounds):
        for step in range(len(addresses)):
            at = (step + number) % len(addresses)
            client = Client(addresses[at])
            found[at].append(await client.round())
            await client.close()
            print(WAYS[at].name, {n: round(v, 1) for n, v in found[at][-1].items()}, flush=True)
    return found


def report(found: list[list[dict[str, float]]]) -> None:
    """Prints medians and writes everything."""
    lines = []
    for way, samples in zip(WAYS, found, strict=True):
        middle = {name: round(statistics.median(s[name] for s in samples), 1) for name in samples[0]}
        print(f"{way.name:38} {middle}", flush=True)
        lines.append({"way": way.name, "median": middle, "samples": samples})
    facts: dict[str, Any] = {"date": machine.now().isoformat(), "machine": machine.machine()}
    RESULTS.write_text(json.dumps({**facts, "versions": machine.us(), "ways": lines}, indent=1) + "\n")


def main() -> None:
    """Starts all, measures in turns, writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    with ExitStack() as stack:
        addresses = [stack.enter_context(started(way)).address for way in WAYS]
        report(asyncio.run(measure(addresses, options.rounds)))


if __name__ == "__main__":
    main()
