"""Several choices of one request on the router: how they go out, how they end together, what is told of them.

Scripted workers; their tokens depend on the ids before them and on the seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import pytest

from pdserve.api import Admitted, Chunk, GenerateInput
from pdserve.client import AsyncClient
from pdserve.errors import Cancelled, InternalError, InvalidRequest
from pdserve.messages import Outcome, Refusal, Refused, Reserve, Token
from pdserve.rpc import convert
from pdserve.types import FinishReason, HandoverMode, Role, TokenLogprob
from tests.support.byte_model import next_token
from tests.support.router_kit import FakeWorker, fleet

PROMPT = tuple(b"one prompt of many choices")


def made(seed: int, num: int) -> tuple[int, ...]:
    """What a choice with this seed must be."""
    ids = list(PROMPT)
    for _ in range(num):
        ids.append(97 + (next_token(ids) + seed) % 26)
    return tuple(ids[len(PROMPT) :])


class Sampling(FakeWorker):
    """Its tokens depend on the seed too; a token's log-probability is minus a tenth of what `worth` says."""

    def worth(self, seed: int) -> int:
        return (seed * 7) % 10 + 1

    async def decode(self, call: Reserve) -> AsyncIterator[convert.DecodeEvent]:
        seed = call.sampling.seed
        async for event in super().decode(call):
            if isinstance(event, Token):
                logprob = None
                token_id = made(seed, event.index + 1)[-1]
                if call.sampling.logprobs is not None:
                    logprob = TokenLogprob(token_id=token_id, logprob=-0.1 * self.worth(seed))
                event = replace(event, token_id=token_id, logprob=logprob)
            yield event


def pair() -> tuple[Sampling, FakeWorker]:
    return Sampling("d", Role.DECODE), FakeWorker("p", Role.PREFILL)


async def test_choices_follow_the_first_one_to_its_decode_worker() -> None:
    decode, prefill = pair()
    other = Sampling("e", Role.DECODE)
    async with fleet(decode, other, prefill) as running:
        result = await running.client.generate(token_ids=PROMPT, max_tokens=6, n=4, seed=2**64 - 2).result()
    seeds = [2**64 - 2, 2**64 - 1, 0, 1]
    assert [c.token_ids for c in result.choices] == [made(seed, 6) for seed in seeds]
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (len(PROMPT), 24)
    (used,) = [worker for worker in (decode, other) if worker.reserves]
    assert len(used.reserves) == 4
    assert len(prefill.prefills) == 1
    assert used.reserves[0].mode is HandoverMode.DISAGGREGATED
    assert {call.mode for call in used.reserves[1:]} == {HandoverMode.LOCAL}
    assert len({call.key.request_id for call in used.reserves}) == 4


async def test_choices_start_when_the_first_token_has_come() -> None:
    decode, prefill = pair()
    decode.pause_at = 0
    async with fleet(decode, prefill) as running:
        stream = running.client.generate(token_ids=PROMPT, max_tokens=2, n=3)
        waiting = asyncio.ensure_future(stream.result())
        await decode.wait_for("paused")
        assert len(decode.reserves) == 1
        decode.gate.set()
        assert len((await waiting).choices) == 3


async def test_a_choice_that_finds_the_worker_full_goes_the_usual_way() -> None:
    decode, prefill = pair()
    left = [1]

    async def script(call: Reserve) -> AsyncIterator[convert.DecodeEvent]:
        if call.mode is HandoverMode.LOCAL and left[0]:
            left[0] -= 1
            yield Refused(key=call.key, reason=Refusal.FULL, retry_after_s=5.0)
            return
        async for event in decode.decode(call):
            yield event

    decode.decode_script = script
    other = Sampling("e", Role.DECODE)
    async with fleet(decode, prefill) as running:
        await other.start()
        stream = running.client.generate(token_ids=PROMPT, max_tokens=4, n=2, seed=0)
        waiting = asyncio.ensure_future(stream.result())
        assert (await other.join(running.router.address)).accepted
        result = await waiting
        await other.kill()
    assert [c.token_ids for c in result.choices] == [made(0, 4), made(1, 4)]
    assert len(prefill.prefills) == 2


async def test_without_the_prefix_cache_choices_share_under_a_salt_of_their_own() -> None:
    decode, prefill = pair()
    async with fleet(decode, prefill) as running:
        for _ in range(2):
            await running.client.generate(token_ids=PROMPT, max_tokens=2, n=2, no_prefix_cache=True).result()
        await running.client.generate(token_ids=PROMPT, max_tokens=2, no_prefix_cache=True).result()
    salts = [call.cache_salt for call in decode.reserves]
    assert salts[0] == salts[1] != salts[2] == salts[3]
    assert prefill.prefills[0].cache_salt == salts[0] != ""
    assert [call.use_prefix_cache for call in decode.reserves] == [True] * 4 + [False]
    assert salts[4] == ""


async def test_best_of_gives_the_likeliest_and_counts_all() -> None:
    decode, prefill = pair()
    async with fleet(decode, prefill) as running:
        result = await running.client.generate(
            token_ids=PROMPT, max_tokens=4, n=2, best_of=5, seed=0
        ).result()
    best = sorted(range(5), key=decode.worth)[:2]
    assert [c.token_ids for c in result.choices] == [made(seed, 4) for seed in best]
    assert [c.logprobs for c in result.choices] == [(), ()]
    assert result.choices[0].cumulative_logprob == pytest.approx(-0.4 * decode.worth(best[0]))
    assert result.usage.completion_tokens == 20


async def test_best_of_keeps_log_probabilities_that_were_asked_for() -> None:
    decode, prefill = pair()
    async with fleet(decode, prefill) as running:
        result = await running.client.generate(
            token_ids=PROMPT, max_tokens=3, best_of=3, logprobs=0, seed=4
        ).result()
    (choice,) = result.choices
    assert len(choice.logprobs) == 3
    assert choice.logprobs[0].token == bytes([choice.token_ids[0]])


async def test_each_choice_ends_by_its_own_stop() -> None:
    decode, prefill = pair()
    stop = bytes(made(1, 5)[2:5]).decode()
    async with fleet(decode, prefill) as running:
        result = await running.client.generate(
            token_ids=PROMPT, max_tokens=20, n=2, seed=0, stop=[stop]
        ).result()
    first, second = result.choices
    assert (second.finish_reason, second.stop_text) == (FinishReason.STOP, stop)
    assert second.text == bytes(made(1, 2)).decode()
    assert (first.finish_reason, len(first.token_ids)) == (FinishReason.LENGTH, 20)


async def _running(client: AsyncClient, decode: FakeWorker) -> tuple[asyncio.Task[object], str]:
    """A request whose three choices all stand still after their first token."""
    stream = client.generate(token_ids=PROMPT, max_tokens=8, n=3)
    task: asyncio.Task[object] = asyncio.ensure_future(stream.result())
    for _ in range(3):
        await decode.wait_for("paused")
    assert stream.request_id is not None
    return task, stream.request_id


async def test_an_abort_ends_all_choices() -> None:
    decode, prefill = pair()
    decode.pause_at = 1
    async with fleet(decode, prefill) as running:
        task, request_id = await _running(running.client, decode)
        assert await running.client.abort(request_id) is Outcome.STOPPING
        with pytest.raises(Cancelled):
            await task
        assert {(await decode.wait_for("cancel_decode")).request_id for _ in range(3)} == {
            call.key.request_id for call in decode.reserves
        }
        assert (await running.client.explain(request_id)).outcome == "cancelled"


async def test_a_client_that_leaves_ends_all_choices() -> None:
    decode, prefill = pair()
    decode.pause_at = 1
    async with fleet(decode, prefill) as running:
        task, _ = await _running(running.client, decode)
        task.cancel()
        gone = {(await decode.wait_for("cancel_decode")).request_id for _ in range(3)}
        assert gone == {call.key.request_id for call in decode.reserves}


async def test_a_choice_that_fails_fails_the_request_and_ends_the_others() -> None:
    decode, prefill = pair()
    decode.pause_at = 1

    async def script(call: Reserve) -> AsyncIterator[convert.DecodeEvent]:
        if call.key.request_id.endswith("-2"):
            await asyncio.gather(*(decode.wait_for("paused") for _ in range(2)))
            yield decode.ended(call, len(call.token_ids), label="internal")
            return
        async for event in decode.decode(call):
            yield event

    decode.decode_script = script
    async with fleet(decode, prefill) as running:
        stream = running.client.generate(token_ids=PROMPT, max_tokens=8, n=3)
        with pytest.raises(InternalError):
            await stream.result()
        gone = {(await decode.wait_for("cancel_decode")).request_id for _ in range(2)}
        assert not any(name.endswith("-2") for name in gone)
        assert stream.request_id is not None
        found = await running.client.explain(stream.request_id)
        assert (found.state, found.outcome) == ("done", "internal")


async def test_choices_that_never_began_are_forgotten_when_the_first_one_fails() -> None:
    decode, prefill = pair()

    async def script(call: Reserve) -> AsyncIterator[convert.DecodeEvent]:
        async for event in decode.decode(call):
            yield event
            if isinstance(event, Token):
                yield decode.ended(call, len(call.token_ids) + 1, label="internal")
                return

    decode.decode_script = script
    async with fleet(decode, prefill) as running, asyncio.timeout(10):
        hub, name = running.router.hub, ""
        async with aclosing(hub.generate(GenerateInput(token_ids=PROMPT, n=3))) as events:  # type: ignore[type-var]
            async for event in events:
                name = event.request_id if isinstance(event, Admitted) else name
                if isinstance(event, Chunk):
                    break
            while hub.status().running:  # this reader is slow: the failure waits for it
                await running.client.explain(name)
            with pytest.raises(InternalError):
                await anext(events)
        assert (hub.status().queued, hub.status().running) == (0, 0)
        assert len(decode.reserves) == 1


async def test_a_request_is_explained_with_its_choices() -> None:
    decode, prefill = pair()
    async with fleet(decode, prefill) as running:
        result = await running.client.generate(token_ids=PROMPT, max_tokens=3, n=3).result()
        found = await running.client.explain(result.request_id)
        assert found.choice_ids == (f"{result.request_id}-1", f"{result.request_id}-2")
        assert found.prefill_worker == "p"
        second = await running.client.explain(found.choice_ids[0])
        assert (second.outcome, second.decode_worker, second.prefill_worker) == ("length", "d", "")


async def test_a_choice_that_goes_on_is_told_when_the_first_has_ended() -> None:
    decode, prefill = pair()

    async def script(call: Reserve) -> AsyncIterator[convert.DecodeEvent]:
        async for event in decode.decode(call):
            if call.mode is HandoverMode.LOCAL:
                decode.seen.put_nowait(("paused", call.key))
                await decode.gate.wait()
            yield event

    decode.decode_script = script
    async with fleet(decode, prefill) as running:
        stream = running.client.generate(token_ids=PROMPT, max_tokens=3, n=2)
        ended = asyncio.ensure_future(stream.result())
        await decode.wait_for("paused")
        assert stream.request_id is not None
        async with asyncio.timeout(10):
            while True:
                found = await running.client.explain(stream.request_id)
                if found.waiting_for == "1 more of its runs":
                    break
        assert (found.state, found.outcome) == ("running", "")
        decode.gate.set()
        await ended


async def test_more_choices_than_are_allowed_are_refused_by_name() -> None:
    decode, _ = pair()
    async with fleet(decode) as running:
        for options in ({"n": 9}, {"best_of": 9}, {"n": 3, "best_of": 2}):
            name = "best_of" if "best_of" in options else "n"
            with pytest.raises(InvalidRequest, match=f"^{name}"):
                await running.client.generate(token_ids=PROMPT, **options).result()  # type: ignore[arg-type]


async def test_an_echo_comes_before_the_first_token() -> None:
    decode, prefill = pair()
    async with fleet(decode, prefill) as running:
        result = await running.client.generate("hé?", max_tokens=2, echo=True, n=2).result()
        assert result.prompt is not None
        assert (result.prompt.text, result.prompt.token_ids) == ("hé?", tuple("hé?".encode()))
        chat = await running.client.generate(
            messages=[{"role": "user", "content": "x"}], max_tokens=2, echo=True
        ).result()
        assert chat.prompt is not None
        assert chat.prompt.text == "user: x\n"
        bare = await running.client.generate("x", max_tokens=2, echo=True, no_text=True).result()
        assert bare.prompt is not None
        assert (bare.prompt.text, bare.prompt.token_ids) == ("", (120,))


async def test_bad_words_go_out_with_and_without_a_space_before_them() -> None:
    decode, prefill = pair()
    async with fleet(decode, prefill) as running:
        await running.client.generate("x", max_tokens=2, bad_words=["ab", [7, 8]]).result()
        for words in (["a"] * 65, [""], ["é" * 129], ["seventeen letters"]):
            with pytest.raises(InvalidRequest, match=r"^bad_words"):
                await running.client.generate("x", bad_words=words).result()
    assert decode.reserves[0].sampling.bad_words == ((7, 8), (97, 98))
