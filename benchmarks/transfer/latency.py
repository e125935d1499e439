"""Where the time of one page goes: a single read on an idle reader, from `read` to `done` to the event loop.

What lives here: the stamps of each step, for shm and tcp. What does not: throughput (`ways`).
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from benchmarks.transfer.source import Remote
from benchmarks.transfer.ways import Target, reader_config, request
from kvtransfer.digest import PageDigester
from kvtransfer.mover import Copied, PageMover
from kvtransfer.shm.reader import ShmPageReader
from kvtransfer.tcp.reader import TcpPageReader
from kvtransfer.transport import PageReader, ReadDone, ReadStatus


class Stamps:
    """Monotonic seconds of the last read's steps, by name."""

    def __init__(self) -> None:
        self.at: dict[str, float] = {}

    def note(self, name: str) -> None:
        self.at[name] = time.monotonic()


def stamping_mover(stamps: Stamps) -> type[PageMover]:
    class Stamping(PageMover):
        def move(self, budget_bytes: int) -> list[Copied]:
            stamps.note("copy begins")
            found = super().move(budget_bytes)
            stamps.note("copied and digested")
            return found

    return Stamping


def stamping_digester(stamps: Stamps) -> type[PageDigester]:
    class Stamping(PageDigester):
        def __call__(self, payload: memoryview, *, index: int, valid_rows: int) -> bytes:
            stamps.note("page arrived")
            digest = super().__call__(payload, index=index, valid_rows=valid_rows)
            stamps.note("digested")
            return digest

    return Stamping


async def one(reader: PageReader, stamps: Stamps, read: Any) -> None:
    """Reads one page as a worker does: submitted on the loop's thread, its end fed back to it."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def done(found: ReadDone) -> None:
        stamps.note("done")
        assert found.status is ReadStatus.GOOD
        loop.call_soon_threadsafe(ended.set)

    stamps.note("read")
    reader.read(read, done)
    stamps.note("submitted")
    await ended.wait()
    stamps.note("on the loop")


@contextmanager
def _readers(remote: Remote, page_kib: int) -> Iterator[dict[str, tuple[PageReader, Stamps]]]:
    shm, tcp = Stamps(), Stamps()
    with (
        closing(ShmPageReader(reader_config(remote, page_kib, "shm"), mover=stamping_mover(shm))) as one,
        closing(TcpPageReader(reader_config(remote, page_kib, "tcp"), stamping_digester(tcp))) as other,
    ):
        yield {"shm": (one, shm), "tcp": (other, tcp)}


def measure(remote: Remote, page_kib: int, target: Target, count: int) -> dict[str, dict[str, float]]:
    """For shm and tcp: microseconds from `read` to each step (medians), and p90 and p99 of the whole."""
    found: dict[str, dict[str, list[float]]] = {"shm": {}, "tcp": {}}
    with _readers(remote, page_kib) as readers, asyncio.Runner() as runner:
        for number in range(count + 10):
            for name, (reader, stamps) in readers.items():
                read = request(target, remote.facts["pool_id"], number % len(target.views))
                runner.run(one(reader, stamps, read))
                if name == "tcp":
                    stamps.at["source pins"] = remote.ask()[1]
                if number >= 10:  # the first ones dial and map
                    for step, at in stamps.at.items():
                        found[name].setdefault(step, []).append((at - stamps.at["read"]) * 1e6)
    return {name: _summary(steps) for name, steps in found.items()}


def _summary(steps: dict[str, list[float]]) -> dict[str, float]:
    medians = {step: round(statistics.median(values), 1) for step, values in steps.items()}
    ordered = dict(sorted(medians.items(), key=lambda item: item[1]))
    whole = statistics.quantiles(steps["done"], n=100)
    return ordered | {"done p90": round(whole[89], 1), "done p99": round(whole[98], 1)}
