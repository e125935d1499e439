"""What each planted defect does to the product: functions that make the broken code of the code as it is.

Which of them make up a defect, and who must catch it: `defects`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from decode_worker.loop import DecodeRole
from decode_worker.pulls import Pulls
from kvtransfer.session import decode as decode_table
from kvtransfer.session import guard
from kvtransfer.session.decode import DecodeSession, DState
from kvtransfer.session.decode_events import DRelease
from kvtransfer.session.prefill import PrefillSession
from kvtransfer.session.prefill_events import PDrop
from pdserve.errors import PermissionRefused
from pdserve.kvcache.allocator import Holder, HolderKind, PageAllocator
from pdserve.kvcache.manager import PageManager
from pdserve.messages import Abort, Announce, Finish
from pdserve.sched.admission import Admission
from pdserve.types import Key
from router import events as ev
from tests.simulation.planted import Make


def nothing(value: Any = None) -> Make:
    """The call does nothing and returns this."""
    return lambda original: lambda *args, **kwargs: value


# ---- pages -------------------------------------------------------------------------------------------


def deaf_to_renewals(original: Any) -> Any:
    def renew(self: DecodeRole, now: float) -> Any:
        original(self, now)
        return []

    return renew


def grant_once(original: Any) -> Any:
    def grant(self: DecodeSession, now: float) -> Any:
        effects = original(self, now)
        self.granted_again_at = float("inf")
        return effects

    return grant


def drop_again(original: Any) -> Any:
    def drop(self: PrefillSession, index: int) -> Any:
        page = self.pages[index]
        again = [PDrop(index=index, page=page.sealed.page)] if page.acked else []
        return original(self, index) or again

    return drop


def cancel_without_pins(original: Any) -> Any:
    def cancel(self: Pulls, entry: Any) -> Any:
        effects = original(self, entry)
        for read_id, read in self._reads.items():
            if read.entry is entry:
                self._pages.drop(read.page, Holder(HolderKind.IO, f"read:{read_id}"))
        return effects

    return cancel


def release_while_reading(original: Any) -> Any:
    def maybe_release(self: DecodeSession) -> Any:
        if self.state is not DState.CLOSING or self.computing:
            return []
        self.state = DState.DONE
        return [DRelease(outcome=self.outcome)]

    return maybe_release


def release_while_computing(original: Any) -> Any:
    def maybe_release(self: DecodeSession) -> Any:
        self.computing = False
        return original(self)

    return maybe_release


def counted_release(original: Any) -> Any:
    def drop(self: PageAllocator, page: int, holder: Holder) -> None:
        held = self._holders[page]
        owners = [h for h in held if h.kind in (HolderKind.REQUEST, HolderKind.TRANSFER)]
        original(self, page, holder if holder in held or not owners else owners[0])

    return drop


def pinned_hits_count(original: Any) -> Any:
    return lambda self, page: None


def publish_at_once(original: Any) -> Any:
    def start(self: Pulls, entry: Any, announce: Any, now: float) -> Any:
        effects = original(self, entry, announce, now)
        held, index = entry.held, announce.index
        if index < len(held.full_keys) and held.expects(announce):
            self._pages.seal(held.pages[index], held.page_size)
            parent = held.full_keys[index - 1] if index else None
            self._pages.publish(held.pages[index], held.full_keys[index], parent)
        return effects

    return start


def seal_twice(original: Any) -> Any:
    def seal(self: PageManager, page: int, valid_rows: int) -> None:
        if self.state(page) != "sealed":
            original(self, page, valid_rows)

    return seal


# ---- authority ---------------------------------------------------------------------------------------


def blind_to_incarnations(original: Any) -> Any:
    def check(ctx: Any, call: Any, now: float) -> Any:
        own = replace(call, receiver_incarnation=ctx.incarnation)
        facts = guard.ticket._open(ctx.secret, call.ticket)
        named = facts.decode_incarnation if hasattr(call, "mode") else facts.prefill_incarnation
        return original(replace(ctx, incarnation=named), replace(own, receiver_incarnation=named), now)

    return check


def cancel_any_epoch(original: Any) -> Any:
    def cancel(self: Any, key: Key, now: float) -> Any:
        entry = self._live.get(key.request_id)
        newest = entry.session.key if entry is not None else key
        return original(self, max(key, newest), now)

    return cancel


def expired_is_fine(original: Any) -> Any:
    def verify(secret: bytes, ticket: bytes, **wanted: Any) -> Any:
        try:
            return original(secret, ticket, **wanted)
        except PermissionRefused:
            facts = original(secret, ticket, **{**wanted, "now": 0.0})
            return replace(facts, prefill_expires=1e9, decode_expires=1e9)

    return verify


def sample_again(original: Any) -> Any:
    def assigned(state: Any, event: Any) -> Any:
        return [
            replace(effect, token_ids=state.prompt, num_forced=0)
            if isinstance(effect, ev.SendReserve | ev.SendPrefill) else effect
            for effect in original(state, event)
        ]  # fmt: skip

    return lambda state, event: assigned(state, event)


# ---- transfer ----------------------------------------------------------------------------------------


def credit_adds_up(original: Any) -> Any:
    def on_grant(self: PrefillSession, event: Any, now: float) -> Any:
        if self.live:
            event = replace(event, credit=self.credit + event.credit)
        return original(self, event, now)

    return on_grant


def endless_patience(original: Any) -> Any:
    def on_tick(self: DecodeSession, now: float) -> Any:
        self.settle_until = float("inf")
        return original(self, now)

    return on_tick


def another_digest(original: Any) -> Any:
    def repeat(self: PrefillSession, now: float) -> Any:
        return [
            replace(e, message=replace(e.message, digest=bytes(16))) if isinstance(_said(e), Announce) else e
            for e in original(self, now)
        ]

    return repeat


def _said(effect: Any) -> Any:
    return getattr(effect, "message", None)


def finish_only_once(original: Any) -> Any:
    def repeat(self: PrefillSession, now: float) -> Any:
        effects = original(self, now)
        return [e for e in effects if not isinstance(_said(e), Finish)]

    return repeat


def announce_only_once(original: Any) -> Any:
    def repeat(self: PrefillSession, now: float) -> Any:
        effects = original(self, now)
        return [e for e in effects if isinstance(_said(e), Finish | Abort)]

    return repeat


def hits_in_the_sum(original: Any) -> Any:
    def maybe_run(self: DecodeSession) -> Any:
        plain = decode_table.digest_of_digests

        def with_hits(seen: Any, *rest: Any) -> Any:
            return plain([*((i, bytes(16)) for i in range(self.hit_pages)), *seen], *rest)

        decode_table.digest_of_digests = with_hits  # type: ignore[attr-defined]
        try:
            return original(self)
        finally:
            decode_table.digest_of_digests = plain  # type: ignore[attr-defined]

    return maybe_run


def any_digest_again(original: Any) -> Any:
    def on_announce(self: DecodeSession, event: Any, now: float) -> Any:
        page = self.pages.get(event.index)
        if page is not None and not page.verified:
            page.announce = replace(page.announce, digest=event.digest)
        return original(self, event, now)

    return on_announce


# ---- scheduling --------------------------------------------------------------------------------------


def oldest_goes(original: Any) -> Any:
    def grow_one(self: Admission, seq: Any) -> None:
        while not self._binder.grow(seq):
            others = [s for s in self._roster.by_age() if s is not seq]
            if not others:
                return
            self._preempt(others[0])

    return grow_one


def no_floor(original: Any) -> Any:
    return lambda ctx, *args, **named: original(replace(ctx, floor_pages=0), *args, **named)


def known_in_part(original: Any) -> Any:
    """A page of ours counts when some of its rows are there."""

    def known_pages(self: Any, verified: int) -> int:
        rows = min(verified * self.origin.page_size, self.rows)
        return max(original(self, verified), -(-rows // self.page_size))

    return known_pages


def one_pin(original: Any) -> Any:
    """A page that goes to several of ours pins the first of them."""

    def start(self: Any, entry: Any, announce: Any, part: int, peer: Any, pages: Any, *rest: Any) -> Any:
        return original(self, entry, announce, part, peer, pages[:1], *rest)

    return start


def one_short(original: Any) -> Any:
    def ended(self: Any, event: Any) -> Any:
        last = original(self, event)
        return last or (self.failed or event if len(self.moving) == 1 and not self.verified else None)

    return ended
