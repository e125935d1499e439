"""One client's request from its admission to its end: makes its runs, aborts and explains them together.

Not here: what runs a request has (`choices`, `beam_stream`), one run (`request`), all requests (`hub`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pdserve.api import Explanation, StreamEvent
from pdserve.errors import PdserveError
from pdserve.rpc.status import error_from_label
from pdserve.types import PeerRef
from router import events as ev
from router.explain import Explained
from router.model import ServedModel
from router.output import Output
from router.request import RequestRun, Services, Shared
from router.request_state import Phase
from router.validate import ValidRequest

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """Where the router keeps its runs, by id: those alive, and explanations of those that ended."""

    runs: dict[str, RequestRun]
    explained: Explained


class Job:
    """One client's request. Its first run has its id, the others that and a number."""

    def __init__(
        self, services: Services, model: ServedModel, request: ValidRequest, shared: Shared, watched: Watched
    ) -> None:
        self.request_id = secrets.token_hex(16)
        self.tenant = shared.tenant
        self.model = model
        self._services, self._watched, self._shared = services, watched, shared
        if request.wanted.num_runs > 1 and not request.use_prefix_cache:
            # Its runs share pages through the cache all the same, under a salt that nobody else has.
            self._shared = replace(shared, cache_salt=self.request_id)
            request = replace(request, use_prefix_cache=True)
        self.shared = self._shared
        self.request = request
        self._first: RequestRun | None = None
        self._live: dict[str, RequestRun] = {}
        self._choice_ids: tuple[str, ...] = ()
        self._num_runs = 0
        self._aborted: ev.AbortAsked | None = None
        self._work: asyncio.Future[Any] | None = None

    @property
    def mode(self) -> str:
        """Who computed the prompt, once its first run has a token: of `router.metrics.MODES`."""
        assert self._first is not None
        return self._first.mode

    def start(
        self, request: ValidRequest, *, choice: int = 0, pinned: PeerRef | None = None, remember: bool = True
    ) -> RequestRun:
        """Another run, to be given to `stream`. pinned: the decode worker that should compute it. remember:
        whether it can be explained by an id of its own. Raises what the request was aborted with."""
        self._check_aborted()
        number, self._num_runs = self._num_runs, self._num_runs + 1
        run = RequestRun(
            self._services, f"{self.request_id}-{number}" if number else self.request_id, request,
            self.output(request, choice), self._shared, part=number > 0, pinned=pinned,
        )  # fmt: skip
        if not number:
            self._first = run
        elif remember:
            self._choice_ids += (run.request_id,)
        return run

    def output(self, request: ValidRequest, choice: int) -> Output:
        """An empty choice."""
        watch = request.want_text or request.stop
        key = f"{self.request_id}-{choice}"
        text = (
            self.model.text(request.stop, request.sampling.min_tokens, request.chat, key) if watch else None
        )
        return Output(request, text, self.model.spelled, choice=choice)

    async def stream(self, run: RequestRun) -> AsyncIterator[StreamEvent]:
        """A run's events; closing it cancels the run. Raises what it ends in.

        Only from here on it is known: whoever was to read it may have been cancelled before.
        """
        self._check_aborted()
        self._live[run.request_id] = self._watched.runs[run.request_id] = run
        try:
            async with aclosing(run.stream()) as events:  # type: ignore[type-var]
                async for event in events:
                    yield event
        finally:
            del self._live[run.request_id], self._watched.runs[run.request_id]
            if run.request_id in self._choice_ids:
                self._watched.explained.put(self.tenant, run.explain())

    async def beside(self, work: Coroutine[Any, Any, T]) -> T:
        """Work besides the runs, which an abort ends too. Raises what the request was aborted with."""
        task: asyncio.Future[T] = asyncio.ensure_future(work)
        self._work = task
        try:
            return await task
        except asyncio.CancelledError:
            self._check_aborted()
            raise
        finally:
            task.cancel()
            self._work = None

    def abort(self, event: ev.AbortAsked) -> None:
        """Ends all runs, and lets none begin."""
        self._aborted = event
        for run in tuple(self._live.values()):
            run.apply(event)
        if self._work is not None:
            self._work.cancel()

    def _check_aborted(self) -> None:
        if self._aborted is not None:
            raise error_from_label(self._aborted.label, self._aborted.message)

    async def explain(self) -> Explanation:
        """Where it is now: its first choice, and whether others go on."""
        assert self._first is not None
        found = replace(self._first.explain(await self._first.ask_workers()), choice_ids=self._choice_ids)
        if found.state != Phase.DONE or self._num_runs == 1:
            return found
        waits = f"{len(self._live)} more of its runs"
        return replace(found, state=str(Phase.RUNNING), outcome="", waiting_for=waits)

    def ended(self, failed: PdserveError | None) -> Explanation:
        """Where its time went. failed: what it ended in, unless it ended well or its client went away."""
        assert self._first is not None
        found = replace(self._first.explain(), choice_ids=self._choice_ids)
        if failed is None:
            return found
        return replace(found, state=str(Phase.DONE), outcome=failed.label, message=failed.message)
