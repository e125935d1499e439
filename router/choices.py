"""One client's request as runs: a single one, or several that share the prompt's pages and become one stream.

What lives here: which runs a request has and how their events are merged; n choices and best_of. What does
not: one run (`request`), beam search (`beam`, `beam_stream`), a request's bookkeeping (`job`).

Choice 0 goes the usual way. When its first token has come, its decode worker has the prompt's pages: the
other choices are computed there, and find those pages in its prefix cache. A choice that can not be taken
there goes the usual way, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from types import TracebackType

from pdserve.api import Admitted, ChoiceEnd, Chunk, End, StreamEvent
from router.job import Job
from router.request import RequestRun
from router.validate import ValidRequest

_SEEDS = 2**64


class Merged:
    """Events of several runs, each as it comes. Leaving it ends those that still run."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._queue: asyncio.Queue[tuple[RequestRun, StreamEvent | Exception]] = asyncio.Queue(maxsize=1)
        self._tasks: list[asyncio.Task[None]] = []
        self._open = 0

    def add(self, run: RequestRun) -> None:
        """Begins a run."""
        self._open += 1
        self._tasks.append(asyncio.get_running_loop().create_task(self._pump(run)))

    async def events(self) -> AsyncIterator[tuple[RequestRun, StreamEvent]]:
        """Until all that were added have ended. Raises what the first one that fails ends in."""
        while self._open:
            run, event = await self._queue.get()
            if isinstance(event, Exception):
                raise event
            self._open -= isinstance(event, End)
            yield run, event

    async def _pump(self, run: RequestRun) -> None:
        try:
            async with aclosing(self._job.stream(run)) as events:  # type: ignore[type-var]
                async for event in events:
                    await self._queue.put((run, event))
        except Exception as error:  # whoever reads raises it
            await self._queue.put((run, error))

    async def __aenter__(self) -> Merged:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def single(job: Job) -> AsyncIterator[StreamEvent]:
    """The one choice of a request."""
    async with aclosing(job.stream(job.start(job.request))) as events:  # type: ignore[type-var]
        async for event in events:
            yield event


async def several(job: Job, request: ValidRequest, count: int) -> AsyncIterator[StreamEvent]:
    """`count` choices at once; each ends with its ChoiceEnd, all of them with one End."""
    ends: list[End] = []
    async with Merged(job) as merged:
        first = job.start(_choice(request, 0))
        merged.add(first)
        alone = True
        async for run, event in merged.events():
            if isinstance(event, End):
                ends.insert(0 if run is first else len(ends), event)
            elif run is first or not isinstance(event, Admitted):
                yield event
            if alone and isinstance(event, Chunk):
                alone = False
                for number in range(1, count):
                    other = _choice(request, number)
                    merged.add(job.start(other, choice=number, pinned=first.decode_worker))
    yield summed(ends)


def _choice(request: ValidRequest, number: int) -> ValidRequest:
    """Choices differ by their seeds alone."""
    seed = (request.sampling.seed + number) % _SEEDS
    return replace(request, sampling=replace(request.sampling, seed=seed))


def summed(ends: Sequence[End]) -> End:
    """The one end of several runs, of which the first computed the prompt."""
    first = ends[0]
    usage = replace(first.usage, completion_tokens=sum(end.usage.completion_tokens for end in ends))
    timings = replace(first.timings, total_s=max(end.timings.total_s for end in ends))
    return replace(first, usage=usage, timings=timings, epochs=max(end.epochs for end in ends))


@dataclass(slots=True)
class Made:
    """A choice that is held back until it is known to be among the best."""

    chunks: list[Chunk] = field(default_factory=list)
    end: ChoiceEnd | None = None

    @property
    def score(self) -> float:
        """Mean log-probability of its tokens."""
        assert self.end is not None
        assert self.end.cumulative_logprob is not None
        return self.end.cumulative_logprob / self.end.completion_tokens


async def best_of(job: Job) -> AsyncIterator[StreamEvent]:
    """The n of best_of choices with the greatest log-probability per token, as OpenAI ranks them; best first,
    once all are made. The tokens of all count."""
    asked, count = job.request.sampling.logprobs, job.request.wanted.best_of
    scored = replace(job.request, sampling=replace(job.request.sampling, logprobs=asked or 0))
    made = [Made() for _ in range(count)]
    async with aclosing(several(job, scored, count)) as events:  # type: ignore[type-var]
        async for event in events:
            match event:
                case Chunk():
                    made[event.choice].chunks.append(event)
                case ChoiceEnd():
                    made[event.choice].end = event
                case End():
                    best = sorted(made, key=lambda choice: -choice.score)[: job.request.wanted.n]
                    for number, choice in enumerate(best):
                        chunk, end = told(choice, number, with_logprobs=asked is not None)
                        yield chunk
                        yield end
                    assert best[0].end is not None
                    yield replace(event, finish_reason=best[0].end.finish_reason)
                case _:
                    yield event


def told(made: Made, number: int, *, with_logprobs: bool) -> tuple[Chunk, ChoiceEnd]:
    """All of a choice at once, under a number of its own."""
    assert made.end is not None
    chunks = made.chunks
    chunk = Chunk(
        index=0,
        token_ids=tuple(i for c in chunks for i in c.token_ids),
        text="".join(c.text for c in chunks),
        choice=number,
        logprobs=tuple(entry for c in chunks for entry in c.logprobs) if with_logprobs else (),
        reasoning="".join(c.reasoning for c in chunks),
        tool_calls=tuple(call for c in chunks for call in c.tool_calls),
    )
    return chunk, replace(made.end, choice=number)
