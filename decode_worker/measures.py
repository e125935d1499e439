"""What a decode worker measures of its requests, as effects, when it is known. Pure."""

from __future__ import annotations

from decode_worker.entry import Entry
from kvtransfer.effects import Effect, Measure
from kvtransfer.measures import prompt_computed, prompt_tokens
from pdserve.obs.catalogue import worker as metrics
from pdserve.types import HandoverMode

NO_PAGE = "none"
"""The transport of a transfer that ended before any page was read."""


def accepted(entry: Entry) -> list[Effect]:
    """A request was taken; the prefix hits of one that is to be handed over are known and held."""
    held = entry.held
    entry.transferring = held.mode is HandoverMode.DISAGGREGATED
    return prompt_tokens("prefix_hit", held.hit_pages * held.page_size) if entry.transferring else []


def started(entry: Entry, hit_tokens: int) -> list[Effect]:
    """The scheduler starts to compute its prompt here, or again after it lost its pages."""
    first = entry.computing.local and entry.emitted_at is None and not entry.computing.first_hits
    return prompt_tokens("prefix_hit", hit_tokens) if first else []


def computed(entry: Entry) -> list[Effect]:
    """Its prompt was computed here."""
    if entry.emitted_at is not None:
        return []  # again, after it had lost its pages
    return prompt_computed(entry.compute)


def sampled(entry: Entry) -> list[Effect]:
    """A step made a token of it: the first one after the hand-over tells how long it had waited for that."""
    if entry.queue_measured or entry.first_step is None or entry.emitted_at is None:
        return []
    entry.queue_measured = True
    return [Measure(metric=metrics.DECODE_QUEUE, value=max(0.0, entry.first_step[0] - entry.emitted_at))]


def transferred(entry: Entry, outcome: str) -> list[Effect]:
    """Its transfer is over, if there was one."""
    if not entry.transferring:
        return []
    entry.transferring = False
    way, pages = entry.path or NO_PAGE, entry.pages
    out: list[Effect] = [Measure(metric=metrics.TRANSFERS, labels=(way, outcome))]
    if outcome == "cancelled":
        return out
    known = entry.spread.known_pages(entry.session.verified_prefix) * entry.held.page_size
    rows = min(known, entry.held.rows) - entry.held.known_rows
    out += prompt_tokens("transferred", rows)
    if outcome == "complete" and pages.verified_at is not None:
        seconds = max(0.0, pages.verified_at - entry.announced_at)
        out.append(Measure(metric=metrics.TRANSFER, value=seconds, labels=(way,)))
        out.append(Measure(metric=metrics.VERIFY, value=pages.verify_s))
    return out


def read_again(entry: Entry, index: int) -> list[Effect]:
    """A page is read; it may have been before, and that read failed or what it brought was changed."""
    page = entry.session.pages.get(index)
    if page is None or page.reads <= 1:
        return []
    entry.resent += 1
    return [Measure(metric=metrics.RESENT_PAGES)]
