"""Load on a running router through the client SDK: times to the first token and between tokens, throughput.

What lives here: sending requests (so many at a time, or so many a second), and the summary. What does not:
reaching the router (`pdserve.cli`), tables.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pdserve.bench.machine import machine
from pdserve.bench.percentiles import percentile
from pdserve.bench.results import document
from pdserve.client import AsyncClient
from pdserve.errors import InvalidRequest, PdserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """requests: in all. concurrency: at a time, or None where rate says when each starts. rate: requests a
    second, at random times (a Poisson process), or None. prompt_tokens, output_tokens: of each. warmup:
    requests before, not counted. seed: of prompts and times.
    """

    requests: int
    concurrency: int | None
    rate: float | None
    prompt_tokens: int
    output_tokens: int
    warmup: int = 1
    seed: int = 0
    deadline_s: float = 600.0


@dataclass(slots=True, kw_only=True)
class Sample:
    """One request. started: seconds since the start. arrivals: of (seconds since it started, tokens). error:
    its label, or None.
    """

    started: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    error: str | None = None

    @property
    def good(self) -> bool:
        """Whether it ended well."""
        return self.error is None and bool(self.arrivals)

    @property
    def tokens(self) -> int:
        """Tokens that came."""
        return sum(count for _, count in self.arrivals)

    @property
    def gaps(self) -> list[float]:
        """Seconds between messages that bring tokens."""
        times = [at for at, _ in self.arrivals]
        return [b - a for a, b in itertools.pairwise(times)]


async def measure_serving(
    client: AsyncClient, load: Load, done: Callable[[bool], None] = lambda failed: None
) -> dict[str, Any]:
    """The result document. done: called as each request ends. Raises PdserveError if no model is served,
    InvalidRequest if it can not take such requests.
    """
    about, model = machine(), await client.get_model()
    if load.prompt_tokens + load.output_tokens > model.limits.max_context:
        raise InvalidRequest.field(
            "prompt_tokens", f"the model takes {model.limits.max_context} tokens with the output."
        )
    prompts = _prompts(load, model.limits.vocab_size, model.limits.end_token_ids)
    for prompt in prompts[: load.warmup]:
        await _one(client, load, prompt, time.perf_counter())
    begin = time.perf_counter()
    samples = await _all(client, load, prompts[load.warmup :], done)
    elapsed = time.perf_counter() - begin
    settings = {**asdict(load), "model": model.model, "dtype": model.dtype}
    return document("serving", settings, [summary(samples, elapsed, load.prompt_tokens)], about)


def _prompts(load: Load, vocab: int, ends: Sequence[int]) -> list[list[int]]:
    """Random ids, so that no prompt shares a prefix with another."""
    choose = random.Random(load.seed)
    ids = [i for i in range(vocab) if i not in set(ends)]
    return [choose.choices(ids, k=load.prompt_tokens) for _ in range(load.warmup + load.requests)]


def starts(load: Load) -> list[float]:
    """Seconds after which each request starts, where a rate says so; else 0 for all."""
    if load.rate is None:
        return [0.0] * load.requests
    choose = random.Random(load.seed + 1)
    return list(itertools.accumulate(choose.expovariate(load.rate) for _ in range(load.requests)))


async def _all(
    client: AsyncClient, load: Load, prompts: Sequence[list[int]], done: Callable[[bool], None]
) -> list[Sample]:
    places = asyncio.Semaphore(load.concurrency or load.requests)
    begin = time.perf_counter()

    async def one(prompt: list[int], wait_s: float) -> Sample:
        if wait_s:
            await asyncio.sleep(max(0.0, begin + wait_s - time.perf_counter()))
        async with places:
            sample = await _one(client, load, prompt, begin)
        done(sample.error is not None)
        return sample

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(*pair)) for pair in zip(prompts, starts(load), strict=True)]
    return [task.result() for task in tasks]


async def _one(client: AsyncClient, load: Load, prompt: list[int], begin: float) -> Sample:
    sent = time.perf_counter()
    sample = Sample(started=sent - begin)
    try:
        stream = client.generate(
            token_ids=prompt, max_tokens=load.output_tokens, temperature=0.0, ignore_eos=True,
            no_prefix_cache=True, deadline_s=load.deadline_s,
        )  # fmt: skip
        async with stream:
            async for chunk in stream:
                if chunk.token_ids:
                    sample.arrivals.append((time.perf_counter() - sent, len(chunk.token_ids)))
    except PdserveError as error:
        sample.error = error.label
    return sample


def summary(samples: Sequence[Sample], elapsed_s: float, prompt_tokens: int) -> dict[str, Any]:
    """Times in ms, over requests that ended well; None where there are none. itl: between messages that bring
    tokens. tokens_per_s: of the output, failed requests' too. errors: requests by label.
    """
    good = [s for s in samples if s.good]
    firsts = [s.arrivals[0][0] for s in good]
    gaps = [gap for s in good for gap in s.gaps]
    out: dict[str, Any] = {
        "requests": len(samples),
        "failed": len(samples) - len(good),
        "errors": dict(Counter(s.error or "no_tokens" for s in samples if not s.good)),
        "elapsed_s": elapsed_s,
        "output_tokens": sum(s.tokens for s in samples),
        "tokens_per_s": sum(s.tokens for s in samples) / elapsed_s,
        "prompt_tokens_per_s": prompt_tokens * len(good) / elapsed_s,
        "requests_per_s": len(good) / elapsed_s,
    }
    for name, values in (("ttft", firsts), ("itl", gaps)):
        for percent in (50, 90, 99):
            found = percentile(values, percent)
            out[f"{name}_p{percent}_ms"] = None if found is None else found * 1e3
    return out
