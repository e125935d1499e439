"""Stages of a panel story in which peers are wrong: strangers, bytes that change, reads that do not end.

What does not live here: stages that only hold or lose requests (`panels_held`), and comparing
(`panels_seen`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import grpc
import pytest

from pdserve.messages import Refusal, Refused
from pdserve.rpc import convert
from pdserve.rpc.fleet_auth import authenticated
from pdserve.rpc.v1 import decode_pb2 as decode
from pdserve.rpc.v1 import prefill_pb2 as prefill
from pdserve.rpc.v1.decode_pb2_grpc import DecodeServiceStub
from pdserve.rpc.v1.prefill_pb2_grpc import PrefillServiceStub
from pdserve.types import Role
from tests.support.direct import Direct, generate
from tests.support.panel_story import LONG, SMALL, Story
from tests.support.panels_seen import HOUR_S
from tests.support.processes import ForeignPool
from tests.support.prometheus import LIMIT_S
from tests.support.stack import channel_to
from tests.support.watched import PAGE

SCRAPE = 0.04
"""How far a count over half a minute may be off where several processes have it, looked at one by one."""
TIMES, LEASE_S = 60, 1.5
"""How fast the clock of a worker runs whose minutes must pass soon; its lease, by the clock on the wall: less
than it takes such a worker to look at it would be its end."""
AHEAD_S = 60.0
"""Until when that clock is behind the others': tickets by theirs have not expired."""


def _direct(story: Story, decoder: str) -> Direct:
    """The fleet's prefill worker and one of its decode workers, to be called as a router calls them."""
    records = {
        Role.PREFILL: story.worker("prefill-0").record,
        Role.DECODE: story.worker(decoder).record,
    }
    nobody = cast(Any, None)
    return Direct(
        secret=bytes.fromhex(story.fleet.stack.secret), prefill=nobody, decode=nobody, records=records
    )


def strangers_are_sent_away(story: Story) -> None:
    """Calls with tickets that nobody gave, and for workers that are no more.

    How often the router asked a full decode worker before is a matter of time, and not looked at.
    """
    direct, seen = _direct(story, "decode-0"), story.seen
    asks = [direct.ask(tuple(story.fleet.prompt(LONG))) for _ in range(2)]
    key, forged = convert.key_to_pb(asks[0].key), b"forged" * 20
    with channel_to(direct.p.control) as to_prefill, channel_to(direct.d.control) as to_decode:
        first = authenticated(PrefillServiceStub(to_prefill), direct.secret)
        then = authenticated(DecodeServiceStub(to_decode), direct.secret)
        half = convert.prefill_to_pb(replace(asks[0].prefill_message(), ticket=forged))
        answers: list[object] = [convert.prefill_result_from_pb(first.Prefill(half, timeout=LIMIT_S))]
        for ask in asks:
            reserve = convert.reserve_to_pb(replace(ask.reserve_message(), ticket=forged))
            answers += map(convert.decode_event_from_pb, then.Reserve(reserve, timeout=LIMIT_S))
        assert [refusal(answer) for answer in answers] == [Refusal.BAD_TICKET] * 3
        for _ in range(2):
            with pytest.raises(grpc.RpcError, match="restarted"):
                first.CancelPrefill(prefill.CancelPrefillRequest(key=key, receiver_incarnation=1))
        with pytest.raises(grpc.RpcError, match="restarted"):
            then.CancelDecode(decode.CancelDecodeRequest(key=key, receiver_incarnation=1))
    refusals = {"decode bad_ticket": (1.9, 2.1), "prefill bad_ticket": (0.95, 1.05)}
    seen.between("decode/Refusals", {**refusals, "prefill full": (0.0, 0.0)}, scale=HOUR_S)
    seen.counts("transfer/Fenced messages", {"prefill": 2, "decode": 1}, close=SCRAPE)


def refusal(answer: object) -> Refusal:
    """Why it was refused."""
    assert isinstance(answer, Refused), answer
    return answer.reason


def words_for_nobody(story: Story) -> None:
    """A worker had made all of an answer before its first token got to the router, which stops there."""
    fleet, made = story.fleet, 40
    prompt = fleet.prompt(SMALL)
    with fleet.client() as client:
        whole = fleet.start(client, 0, made, prompt).result()
        fleet.arm("return=stall:1*1")
        cut = fleet.start(client, 0, made, prompt, stop=[whole.text[:3]]).result()
    fleet.arm("")
    story.finished += [whole, cut]
    wasted = made - cut.usage.completion_tokens
    assert (cut.text, wasted > made // 2) == ("", True), (whole, cut)
    want = {"after a stop text": (wasted - 0.01, wasted + 0.01)}
    story.seen.between("requests/Tokens for nobody", want, scale=HOUR_S)


def a_page_changes(story: Story) -> None:
    """One byte of an announced page flips in prefill's memory, before decode reads it: it is computed."""
    _changed(story, "wire=stall:2*1", lambda pool, page: None)
    assert story.ledgers[-1].decode_computed_prompt_tokens > 0
    assert story.ledgers[-1].transfer.resent_pages == 0
    story.seen.shows("transfer/Digest failures", {"in an hour": 1}, close=0.2)


def a_page_changes_on_the_way(story: Story) -> None:
    """The same with a byte that is right again when prefill looks: the page moves once more."""
    here = ForeignPool(story.fleet.stack.workers["decode-0"].pid)

    def arrived(pool: ForeignPool, page: int) -> None:
        bad, end = pool.read(page), time.monotonic() + LIMIT_S
        while not here.find(bad):
            assert time.monotonic() < end, "the page never came"
        pool.flip(page, 100)

    _changed(story, "wire=stall:2*1; verify=stall:1.5*1", arrived)
    assert story.ledgers[-1].decode_computed_prompt_tokens == 0
    assert story.ledgers[-1].transfer.resent_pages == 1
    every = sum(each.transfer.resent_pages for each in story.ledgers)
    story.seen.counts("transfer/Pages sent again", {"pages": every})
    story.seen.shows("transfer/Digest failures", {"in an hour": 2}, close=0.2)


def _changed(story: Story, faults: str, after: Callable[[ForeignPool, int], None]) -> None:
    """A request one of whose pages changes after it was announced. after: what then happens to the page."""
    fleet = story.fleet
    pool = ForeignPool(fleet.stack.workers["prefill-0"].pid)
    fleet.stack.until(lambda status: not any(w.load.transfer_pages for w in status.workers))
    before = [pool.read(page) for page in range(pool.num_pages)]
    fleet.arm(faults)
    with fleet.client() as client:
        stream = fleet.start(client, LONG, 2)
        fleet.stack.until(lambda status: any(w.load.transfer_pages > LONG // PAGE for w in status.workers))
        page = next(page for page in range(pool.num_pages) if pool.read(page) != before[page])
        pool.flip(page, 100)
        after(pool, page)
        story.finished.append(stream.result())
    fleet.arm("")


def a_read_does_not_end(story: Story) -> None:
    """A decode worker by whose clock a read takes longer than two leases, and a minute goes by after that.

    Meanwhile another starts, for the stage in which workers come and go.
    """
    fleet, seen, stack = story.fleet, story.seen, story.fleet.stack
    behind = -(TIMES - 1) * (time.monotonic() + AHEAD_S)
    fleet.arm(f"clock_offset=set:{behind:.3f}; clock_rate=set:{TIMES - 1}")
    stack.launch("decode-2", Role.DECODE, lease_s=LEASE_S * TIMES)
    stack.wait_started("decode-2")
    stack.until(lambda status: len(status.workers) == 3)
    fleet.prometheus.until_all_up(4)
    fleet.arm(f"wire=stall:{3 * LEASE_S}*1")
    stack.launch("decode-1", Role.DECODE)
    direct = _direct(story, "decode-2")
    asyncio.run(generate(direct.ask(tuple(fleet.prompt(PAGE)), deadline_s=60.0 * TIMES)))
    fleet.arm("")
    seen.shows("memory/Quarantined pages", {"decode": 1, "prefill": 0})
    seen.shows("memory/Old pages", {"decode decode-2 quarantined": 1, "decode decode-0 quarantined": 0})
    stack.kill("decode-2")
