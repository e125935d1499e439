"""Whether and with which pages a decode worker takes a request. Pure; protocol.md row D1.

What lives here: prefix hits, the local-or-not decision, the reservation. What does not: sessions.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtransfer.session.guard import RoleContext, cache_salt, sampling_room
from pdserve.kvcache.allocator import Holder, HolderKind
from pdserve.kvcache.manager import PageManager
from pdserve.kvcache.prefix import content_keys, tail_key
from pdserve.messages import Announce, Refusal, Refused, Reserve
from pdserve.types import HandoverMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Pages held for one request, hits first, then empty ones for the prompt, then growth.

    num_pages: pages of the prompt (with its tail). full_keys: content keys of the full prompt pages; keys
    has the tail's too, if there is one. In local mode no pages are held: the scheduler takes them.
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

    def expects(self, announce: Announce) -> bool:
        """Whether the announced page is the one our own token ids ask for, with the right number of rows."""
        if announce.index >= len(self.keys) or self.keys[announce.index] != announce.content_key:
            return False
        return announce.valid_rows == min(self.page_size, self.rows - announce.index * self.page_size)


def reserve(ctx: RoleContext, pages: PageManager, call: Reserve, seq_id: str) -> Reservation | Refused:
    """Takes prefix hits and empty pages for a request, or says why not; nothing is held then.

    Reserves the prompt and `growth_tokens` of completion, and leaves the prefill floor free.
    """
    num_tokens = len(call.token_ids)
    num_prompt = num_tokens - call.num_forced
    longest = num_prompt + sampling_room(num_prompt, call.sampling, ctx.max_context)
    if num_tokens > ctx.max_context or ctx.num_pages(longest) > pages.num_pages:
        return _refuse(call, Refusal.NEVER_FITS, "prompt and max_tokens do not fit this worker's page pool")
    salt = cache_salt(call.tenant)
    full = content_keys(call.token_ids, ctx.page_size, salt=salt, model=ctx.model, numerics=ctx.numerics)
    holder = Holder(HolderKind.REQUEST, seq_id)
    usable = full[: (num_tokens - 1) // ctx.page_size] if call.use_prefix_cache else ()
    hits = pages.match_and_hold(usable, holder)
    mode = _mode(ctx, call, num_tokens - len(hits) * ctx.page_size)
    if mode is HandoverMode.LOCAL:
        # The scheduler finds the hits again when the sequence's turn comes; until then it holds nothing.
        pages.drop_all(holder)
        return _reservation(ctx, call, mode, pages=(), hit_pages=0, full=full, salt=salt)
    target = min(longest, num_tokens + ctx.growth_tokens)
    taken = pages.reserve(ctx.num_pages(target) - len(hits), holder, keep_back=ctx.floor_pages)
    if taken is None:
        pages.drop_all(holder)
        return _refuse(call, Refusal.FULL, "no pages are free", retry_after_s=0.1)
    return _reservation(ctx, call, mode, pages=(*hits, *taken), hit_pages=len(hits), full=full, salt=salt)


def _reservation(
    ctx: RoleContext, call: Reserve, mode: HandoverMode, *, pages: tuple[int, ...], hit_pages: int,
    full: tuple[bytes, ...], salt: bytes,
) -> Reservation:  # fmt: skip
    num_tokens = len(call.token_ids)
    keys = full
    if num_tokens % ctx.page_size:
        tail = tail_key(call.token_ids, ctx.page_size, salt=salt, model=ctx.model, numerics=ctx.numerics)
        keys = (*full, tail)
    return Reservation(
        mode=mode, pages=pages, num_pages=ctx.num_pages(num_tokens), hit_pages=hit_pages, full_keys=full,
        keys=keys, salt=salt, rows=num_tokens, page_size=ctx.page_size,
    )  # fmt: skip


def _mode(ctx: RoleContext, call: Reserve, uncached: int) -> HandoverMode:
    """Conditional disaggregation: short uncached prompts are not worth the trip."""
    if call.mode is HandoverMode.LOCAL or call.prefill is None:
        return HandoverMode.LOCAL
    return HandoverMode.LOCAL if uncached < ctx.local_prefill_threshold else call.mode


def _refuse(call: Reserve, reason: Refusal, detail: str, *, retry_after_s: float = 0.0) -> Refused:
    return Refused(key=call.key, reason=reason, detail=detail, retry_after_s=retry_after_s)
