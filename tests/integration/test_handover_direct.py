"""The handover on real workers, the test being the router: KV bits, ledgers, cancels in each phase."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from kvtransfer.session.guard import cache_salt
from pdserve.kvcache.prefix import content_keys
from pdserve.messages import Outcome, Prefilled, Refusal, Refused, Reserved, Token
from pdserve.types import FinishReason, HandoverMode, Key, Role, SamplingParams
from tests.support import direct as dx

LONG = 500


def prompt(seed: int, length: int) -> tuple[int, ...]:
    """Distinct token ids without a shared prefix between seeds."""
    return tuple(100 + (seed * 7919 + i * 104729) % 40000 for i in range(length))


@pytest.fixture(scope="module", params=["shm", "tcp"])
def fleet(request: pytest.FixtureRequest) -> Iterator[dx.Direct]:
    made = dx.Direct.start(transports=(request.param,))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def shm() -> Iterator[dx.Direct]:
    made = dx.Direct.start(transports=("shm", "tcp"), num_pages=64, local_prefill_threshold=18)
    yield made
    made.stop()


@pytest.fixture
async def idle_after(fleet: dx.Direct) -> AsyncIterator[None]:
    yield
    await fleet.until_idle()


@pytest.mark.usefixtures("idle_after")
class TestHandover:
    async def test_tokens_kv_bits_and_ledger_equal_the_local_run(self, fleet: dx.Direct) -> None:
        ask = fleet.ask(prompt(1, 150))
        tokens, ended = await dx.generate(ask)
        size, engine = 16, fleet.decode._engine
        assert engine is not None
        ctx = engine.parts.context
        keys = content_keys(
            ask.token_ids, size, salt=cache_salt(dx.TENANT), model=ctx.model, numerics=ctx.numerics
        )
        moved = fleet.page_bytes(Role.DECODE, keys)
        assert moved == fleet.page_bytes(Role.PREFILL, keys), "what arrived is what was computed"
        ledger = ended.ledger
        assert ledger.decode_computed_prompt_tokens == 0
        assert (ledger.prefill_computed_tokens, ledger.transfer.pages) == (150, 10)
        assert ledger.transfer.bytes == 10 * engine.parts.layout.page_bytes
        assert ledger.transfer.path == engine.parts.transports[0]

        # The same prompt computed by decode itself, in another tenant's cache (other keys, no hits).
        local = dx.Direct.ask(fleet, ask.token_ids, mode=HandoverMode.LOCAL, use_prefix_cache=False)
        again, local_end = await dx.generate(local)
        assert again == tokens
        assert local_end.ledger.decode_computed_prompt_tokens == 150
        assert local_end.ledger.transfer.pages == 0

    async def test_a_refused_copy_of_a_call_ends_itself_only(self, fleet: dx.Direct) -> None:
        """The same key with a ticket that is not genuine, while the first stream waits for its tokens."""
        ask = fleet.ask(prompt(91, 120))
        first = dx.reserve(ask)
        assert isinstance(await first.next(), Reserved)
        copy = dx.Reserving(fleet, replace(ask.reserve_message(), ticket=b"forged" * 20))
        answer = await copy.next()
        assert isinstance(answer, Refused)
        assert answer.reason is Refusal.BAD_TICKET
        half = dx.prefill(ask)
        ended = await first.finish()
        assert ended.finish is FinishReason.LENGTH
        assert isinstance(await half, Prefilled)

    async def test_locally_computed_pages_are_bit_identical(self, fleet: dx.Direct) -> None:
        tokens = prompt(2, 96)
        await dx.generate(fleet.ask(tokens, mode=HandoverMode.LOCAL))
        engine = fleet.decode._engine
        assert engine is not None
        ctx = engine.parts.context
        keys = content_keys(tokens, 16, salt=cache_salt(dx.TENANT), model=ctx.model, numerics=ctx.numerics)
        computed_on_decode = fleet.page_bytes(Role.DECODE, keys)
        half = dx.prefill(fleet.ask(prompt(3, 1)))  # unrelated; only shows that parking harms nothing
        ask = fleet.ask(tokens, use_prefix_cache=True)
        await dx.generate(replace(ask, use_prefix_cache=True))
        assert fleet.page_bytes(Role.PREFILL, keys[:5]) == computed_on_decode[:5]
        half.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await half

    async def test_prefix_pages_that_decode_has_are_not_sent(self, fleet: dx.Direct) -> None:
        shared = prompt(4, 80)
        await dx.generate(fleet.ask(shared))
        _, ended = await dx.generate(fleet.ask((*shared, *prompt(5, 40))))
        assert ended.ledger.decode_hit_tokens == 80
        assert ended.ledger.prefill_cached_tokens == 80
        assert ended.ledger.transfer.pages == 8 - 5
        assert ended.usage.cached_tokens == 80

    async def test_a_request_that_ends_with_its_first_token(self, fleet: dx.Direct) -> None:
        ask = fleet.ask(prompt(6, 40), sampling=SamplingParams(max_tokens=1))
        tokens, ended = await dx.generate(ask)
        assert (len(tokens), ended.finish) == (1, FinishReason.LENGTH)

    async def test_forced_tokens_continue_the_stream_exactly(self, fleet: dx.Direct) -> None:
        sampling = SamplingParams(max_tokens=10, ignore_eos=True, temperature=0.9, top_p=0.95, seed=7)
        whole, _ = await dx.generate(fleet.ask(prompt(7, 60), sampling=sampling))
        forced = (*prompt(7, 60), *whole[:4])
        call = dx.reserve(ask := fleet.ask(forced, sampling=sampling, num_forced=4))
        half = dx.prefill(ask)
        rest: list[int] = []
        while call.ended is None:
            answer = await call.call.read()
            event = dx.convert.decode_event_from_pb(answer)
            if isinstance(event, Token):
                assert event.index == 4 + len(rest)
                rest.append(event.token_id)
            elif not isinstance(event, Reserved):
                break
        await half
        await call.close()
        assert [*whole[:4], *rest] == whole


@pytest.mark.usefixtures("idle_after")
class TestCancel:
    async def test_while_waiting_for_the_other_half(self, fleet: dx.Direct) -> None:
        half = dx.prefill(fleet.ask(prompt(10, 64)))
        await dx.until(fleet, fleet.p, lambda s: not s.idle)
        half.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await half
        call = dx.reserve(fleet.ask(prompt(11, 64)))
        assert isinstance(await call.next(), Reserved)
        await call.close()

    async def test_in_a_prefill_chunk(self, fleet: dx.Direct) -> None:
        ask = fleet.ask(prompt(12, LONG), use_prefix_cache=False)
        call, half = dx.reserve(ask), dx.prefill(ask)
        await dx.until(fleet, fleet.p, lambda s: s.load.num_running > 0)
        await call.close()
        half.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await half

    async def test_in_the_transfer(self, fleet: dx.Direct) -> None:
        async for address in dx.stalled_listener():
            stalled = replace(fleet.p, tcp=address, shm="")
            if not fleet.p.tcp:
                return  # a read from shared memory is a copy: it can not stand still
            # Long: a reader that is there from before is used, whatever the address says, and does not stall.
            ask = fleet.ask(prompt(13, 900), prefill_as=stalled)
            call, half = dx.reserve(ask), dx.prefill(ask)
            await dx.until(fleet, fleet.d, lambda s: s.load.filling_pages > 0)
            await call.close()
            done = await half
            assert isinstance(done, Prefilled)
            assert done.outcome is not Outcome.COMPLETE

    async def test_in_decode(self, fleet: dx.Direct) -> None:
        ask = fleet.ask(prompt(14, 40), sampling=SamplingParams(max_tokens=500, ignore_eos=True))
        call, half = dx.reserve(ask), dx.prefill(ask)
        while len(call.tokens) < 3:
            await call.next()
        await half
        await call.close()


@pytest.mark.usefixtures("idle_after")
class TestDeadline:
    @pytest.mark.parametrize("halves", ["prefill", "reserve", "both"])
    async def test_in_each_phase(self, fleet: dx.Direct, halves: str) -> None:
        ask = fleet.ask(prompt(20, LONG), deadline_s=0.3, use_prefix_cache=False,
                        sampling=SamplingParams(max_tokens=1000, ignore_eos=True))  # fmt: skip
        half = dx.prefill(ask) if halves != "reserve" else None
        if halves != "prefill":
            call = dx.reserve(ask)
            ended = await call.finish()
            assert (ended.finish, ended.error_label) == (None, "deadline_expired")
            await call.close()
        if half is not None:
            done = await half
            assert isinstance(done, Prefilled)
            assert done.outcome in (Outcome.EXPIRED, Outcome.STOPPED, Outcome.COMPLETE)

    async def test_in_decode(self, fleet: dx.Direct) -> None:
        ask = fleet.ask(prompt(21, 20), deadline_s=1.5,
                        sampling=SamplingParams(max_tokens=1500, ignore_eos=True))  # fmt: skip
        tokens, ended = await dx.generate(ask)
        assert ended.error_label == "deadline_expired"
        assert tokens, "it was decoding when the deadline came"


class TestConditional:
    """Prompts whose uncached part is below the threshold (18 here) are computed on decode."""

    async def test_a_short_prompt_stays_on_decode_and_prefill_is_let_go(self, shm: dx.Direct) -> None:
        ask = shm.ask(prompt(40, 17))
        call, half = dx.reserve(ask), dx.prefill(ask)
        answer = await call.next()
        assert isinstance(answer, Reserved)
        assert answer.mode is HandoverMode.LOCAL
        half.cancel()  # what the router does on this answer
        ended = await call.finish()
        assert (ended.ledger.decode_computed_prompt_tokens, ended.ledger.transfer.pages) == (17, 0)
        await call.close()
        await shm.until_idle()

    async def test_it_is_the_uncached_part_that_counts(self, shm: dx.Direct) -> None:
        cold, warm = prompt(41, 64), (*prompt(41, 64), *prompt(42, 10))
        _, first = await dx.generate(shm.ask(cold))
        assert (first.ledger.decode_computed_prompt_tokens, first.ledger.transfer.pages) == (0, 4)
        ask = shm.ask(warm)
        call, half = dx.reserve(ask), dx.prefill(ask)
        ended = await call.finish()
        half.cancel()
        assert ended.ledger.decode_hit_tokens == 64
        assert (ended.ledger.decode_computed_prompt_tokens, ended.ledger.transfer.pages) == (10, 0)
        alone = shm.ask(warm, mode=HandoverMode.LOCAL, use_prefix_cache=False)
        assert (await dx.generate(alone))[0] == call.tokens
        await call.close()


class TestRefusals:
    async def test_a_request_for_an_earlier_incarnation(self, shm: dx.Direct) -> None:
        ask = shm.ask(prompt(30, 20))
        message = replace(ask.reserve_message(), receiver_incarnation=5)
        call = dx.Reserving(shm, message)
        refused = await call.next()
        assert isinstance(refused, Refused)
        assert refused.reason is Refusal.STALE_INCARNATION
        await call.close()

    async def test_a_ticket_of_another_fleet(self, shm: dx.Direct) -> None:
        ask = shm.ask(prompt(31, 20))
        message = replace(ask.reserve_message(), ticket=b"PDT1" + b"\0" * 60)
        call = dx.Reserving(shm, message)
        refused = await call.next()
        assert isinstance(refused, Refused)
        assert refused.reason is Refusal.BAD_TICKET
        await call.close()

    async def test_what_can_never_fit(self, shm: dx.Direct) -> None:
        ask = shm.ask(prompt(32, 64 * 16 + 1))
        call = dx.reserve(ask)
        refused = await call.next()
        assert isinstance(refused, Refused)
        assert refused.reason is Refusal.NEVER_FITS
        await call.close()

    async def test_a_cancel_that_overtakes_its_reserve(self, shm: dx.Direct) -> None:
        ask = shm.ask(prompt(33, 20))
        channel = dx.open_channel(shm.d.control)
        stub = dx.authenticated(dx.decode_pb2_grpc.DecodeServiceStub(channel), shm.secret)
        cancel = dx.decode_pb2.CancelDecodeRequest(
            key=dx.convert.key_to_pb(ask.key), receiver_incarnation=shm.d.incarnation
        )
        await stub.CancelDecode(cancel)
        call = dx.reserve(ask)
        refused = await call.next()
        assert isinstance(refused, Refused)
        assert refused.reason is Refusal.OUTDATED_KEY
        newer = replace(ask, key=Key(request_id=ask.key.request_id, epoch=1), mode=HandoverMode.LOCAL)
        tokens, _ = await dx.generate(newer)
        assert len(tokens) == 8, "a higher epoch is not harmed"
        await call.close()
        await channel.close(None)

    async def test_full_pools_are_said_so_and_nothing_is_held(self, shm: dx.Direct) -> None:
        first = dx.reserve(shm.ask(prompt(34, 800)))
        assert isinstance(await first.next(), Reserved)
        second = dx.reserve(shm.ask(prompt(35, 800)))
        refused = await second.next()
        assert isinstance(refused, Refused)
        assert refused.reason is Refusal.FULL
        assert refused.retry_after_s > 0
        await first.close()
        await second.close()
        await shm.until_idle()

    async def test_drain_refuses_new_and_finishes_old(self, shm: dx.Direct) -> None:
        """The last test of this fleet: there is no way back from draining."""
        ask = shm.ask(prompt(36, 40), sampling=SamplingParams(max_tokens=30, ignore_eos=True))
        call, half = dx.reserve(ask), dx.prefill(ask)
        await call.next()
        draining = asyncio.create_task(asyncio.to_thread(shm.decode.drain, 60.0))
        await dx.until(shm, shm.d, lambda s: s.load.draining)
        late = dx.reserve(shm.ask(prompt(37, 20)))
        refused = await late.next()
        assert isinstance(refused, Refused)
        assert refused.reason is Refusal.DRAINING
        ended = await call.finish()
        await half
        assert (ended.finish, len(call.tokens)) == (FinishReason.LENGTH, 30)
        assert await draining
        await call.close()
        await late.close()
