"""Our own stack as a system under measurement: `pdserve up` in a child process, driven through the SDK."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers.install import PEERS, last_words
from pdserve.client import AsyncClient, Ledger
from pdserve.errors import PdserveError

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 45.0
COMMON = ("--dtype", "bfloat16", "--no-prefix-caching", "--local-prefill-threshold", "0")
LAYOUTS = {
    "ours": ("--prefill", "1", "--decode", "1"),
    "ours_aggregated": ("--aggregated", "1"),
}


class OursError(Exception):
    """Our own stack did not start, or a request failed."""


@dataclass(slots=True)
class Proof:
    """What the ledgers of a case's requests say about the handover."""

    page_size: int
    requests: int = 0
    pages_moved: int = 0
    pages_expected: int = 0
    bytes_moved: int = 0
    paths: set[str] = field(default_factory=set)
    decode_computed_prompt_tokens: int = 0
    retractions: int = 0

    def add(self, prompt_tokens: int, ledger: Ledger) -> None:
        """Counts one request."""
        self.requests += 1
        self.pages_moved += ledger.transfer.pages
        self.pages_expected += math.ceil(prompt_tokens / self.page_size) - ledger.transfer.hit_pages
        self.bytes_moved += ledger.transfer.bytes
        self.paths.add(ledger.transfer.path)
        self.decode_computed_prompt_tokens += ledger.decode_computed_prompt_tokens
        self.retractions += ledger.num_retractions

    def as_json(self) -> dict[str, Any]:
        """With a verdict: every page of every prompt moved, nothing of a prompt computed on decode."""
        proven = (
            self.requests > 0
            and self.pages_moved == self.pages_expected
            and self.decode_computed_prompt_tokens == 0
            and "" not in self.paths
        )
        return {
            "proven": proven,
            "requests": self.requests,
            "local_prefill_threshold": 0,
            "pages_moved": self.pages_moved,
            "pages_expected": self.pages_expected,
            "bytes_moved": self.bytes_moved,
            "paths": sorted(self.paths),
            "decode_computed_prompt_tokens": self.decode_computed_prompt_tokens,
            "retractions": self.retractions,
        }


class Ours:
    """One layout of ours, started and reachable. Idle it waits without spinning, so it is never frozen."""

    def __init__(self, name: str, loop: asyncio.Runner, extra: Sequence[str] = ()) -> None:
        """Starts `pdserve up` on free ports and waits until its workers serve. Raises OursError."""
        self.name = name
        self._loop = loop
        self._log = PEERS / f"{name}.log"
        PEERS.mkdir(parents=True, exist_ok=True)
        port, metrics_port = _free_ports(2)
        flags = [*LAYOUTS[name], *COMMON, *extra]
        command = [str(Path(sys.executable).with_name("pdserve")), "up", *flags]
        started = time.perf_counter()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, "--port", str(port), "--metrics-port", str(metrics_port), "--http-port", "0"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={key: value for key, value in os.environ.items() if not key.startswith("PDSERVE_")},
                start_new_session=True,
            )
        self._client: AsyncClient | None = None
        try:
            self.page_size = loop.run(self._wait(f"127.0.0.1:{port}", 2 if name == "ours" else 1))
        except BaseException:
            self.stop()
            raise
        self.hello: dict[str, Any] = {
            "flags": "pdserve up " + " ".join(flags),
            "threads": len(os.sched_getaffinity(0)),
            "start_s": round(time.perf_counter() - started, 1),
        }
        self.proof = Proof(page_size=self.page_size)

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[float]]:
        """Sends all prompts at once; token arrival times per request. Raises OursError."""
        try:
            return self._loop.run(self._run(prompts, max_tokens))
        except (PdserveError, TimeoutError) as error:
            raise OursError(f"{self.name}: {type(error).__name__}: {error}") from error

    def load(
        self, prompts: Sequence[Sequence[int]], at_s: Sequence[float], max_tokens: int, limit_s: float
    ) -> list[list[float]]:
        """Sends each prompt at its time; token times per request, those within limit_s. A request that we
        refuse has the tokens it got. Raises OursError if all are refused."""
        times: list[list[float]] = [[] for _ in prompts]
        self._loop.run(self._load(prompts, at_s, max_tokens, limit_s, times))
        if not any(times):
            raise OursError(f"{self.name}: no request of a load got a token")
        return times

    def cpu_s(self) -> float:
        """Processor seconds of all its processes so far."""
        used = 0.0
        for process in (root := psutil.Process(self._process.pid), *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                used += times.user + times.system
        return used

    def stop(self) -> None:
        """Ctrl-C, as a user would; whatever is left after a while is killed."""
        if self._client is not None:
            self._loop.run(self._client.close())
            self._client = None
        try:
            family = [psutil.Process(self._process.pid), *psutil.Process(self._process.pid).children(True)]
        except psutil.NoSuchProcess:
            family = []
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        _, left = psutil.wait_procs(family, timeout=STOP_TIMEOUT_S)
        for process in left:
            if process.is_running():
                process.kill()
        self._process.wait()

    async def _wait(self, address: str, num_workers: int) -> int:
        """Until all workers are ready; their page size in tokens."""
        self._client = AsyncClient(address, retry=None)
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise OursError(f"{self.name}: {last_words(self._log)}")
            try:
                workers = (await self._client.get_status()).workers
            except PdserveError:
                workers = ()
            if sum(worker.load.ready for worker in workers) >= num_workers:
                return workers[0].record.page_size
            await asyncio.sleep(0.3)
        raise OursError(f"{self.name}: not ready within {START_TIMEOUT_S:.0f} s; {last_words(self._log)}")

    async def _load(
        self,
        prompts: Sequence[Sequence[int]],
        at_s: Sequence[float],
        max_tokens: int,
        limit_s: float,
        times: list[list[float]],
    ) -> None:
        start = time.perf_counter()

        async def one(index: int) -> None:
            await asyncio.sleep(max(0.0, start + at_s[index] - time.perf_counter()))
            with contextlib.suppress(PdserveError, TimeoutError):
                await self._one(prompts[index], max_tokens, start, times[index])

        tasks = [asyncio.create_task(one(index)) for index in range(len(prompts))]
        _, late = await asyncio.wait(tasks, timeout=limit_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[float]]:
        start = time.perf_counter()
        return await asyncio.gather(*(self._one(prompt, max_tokens, start) for prompt in prompts))

    async def _one(
        self, prompt: Sequence[int], max_tokens: int, start: float, times: list[float] | None = None
    ) -> list[float]:
        assert self._client is not None
        times = [] if times is None else times
        stream = self._client.generate(
            token_ids=prompt,
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=True,
            no_prefix_cache=True,
            deadline_s=120.0,
        )
        async for chunk in stream:
            times += [time.perf_counter() - start] * len(chunk.token_ids)
        self.proof.add(len(prompt), (await stream.result()).ledger)
        return times


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
