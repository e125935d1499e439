"""Whether and with which pages a decode worker takes a request. Pure; protocol.md row D1.

What lives here: prefix hits, the local-or-not decision, the reservation. What does not: sessions, pages of
another size (`decode_worker.spread`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from decode_worker.spread import Spread
from kvtransfer.digest import DIGEST_BYTES
from kvtransfer.plan import Origin, bridged, same
from kvtransfer.session.guard import RoleContext, cache_salt, sampling_room
from pdserve.errors import Incompatible
from pdserve.kvcache.allocator import Holder, HolderKind, PageState
from pdserve.kvcache.manager import PageManager
from pdserve.kvcache.prefix import content_keys, page_keys, tail_key
from pdserve.messages import Announce, Refusal, Refused, Reserve
from pdserve.types import HandoverMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Pages held for one request, hits first, then empty ones for the prompt, then growth.

    num_pages: pages of the prompt (with its tail). full_keys: content keys of the full prompt pages; keys
    has the tail's too, if there is one. verified: indices beyond the hits that a lower key of this request
    had verified. In local mode no pages are held, unless some were taken over: the scheduler takes them.
    origin: what pages of the prefill worker are; source_keys: the content keys of the prompt in those.
    foreign: that worker's numerics are not ours, so nothing that builds on its pages has our content keys.
    """

    mode: HandoverMode
    pages: tuple[int, ...]
    num_pages: int
    hit_pages: int
    full_keys: tuple[bytes, ...]
    keys: tuple[bytes, ...]
    salt: bytes
    rows: int
    page_size: int
    origin: Origin
    source_keys: tuple[bytes, ...]
    verified: frozenset[int] = frozenset()
    foreign: bool = False

    @property
    def spread(self) -> Spread:
        """The prompt in pages of the prefill worker and in ours."""
        return Spread(
            origin=self.origin, rows=self.rows, page_size=self.page_size, hit_pages=self.hit_pages,
            verified=self.verified,
        )  # fmt: skip

    @property
    def known_rows(self) -> int:
        """Prompt rows that need not be computed: hits and what is verified right after them."""
        count = self.hit_pages
        while count in self.verified:
            count += 1
        return min(count * self.page_size, self.rows)

    def expects(self, announce: Announce) -> bool:
        """Whether the announced page is the one our own token ids ask for, with the right number of rows."""
        keys, size = self.source_keys, self.origin.page_size
        if announce.index >= len(keys) or keys[announce.index] != announce.content_key:
            return False
        if len(announce.digest) != DIGEST_BYTES * self.origin.num_ranks:
            return False
        return announce.valid_rows == min(size, self.rows - announce.index * size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What the lower key of a request leaves to a higher one that takes over: its pages by index, without
    prefix hits and without those that a read may still write. verified: content keys of the proven ones."""

    holder: Holder
    pages: dict[int, int]
    verified: dict[int, bytes]

    def usable(self, pages: PageManager, first: int) -> dict[int, int]:
        """Those from index `first` on that may be written."""
        good = (PageState.RESERVED, PageState.FILLING)
        return {i: page for i, page in self.pages.items() if i >= first and pages.state(page) in good}


def reserve(
    ctx: RoleContext, pages: PageManager, call: Reserve, seq_id: str, kept: Kept | None = None
) -> Reservation | Refused:
    """Takes prefix hits and empty pages for a request, or says why not; nothing is changed then.

    Reserves the prompt and `growth_tokens` of completion, and leaves the prefill floor free. kept: pages to
    take over from a lower key of the same request; they pass to the new holder.
    """
    try:
        origin = _origin(ctx, call)
    except Incompatible as problem:
        return _refuse(call, Refusal.INCOMPATIBLE, problem.message)
    num_tokens = len(call.token_ids)
    longest = _longest(ctx, call)
    if num_tokens > ctx.max_context or ctx.num_pages(longest) > pages.num_usable:
        # With a retry hint where only quarantine stands against it: another worker may have the pages.
        elsewhere = num_tokens <= ctx.max_context and ctx.num_pages(longest) <= pages.num_pages
        detail = "prompt and max_tokens do not fit this worker's page pool"
        return _refuse(call, Refusal.NEVER_FITS, detail, retry_after_s=0.1 if elsewhere else 0.0)
    salt = cache_salt(call.tenant, call.cache_salt)
    full = content_keys(call.token_ids, ctx.page_size, salt=salt, model=ctx.model, numerics=ctx.numerics)
    holder = Holder(HolderKind.REQUEST, seq_id)
    usable = full[: (num_tokens - 1) // ctx.page_size] if call.use_prefix_cache else ()
    total = ctx.num_pages(min(longest, num_tokens + ctx.growth_tokens))
    home = _home(ctx, pages, usable, total, kept)
    hits = pages.match_and_hold(usable, holder, home)
    keys = _with_tail(ctx, call, full, salt)
    made = Reservation(
        mode=HandoverMode.DISAGGREGATED, pages=hits, num_pages=ctx.num_pages(num_tokens), hit_pages=len(hits),
        full_keys=full, keys=keys, salt=salt, rows=num_tokens, page_size=ctx.page_size, origin=origin,
        source_keys=_source_keys(ctx, call, origin, keys, salt), foreign=_numerics(ctx, call) != ctx.numerics,
    )  # fmt: skip
    old = kept.usable(pages, len(hits)) if kept is not None else {}
    if kept is not None:
        good = frozenset(i for i in old if made.keys[i : i + 1] == (kept.verified.get(i),))
        made = replace(made, verified=good)
    made = replace(made, mode=_mode(ctx, call, num_tokens - made.known_rows))
    if made.mode is HandoverMode.LOCAL and not old:
        # The scheduler finds the hits again when the sequence's turn comes; until then it holds nothing.
        pages.drop_all(holder)
        return replace(made, pages=(), hit_pages=0)
    table = _fill_up(ctx, pages, holder, home, hits=hits, old=old, total=total)
    if table is None:
        pages.drop_all(holder)
        return _refuse(call, Refusal.FULL, "no pages are free", retry_after_s=0.1)
    for page in set(old.values()) & set(table):
        assert kept is not None
        pages.hold(page, holder)
        pages.drop(page, kept.holder)
    return replace(made, pages=table)


def _longest(ctx: RoleContext, call: Reserve) -> int:
    num_prompt = len(call.token_ids) - call.num_forced
    return num_prompt + sampling_room(num_prompt, call.sampling, ctx.max_context)


def longest_pages(ctx: RoleContext, call: Reserve) -> int:
    """Pages that a request takes at its longest."""
    return ctx.num_pages(_longest(ctx, call))


def _fill_up(
    ctx: RoleContext,
    pages: PageManager,
    holder: Holder,
    home: int | None,
    *,
    hits: tuple[int, ...],
    old: dict[int, int],
    total: int,
) -> tuple[int, ...] | None:
    """A block table of `total` pages: hits, old ones where they are, fresh ones elsewhere. None: pages lack.

    The floor is for prompts that would wait behind reservations; what could then never be reserved, not even
    in an empty pool, may have all of it.
    """
    missing = [i for i in range(len(hits), total) if i not in old]
    keep_back = _floor(ctx, pages, total) if missing else 0
    fresh = pages.reserve(len(missing), holder, keep_back=keep_back, home=home)
    if fresh is None:
        return None
    found = old | dict(zip(missing, fresh, strict=True))
    return (*hits, *(found[i] for i in range(len(hits), total)))


def _floor(ctx: RoleContext, pages: PageManager, total: int) -> int:
    return min(ctx.floor_pages, max(0, pages.num_usable - total))


def _home(
    ctx: RoleContext, pages: PageManager, keys: tuple[bytes, ...], total: int, kept: Kept | None
) -> int | None:
    """Where all pages of the request will be: where those are that it takes over, or else the best choice;
    None where it fits nowhere."""
    old = kept.usable(pages, 0) if kept is not None else {}
    if old:
        return pages.homes.home(next(iter(old.values())))
    return pages.choose(keys, total, [_floor(ctx, pages, total)] * pages.homes.num_homes)


def _with_tail(ctx: RoleContext, call: Reserve, full: tuple[bytes, ...], salt: bytes) -> tuple[bytes, ...]:
    """The content keys of all prompt pages, with the tail's if there is one."""
    if len(call.token_ids) % ctx.page_size == 0:
        return full
    return (
        *full,
        tail_key(call.token_ids, ctx.page_size, salt=salt, model=ctx.model, numerics=ctx.numerics),
    )


def _origin(ctx: RoleContext, call: Reserve) -> Origin:
    """What pages the call's prefill worker has. Raises Incompatible."""
    peer = call.prefill
    if _numerics(ctx, call) != ctx.numerics and ctx.kv_mixing != "relaxed":
        raise Incompatible("prefill computes pages by other numerics; allow --kv-mixing relaxed, or be alike")
    if peer is None or peer.layout in ("", ctx.layout):
        return same(ctx.page_size, ctx.num_ranks)
    return bridged(peer.layout, ctx.layout)


def _source_keys(
    ctx: RoleContext, call: Reserve, origin: Origin, keys: tuple[bytes, ...], salt: bytes
) -> tuple[bytes, ...]:
    """The content keys that the prefill worker has to announce: of its page size and its numerics."""
    numerics = _numerics(ctx, call)
    if (origin.page_size, numerics) == (ctx.page_size, ctx.numerics):
        return keys
    return page_keys(call.token_ids, origin.page_size, salt=salt, model=ctx.model, numerics=numerics)


def _numerics(ctx: RoleContext, call: Reserve) -> str:
    """By which the call's prefill worker computes."""
    return (call.prefill.numerics if call.prefill is not None else "") or ctx.numerics


def _mode(ctx: RoleContext, call: Reserve, uncached: int) -> HandoverMode:
    """Conditional disaggregation: short uncached prompts are not worth the trip."""
    if call.mode is HandoverMode.LOCAL or call.prefill is None:
        return HandoverMode.LOCAL
    return HandoverMode.LOCAL if uncached < ctx.local_prefill_threshold else call.mode


def _refuse(call: Reserve, reason: Refusal, detail: str, *, retry_after_s: float = 0.0) -> Refused:
    return Refused(key=call.key, reason=reason, detail=detail, retry_after_s=retry_after_s)
