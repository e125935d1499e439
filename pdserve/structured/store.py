"""Compiled grammars for those who wait on an event loop: made once, in threads of their own, within limits.

What lives here: one compile for a key at a time, one for a tenant at a time, and the time that its request
waits. What does not: compiling (`compile`), what is kept (`cache`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pdserve.errors import InternalError, Overloaded, PdserveError
from pdserve.structured.cache import CacheKey, CacheLimits, GrammarCache
from pdserve.structured.refusal import Refused, check_size, invalid
from pdserve.types import Grammar

log = logging.getLogger(__name__)
T = TypeVar("T")
U = TypeVar("U")

COMPILE_S = 2.0
"""A request whose grammar takes longer ends (security.md, section 6)."""
MAX_WAITING = 16
"""Grammars of one tenant that may wait for their turn."""
NUM_THREADS = 4
NICE = 5
"""Compiling gives way to steps and to the event loop."""
STACK_BYTES = 256 << 20
"""llguidance follows chains of rules by recursion, some 10 KB a rule: the longest that 64 KB of text can hold
fits three times. Only what is used is ever backed by memory."""
_making = threading.Lock()


@dataclass(slots=True)
class _Line:
    """One tenant's grammars that are compiled or wait for it."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    length: int = 0


class GrammarStore(Generic[T]):
    """What `compile_one` makes of grammars. Owned by one event loop; `compile_one` runs in threads."""

    def __init__(
        self,
        compile_one: Callable[[Grammar], T],
        size_bytes: Callable[[Grammar], int],
        *,
        prepare: Callable[[], None] = lambda: None,
        limits: CacheLimits | None = None,
        compile_s: float = COMPILE_S,
    ) -> None:
        """compile_one: raises Refused, or a PdserveError. size_bytes: of what is made. prepare: called once,
        in a thread too, before the first compile and outside of its time. compile_s: how long a request waits
        from the start of its compile."""
        self._compile_one, self._size_bytes, self._compile_s = compile_one, size_bytes, compile_s
        self._prepare = prepare
        self._prepared: asyncio.Future[None] | None = None
        self._cache: GrammarCache[T | Refused] = GrammarCache(limits or CacheLimits())
        self._jobs: dict[CacheKey, asyncio.Future[T]] = {}
        self._lines: dict[str, _Line] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._free = asyncio.Semaphore(NUM_THREADS)
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar", initializer=_give_way)

    async def get(self, tenant: str, grammar: Grammar) -> T:
        """The tenant's compiled grammar. Raises InvalidRequest for a grammar that is wrong, too large or too
        slow to compile, Overloaded when too many of the tenant's wait, or what `compile_one` raises."""
        check_size(grammar)
        key = CacheKey.of(tenant, grammar)
        found = self._cache.get(key)
        if found is None:
            job = self._jobs.get(key) or self._start(key, grammar)
            return await asyncio.shield(job)  # others may wait for it too
        if isinstance(found, Refused):
            raise invalid(str(found))
        return found

    def close(self) -> None:
        """Ends what waits; what is being compiled ends by itself."""
        for task in self._tasks:
            task.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, key: CacheKey, grammar: Grammar) -> asyncio.Future[T]:
        line = self._lines.setdefault(key.tenant, _Line())
        if line.length > MAX_WAITING:
            raise Overloaded("Too many grammars of yours are being compiled; try again.", retry_after_s=1.0)
        line.length += 1
        job: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        job.add_done_callback(lambda done: done.cancelled() or done.exception())  # there may be nobody left
        self._jobs[key] = job
        task = asyncio.create_task(self._run(key, grammar, line, job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return job

    async def _run(self, key: CacheKey, grammar: Grammar, line: _Line, job: asyncio.Future[T]) -> None:
        try:
            async with line.turn, self._free:
                await self._ready()
                work = asyncio.wrap_future(self._submit(lambda: self._compile_one(grammar)))
                await asyncio.wait({work}, timeout=self._compile_s)
                if not work.done():  # the tenant's next one waits for the thread all the same
                    _fail(job, invalid(f"it takes more than {self._compile_s:g} s to compile."))
                await asyncio.wait({work})
            self._done(key, grammar, work, job)
        except PdserveError as error:  # not the grammar's fault: the next one may have more luck
            _fail(job, error)
        except Exception:
            log.exception("compiling a grammar failed")
            _fail(job, InternalError("Compiling the grammar failed."))
        finally:
            job.cancel()  # without effect where there is an answer
            del self._jobs[key]
            line.length -= 1
            if not line.length:
                del self._lines[key.tenant]

    def _done(self, key: CacheKey, grammar: Grammar, work: asyncio.Future[T], job: asyncio.Future[T]) -> None:
        size = self._size_bytes(grammar)
        try:
            made = work.result()
        except Refused as refused:
            self._cache.put(key, Refused(str(refused)), size)
            _fail(job, invalid(str(refused)))
            return
        self._cache.put(key, made, size)
        if not job.done():
            job.set_result(made)

    async def _ready(self) -> None:
        """Raises what `prepare` raised."""
        if self._prepared is None:
            self._prepared = asyncio.wrap_future(self._submit(self._prepare))
        await asyncio.shield(self._prepared)

    def _submit(self, work: Callable[[], U]) -> Future[U]:
        """Starts work now; a thread that this makes has a large stack."""
        with _making:
            usual = threading.stack_size(STACK_BYTES)
            try:
                return self._pool.submit(work)
            finally:
                threading.stack_size(usual)


def _fail(job: asyncio.Future[T], error: PdserveError) -> None:
    if not job.done():
        job.set_exception(error)


def _give_way() -> None:
    """In a new thread: its share of the processor is small where others want it."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
