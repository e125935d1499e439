"""Many prompts, a bounded number at a time: in order or as they are ready, and none lost when one fails."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdserve.client.request import GenerateOptions
from pdserve.client.result import Result
from pdserve.errors import InvalidRequest, PdserveError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from pdserve.client.aio import AsyncClient
    from pdserve.client.blocking import Client
    from pdserve.client.stream import Stream

ManyPrompt = str | Mapping[str, Any]
"""A text, or a mapping: prompt, messages or token_ids, and options that go before those of all."""
MAX_CONCURRENCY = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of one prompt: a result or an error. index: of the prompt, from 0."""

    index: int
    outcome: Result | PdserveError

    @property
    def ok(self) -> bool:
        """Whether there is a result."""
        return isinstance(self.outcome, Result)

    @property
    def error(self) -> PdserveError | None:
        """Why there is no result."""
        return None if isinstance(self.outcome, Result) else self.outcome

    @property
    def result(self) -> Result:
        """The result. Raises the error that came in its place."""
        if isinstance(self.outcome, Result):
            return self.outcome
        raise self.outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far it is: prompts done, of which failed, of how many; total None: the prompts have no length."""

    done: int
    failed: int
    total: int | None


@dataclass(slots=True)
class _Book:
    """Which answers are there, and which may be given on."""

    ordered: bool
    progress: Callable[[Progress], object] | None
    total: int | None
    done: int = 0
    failed: int = 0
    _given: int = 0
    _ready: dict[int, Answer] = field(default_factory=dict)

    def take(self, answer: Answer) -> Iterator[Answer]:
        self.done += 1
        self.failed += not answer.ok
        if self.progress is not None:
            self.progress(Progress(done=self.done, failed=self.failed, total=self.total))
        if not self.ordered:
            yield answer
            return
        self._ready[answer.index] = answer
        while (found := self._ready.pop(self._given, None)) is not None:
            self._given += 1
            yield found


def _checked(prompts: Iterable[ManyPrompt], concurrency: int) -> int | None:
    """How many there are, if that is known."""
    if isinstance(prompts, str | Mapping):
        raise InvalidRequest.field("prompts", "give a sequence of prompts, not one.")
    if not 1 <= concurrency <= MAX_CONCURRENCY:
        raise InvalidRequest.field("concurrency", f"must be from 1 to {MAX_CONCURRENCY}.")
    return len(prompts) if isinstance(prompts, Sized) else None


def _arguments(prompt: ManyPrompt, options: GenerateOptions) -> dict[str, Any]:
    own = {"prompt": prompt} if isinstance(prompt, str) else prompt
    if not isinstance(own, Mapping):
        raise InvalidRequest.field("prompts", "each must be a text or a mapping.")
    return {**options, **own}


def many_blocking(
    client: Client,
    prompts: Iterable[ManyPrompt],
    concurrency: int,
    ordered: bool,
    progress: Callable[[Progress], object] | None,
    options: GenerateOptions,
) -> Iterator[Answer]:
    """See Client.generate_many."""
    book = _Book(ordered, progress, _checked(prompts, concurrency))
    return _in_threads(client, enumerate(prompts), concurrency, book, options)


def _in_threads(
    client: Client,
    prompts: Iterator[tuple[int, ManyPrompt]],
    concurrency: int,
    book: _Book,
    options: GenerateOptions,
) -> Iterator[Answer]:
    from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

    live: set[Stream] = set()
    running: set[Future[Answer]] = set()

    def one(index: int, prompt: ManyPrompt) -> Answer:
        try:
            with client.generate(**_arguments(prompt, options)) as stream:
                live.add(stream)
                try:
                    return Answer(index=index, outcome=stream.result())
                finally:
                    live.discard(stream)
        except PdserveError as error:
            return Answer(index=index, outcome=error)

    threads = ThreadPoolExecutor(concurrency, thread_name_prefix="pdserve-many")
    try:
        while True:
            while len(running) < concurrency and (item := next(prompts, None)) is not None:
                running.add(threads.submit(one, *item))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield from book.take(future.result())
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        while any(not future.done() for future in running):
            for stream in tuple(live):
                stream.cancel()
            wait(running, 0.05)


def many_async(
    client: AsyncClient,
    prompts: Iterable[ManyPrompt],
    concurrency: int,
    ordered: bool,
    progress: Callable[[Progress], object] | None,
    options: GenerateOptions,
) -> AsyncIterator[Answer]:
    """See AsyncClient.generate_many."""
    book = _Book(ordered, progress, _checked(prompts, concurrency))
    return _in_tasks(client, enumerate(prompts), concurrency, book, options)


async def _in_tasks(
    client: AsyncClient,
    prompts: Iterator[tuple[int, ManyPrompt]],
    concurrency: int,
    book: _Book,
    options: GenerateOptions,
) -> AsyncIterator[Answer]:
    import asyncio

    async def one(index: int, prompt: ManyPrompt) -> Answer:
        try:
            async with client.generate(**_arguments(prompt, options)) as stream:
                return Answer(index=index, outcome=await stream.result())
        except PdserveError as error:
            return Answer(index=index, outcome=error)

    running: set[asyncio.Task[Answer]] = set()
    try:
        while True:
            while len(running) < concurrency and (item := next(prompts, None)) is not None:
                running.add(asyncio.create_task(one(*item)))
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                for answer in book.take(task.result()):
                    yield answer
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
