"""Exchange streams between workers when they break, when a peer is replaced, and when messages make no sense.

One side is a real worker with a tiny model, the other is the test, over real gRPC and a real data plane.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvtransfer.session.guard import cache_salt
from pdserve.kvcache.prefix import content_keys
from pdserve.messages import Announce, Envelope, Grant, Renew, Reserved
from pdserve.rpc import convert
from pdserve.rpc.v1 import transfer_pb2, transfer_pb2_grpc
from pdserve.types import PageName, Role, SamplingParams
from tests.support import direct as dx
from tests.support.fake_prefill import FakePrefill
from tests.support.storm import make_model, prompt

LEASE_S = 60.0
"""Longer than any test waits: what is lost is not repeated by a timer before the test gives up."""


@pytest.fixture(scope="module")
def direct(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dx.Direct]:
    model = str(make_model(tmp_path_factory.mktemp("tiny")))
    made = dx.Direct.start(model=model, transports=("tcp",), lease_s=LEASE_S, threads=1, num_pages=400)
    yield made
    made.stop()


async def granted(direct: dx.Direct, peer: FakePrefill, seed: int, tokens: int = 40) -> dx.Reserving:
    """A request that is taken and waits for this prefill worker."""
    call = dx.reserve(pulling(direct, peer, seed, tokens))
    assert isinstance(await call.next(), Reserved)
    return call


def pulling(direct: dx.Direct, peer: FakePrefill, seed: int, tokens: int = 40) -> dx.Ask:
    record = replace(direct.records[Role.PREFILL], peer=peer.ref)
    fleet = replace(direct, records={**direct.records, Role.PREFILL: record})
    return fleet.ask(tuple(prompt(seed, tokens)), sampling=SamplingParams(max_tokens=4, ignore_eos=True))


def announce(direct: dx.Direct, call: dx.Reserving, seed: int, tokens: int = 40) -> Announce:
    """The announce of a request's first page, as its prefill worker would send it."""
    engine = direct.decode._engine
    assert engine is not None
    ctx = engine.parts.context
    facts: dict[str, Any] = {"salt": cache_salt(dx.TENANT), "model": ctx.model, "numerics": ctx.numerics}
    keys = content_keys(tuple(prompt(seed, tokens)), ctx.page_size, **facts)
    return Announce(
        key=call.key, index=0, page=PageName(pool_id=5, page=1, generation=1), valid_rows=ctx.page_size,
        content_key=keys[0], digest=bytes(16),
    )  # fmt: skip


def counter(state: Any, name: str) -> int:
    return int(state.counters.get(name, 0))


class TestLinks:
    """The decode worker's side."""

    async def test_after_a_reconnect_the_old_stream_takes_no_message(self, direct: dx.Direct) -> None:
        async with FakePrefill() as peer:
            first = await granted(direct, peer, 1)
            old = await peer.stream()
            assert (await old.next(Grant)).key == first.key
            for seed in (2, 3):
                old.break_off()
                new = await peer.stream()
                call = await granted(direct, peer, seed)
                assert (await new.next(Grant)).key == call.key, "the new stream has it, at once"
                assert old.received.empty()
                await call.close()
                old = new
            await first.close()
        await dx.until(direct, direct.d, lambda s: s.idle)

    async def test_an_envelope_that_can_not_be_read_is_counted_and_takes_nothing_along(
        self, direct: dx.Direct
    ) -> None:
        async with FakePrefill() as peer:
            call = await granted(direct, peer, 4)
            stream = await peer.stream()
            grant = await stream.next(Grant)
            who = transfer_pb2.Envelope(sender=stream.sender[0], sender_incarnation=stream.sender[1])
            good = convert.envelope_to_pb(stream._wrap(announce_wrong(grant)))
            stream.send_raw(transfer_pb2.Envelope(), good, who)
            await dx.until(direct, direct.d, lambda s: counter(s, "unreadable_envelopes") >= 2)
            await dx.until(direct, direct.d, lambda s: counter(s, "wrong_content_key") >= 1)
            assert peer.num_streams == 1, "the stream went on"
            ended = await call.finish()
            assert ended.finish is not None, "decode went on alone"
            await call.close()
        await dx.until(direct, direct.d, lambda s: s.idle)

    async def test_the_reader_of_a_replaced_peer_is_closed(self, direct: dx.Direct) -> None:
        async with Door() as door, FakePrefill("same", tcp=door.endpoint) as old:
            first = await granted(direct, old, 5)
            stream = await old.stream()
            await stream.next(Grant)
            stream.send(announce(direct, first, 5))
            await asyncio.wait_for(door.opened.wait(), 20)
            async with Door() as other, FakePrefill("same", tcp=other.endpoint) as new:
                second = await granted(direct, new, 6)
                stream = await new.stream()
                await stream.next(Grant)
                stream.send(announce(direct, second, 6))
                await asyncio.wait_for(other.opened.wait(), 20)
                await asyncio.wait_for(
                    door.closed.wait(), 5
                )  # well before the reader would give up by itself
                assert not other.closed.is_set()
                await first.close()
                await second.close()
        await dx.until(direct, direct.d, lambda s: s.idle)


def announce_wrong(grant: Grant) -> Announce:
    """An announce of somebody else's page: well formed, and refused by its content key."""
    return Announce(
        key=grant.key, index=grant.want[0], page=PageName(pool_id=5, page=1, generation=1), valid_rows=16,
        content_key=bytes(16), digest=bytes(16),
    )  # fmt: skip


class Door:
    """A page server that lets readers in and never answers."""

    def __init__(self) -> None:
        self.opened, self.closed = asyncio.Event(), asyncio.Event()

    async def __aenter__(self) -> Door:
        self._server = await asyncio.start_server(self._meet, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.endpoint = f"{host}:{port}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened.set()
        while await reader.read(4096):
            continue
        self.closed.set()
        writer.close()


class TestExchange:
    """The prefill worker's side; the test dials."""

    async def test_an_envelope_that_can_not_be_read_is_counted_and_takes_nothing_along(
        self, direct: dx.Direct
    ) -> None:
        channel = dx.open_channel(direct.p.control)
        stub = dx.authenticated(transfer_pb2_grpc.TransferServiceStub(channel), direct.secret)
        call = stub.Exchange()
        await call.write(
            transfer_pb2.ExchangeRequest(envelopes=[wrapped(direct, Renew(keys=(), answer=True))])
        )
        question = wrapped(direct, Renew(keys=()))
        broken = transfer_pb2.Envelope(sender="d", sender_incarnation=9)
        await call.write(transfer_pb2.ExchangeRequest(envelopes=[broken, question]))
        response = await asyncio.wait_for(call.read(), 20)
        (answer,) = (convert.envelope_from_pb(each).message for each in response.envelopes)
        assert answer == Renew(keys=(), answer=True)
        await dx.until(direct, direct.p, lambda s: counter(s, "unreadable_envelopes") == 1)
        call.cancel()
        await channel.close(None)

    async def test_a_stream_that_does_not_say_who_it_is_ends_with_an_error(self, direct: dx.Direct) -> None:
        channel = dx.open_channel(direct.p.control)
        stub = dx.authenticated(transfer_pb2_grpc.TransferServiceStub(channel), direct.secret)
        call = stub.Exchange()
        await call.write(transfer_pb2.ExchangeRequest(envelopes=[transfer_pb2.Envelope()]))
        assert (await asyncio.wait_for(call.code(), 20)).name == "INVALID_ARGUMENT"
        await channel.close(None)


def wrapped(direct: dx.Direct, message: Renew) -> transfer_pb2.Envelope:
    return convert.envelope_to_pb(
        Envelope(sender="d", sender_incarnation=9, receiver_incarnation=direct.p.incarnation, message=message)
    )


async def test_the_pool_adds_up_at_every_moment_of_a_transfer(direct: dx.Direct) -> None:
    """The proof takes the lock that page servers pin under: it never sees half a change."""
    asks = [direct.ask(tuple(prompt(100 + n, 300)), use_prefix_cache=n % 2 == 0) for n in range(12)]
    running = [asyncio.ensure_future(dx.generate(ask)) for ask in asks]
    looks = 0

    def sound(state: Any) -> bool:
        nonlocal looks
        looks += 1
        assert not state.integrity_problem
        return all(task.done() for task in running)

    await asyncio.gather(*(dx.until(direct, peer, sound, 60.0) for peer in (direct.p, direct.d)))
    assert looks > 20
    assert {len(tokens) for tokens, _ in await asyncio.gather(*running)} == {8}
    await direct.until_idle()
