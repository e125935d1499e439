"""Decode's patience with a prefill worker that lives but never says the rest (protocol.md §9, D6)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvtransfer.digest import digest_of_digests
from kvtransfer.session import decode_events as ev
from kvtransfer.session.decode import DecodeSession
from kvtransfer.session.guard import finish_record
from kvtransfer.transport import ReadStatus
from pdserve.messages import Abort, Announce, Commit, Finish
from pdserve.types import HandoverMode, Key, PageName

KEY = Key(request_id="r")
L = 10.0
ACCEPTED = ev.Accepted(
    mode=HandoverMode.DISAGGREGATED, num_pages=2, hit_pages=0, ticket=b"t", deadline_at=100.0, num_forced=0,
    max_tokens=50,
)  # fmt: skip


def announce(index: int) -> Announce:
    return Announce(
        key=KEY, index=index, page=PageName(pool_id=7, page=index, generation=1), valid_rows=16,
        content_key=b"k" * 16, digest=bytes([index]) * 16,
    )  # fmt: skip


def read(index: int) -> ev.ReadEnded:
    return ev.ReadEnded(index=index, status=ReadStatus.GOOD, digest=bytes([index]) * 16)


def finish() -> Finish:
    made = Finish(
        key=KEY, index=0, token_id=42, next_counter=1, finish=None, num_announced=2, digest_of_digests=b""
    )
    value = digest_of_digests([(i, bytes([i]) * 16) for i in range(2)], finish_record(made))
    return replace(made, digest_of_digests=value)


def session(*events: Any) -> DecodeSession:
    made = DecodeSession(key=KEY, lease_s=L)
    for event in (ACCEPTED, *events):
        made.step(event, 0.0)
    return made


def sent(effects: list[Any], kind: type) -> list[Any]:
    return [e.message for e in effects if isinstance(e, ev.DSend) and isinstance(e.message, kind)]


def has(effects: list[Any], kind: type) -> bool:
    return any(isinstance(e, kind) for e in effects)


@pytest.mark.parametrize(
    "events",
    [(announce(0), read(0), finish()), (announce(0), read(0), announce(1), read(1))],
    ids=["a-page", "the-first-token"],
)
def test_what_is_still_missing_one_lease_after_prefill_was_done_never_comes(events: tuple[Any, ...]) -> None:
    """Prefill lives, and renews: without this the request would stand still until its deadline."""
    made = session(*events)
    made.step(ev.PeerSeen(), 0.9 * L)
    assert not has(made.step(ev.Tick(), 0.99 * L), ev.DRunLocal)
    assert made.next_timer() <= L
    effects = made.step(ev.Tick(), L)
    assert len(sent(effects, Abort)) == 1
    assert has(effects, ev.DRunLocal)


def test_while_prefill_computes_there_is_no_such_limit() -> None:
    made = session(announce(0), read(0))
    for step in range(1, 8):
        made.step(ev.PeerSeen(), step * L / 2)
        assert not has(made.step(ev.Tick(), step * L / 2), ev.DRunLocal)


def test_a_page_that_is_being_read_is_waited_for() -> None:
    made = session(announce(0), read(0), finish(), announce(1))
    made.step(ev.PeerSeen(), 0.9 * L)
    made.step(ev.Tick(), L)
    assert made.pulling
    assert len(sent(made.step(read(1), 1.1 * L), Commit)) == 1
