"""What the decode role hands to the step scheduler: pages and tokens of a request that starts to run. Pure.

What lives here: sealing and publishing what came by wire, and the sequence's spec. What does not: when a
request runs (`kvtransfer.session.decode`), and which pages it has (`decode_worker.reserve`).
"""

from __future__ import annotations

from decode_worker.entry import Entry
from kvtransfer.session.guard import RoleContext
from pdserve.kvcache.allocator import Holder, HolderKind, PageState
from pdserve.kvcache.manager import PageManager
from pdserve.messages import Finish
from pdserve.sched.plan import SeqKind, SeqSpec
from pdserve.sched.scheduler import StepScheduler
from pdserve.types import Key

PREFIX = "D:"
_SEALABLE = (PageState.FILLING, PageState.QUARANTINED)


def seq_id_of(key: Key) -> str:
    """The scheduler's name of a key's sequence."""
    return f"{PREFIX}{key}"


def holder_of(key: Key) -> Holder:
    """The holder of a key's pages, before and while it runs."""
    return Holder(HolderKind.REQUEST, seq_id_of(key))


class Sequences:
    """Sequences of one decode worker. Called by the control thread only."""

    def __init__(self, ctx: RoleContext, pages: PageManager, scheduler: StepScheduler) -> None:
        self._ctx = ctx
        self._pages = pages
        self._scheduler = scheduler
        self._unpublished: dict[Key, tuple[Entry, list[int]]] = {}
        """By key: whose full prompt pages the cache lacks yet, and generations of those that came by wire."""

    def go_on(self, entry: Entry, finish: Finish) -> None:
        """Every prompt page is verified: publishes the full ones, and decodes from the token after the first
        unless that one ended the request."""
        shared = len(entry.held.full_keys)
        tokens = entry.call.token_ids
        if finish.finish is not None:
            self._publish(entry, shared)
            return
        known = (*tokens, finish.token_id)
        self._scheduler.submit(self._spec(entry, known, num_computed=len(tokens), num_shared=shared))
        came = entry.held.pages[entry.held.hit_pages : shared]
        generations = [self._pages.generation(page) for page in came]
        self._unpublished[entry.session.key] = (entry, generations)  # its next token is waited for first

    @property
    def put_off(self) -> bool:
        """Whether there is something to publish."""
        return bool(self._unpublished)

    def rest(self) -> None:
        """Publishes what `go_on` did not."""
        for key in list(self._unpublished):
            self.leave(key)

    def leave(self, key: Key) -> None:
        """Publishes what `go_on` did not for this key; call it before its pages are dropped. Pages that were
        freed since (a preemption) have other bytes by now."""
        entry, generations = self._unpublished.pop(key, (None, []))
        if entry is None:
            return
        end = entry.held.hit_pages + len(generations)
        if all(map(self._as_it_came, entry.held.pages[entry.held.hit_pages : end], generations)):
            self._publish(entry, end)

    def _as_it_came(self, page: int, generation: int) -> bool:
        return self._pages.generation(page) == generation and self._pages.state(page) in _SEALABLE

    def prefill(self, entry: Entry, verified_pages: int) -> None:
        """Computes the prompt here, after its first `verified_pages` pages, as prefill counts them."""
        tokens = entry.call.token_ids
        done = min(entry.spread.known_pages(verified_pages) * self._ctx.page_size, len(tokens) - 1)
        entry.computing.begin(done)
        shared = max(entry.held.hit_pages, done // self._ctx.page_size)  # not the page of the next row
        self._publish(entry, shared)
        self._scheduler.submit(self._spec(entry, tokens, num_computed=done, num_shared=shared))

    def stop(self, key: Key) -> bool:
        """Takes a sequence out. True: nothing computes on its pages; else SeqStopped follows."""
        return not self._scheduler.has(seq_id_of(key)) or self._scheduler.cancel(seq_id_of(key))

    def _publish(self, entry: Entry, end: int) -> None:
        """Seals the full prompt pages before `end` that came by wire and offers them to the prefix cache."""
        held = entry.held
        for index in range(held.hit_pages, end):
            self._pages.seal(held.pages[index], self._ctx.page_size)
            if _may_cache(entry):
                parent = held.full_keys[index - 1] if index else None
                self._pages.publish(held.pages[index], held.full_keys[index], parent)

    def _spec(self, entry: Entry, tokens: tuple[int, ...], *, num_computed: int, num_shared: int) -> SeqSpec:
        call = entry.call
        return SeqSpec(
            seq_id=seq_id_of(call.key), kind=SeqKind.FULL, token_ids=tokens,
            num_prompt=len(call.token_ids) - call.num_forced, sampling=call.sampling,
            arrival=entry.arrival, num_computed=num_computed, pages=entry.held.pages,
            num_shared=num_shared, use_prefix_cache=_may_cache(entry), cache_salt=entry.held.salt,
            priority=call.priority,
        )  # fmt: skip


def _may_cache(entry: Entry) -> bool:
    """Whether its pages may go by our content keys."""
    return entry.call.use_prefix_cache and not entry.held.foreign
