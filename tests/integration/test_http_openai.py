"""OpenAI's own client against the HTTP API: completions and chats, whole and streamed, and their errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio

from tests.support.byte_model import text_of
from tests.support.http_kit import Served, served

CHAT = "user: hi\n"
"""What the byte model's template makes of MESSAGES."""
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest_asyncio.fixture
async def api() -> AsyncIterator[Served]:
    async with served() as running:
        yield running


async def test_a_completion_is_whole_and_counted(api: Served) -> None:
    async with api.openai() as client:
        made = await client.completions.create(model="bytes", prompt="once", max_tokens=6)
    assert made.choices[0].text == text_of("once", 6)
    assert made.choices[0].finish_reason == "length"
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens, made.usage.total_tokens) == (4, 6, 10)


async def test_sixteen_tokens_are_made_where_nobody_says_how_many(api: Served) -> None:
    async with api.openai() as client:
        made = await client.completions.create(model="bytes", prompt="once")
    assert made.choices[0].text == text_of("once", 16)


async def test_a_streamed_completion_joins_to_the_whole_one(api: Served) -> None:
    async with api.openai() as client:
        stream = await client.completions.create(
            model="bytes", prompt="once", max_tokens=20, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == text_of("once", 20)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20
    assert len({chunk.id for chunk in chunks}) == 1


async def test_counts_so_far_come_with_every_chunk_if_asked_for(api: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with api.openai() as client:
        stream = await client.completions.create(
            model="bytes",
            prompt="once",
            max_tokens=9,
            stream=True,
            stream_options=options,  # type: ignore[arg-type]
        )
        counts = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage]
    assert counts == sorted(counts)
    assert (counts[0] >= 1, counts[-1]) == (True, 9)


async def test_prompts_come_as_lists_of_texts_and_of_ids(api: Served) -> None:
    async with api.openai() as client:
        texts = await client.completions.create(model="bytes", prompt=["one", "two"], max_tokens=5)
        ids = await client.completions.create(model="bytes", prompt=list(b"one"), max_tokens=5)
        more = await client.completions.create(model="bytes", prompt=[[1, 2], list(b"two")], max_tokens=5)
    assert [choice.text for choice in texts.choices] == [text_of("one", 5), text_of("two", 5)]
    assert [choice.index for choice in texts.choices] == [0, 1]
    assert ids.choices[0].text == text_of("one", 5)
    assert more.choices[1].text == text_of("two", 5)
    assert more.usage is not None
    assert more.usage.prompt_tokens == 5


async def test_several_prompts_stream_side_by_side(api: Served) -> None:
    async with api.openai() as client:
        stream = await client.completions.create(
            model="bytes", prompt=["one", "two"], max_tokens=40, stream=True
        )
        texts = {0: "", 1: ""}
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: text_of("one", 40), 1: text_of("two", 40)}


async def test_a_chat_goes_on_to_its_end_token(api: Served) -> None:
    api.worker.ends_at = 9
    async with api.openai() as client:
        made = await client.chat.completions.create(model="bytes", messages=MESSAGES)
    assert made.choices[0].message.content == text_of(CHAT, 9)
    assert made.choices[0].message.role == "assistant"
    assert made.choices[0].finish_reason == "stop"


async def test_a_chat_without_a_bound_may_fill_the_context(api: Served) -> None:
    async with api.openai() as client:
        made = await client.chat.completions.create(model="bytes", messages=MESSAGES)
    assert made.usage is not None
    assert made.usage.total_tokens == 4096


async def test_a_streamed_chat_says_whose_message_it_is_first(api: Served) -> None:
    async with api.openai() as client:
        stream = await client.chat.completions.create(
            model="bytes", messages=MESSAGES, max_completion_tokens=12, stream=True
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == text_of(CHAT, 12)
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_a_stop_text_ends_a_text_and_is_not_part_of_it(api: Served) -> None:
    whole = text_of("once", 40)
    async with api.openai() as client:
        made = await client.completions.create(model="bytes", prompt="once", max_tokens=40, stop=whole[10:13])
    assert made.choices[0].text == whole[: whole.index(whole[10:13])]
    assert made.choices[0].finish_reason == "stop"


async def test_the_blocking_client_works_as_well(api: Served) -> None:
    def ask() -> list[str]:
        with openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
            made = client.completions.create(model="bytes", prompt="once", max_tokens=6)
            stream = client.completions.create(model="bytes", prompt="once", max_tokens=6, stream=True)
            streamed = "".join(chunk.choices[0].text for chunk in stream)
            return [made.choices[0].text, streamed, client.models.list().data[0].id]

    assert await asyncio.to_thread(ask) == [text_of("once", 6), text_of("once", 6), "bytes"]


async def test_models_are_listed_by_all_their_names() -> None:
    config = {"served_model_name": ("gpt-4o", "bytes"), "max_model_len": 64}
    async with served(**config) as api, api.openai() as client:
        assert [model.id async for model in await client.models.list()] == ["gpt-4o", "bytes"]
        made = await client.chat.completions.create(model="gpt-4o", messages=MESSAGES)
        with pytest.raises(openai.NotFoundError, match="does not serve that model"):
            await client.models.retrieve("gpt-5")
    assert made.model == "gpt-4o"
    assert made.usage is not None
    assert made.usage.total_tokens == 64


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 7}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"n": 0}, "n"),
        ({"suffix": "tail"}, "suffix"),
        ({"extra_body": {"best_off": 2}}, "best_off"),
        ({"extra_body": {"top_k": 1.5}}, "top_k"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [999]}, "prompt"),
    ],
)
async def test_what_is_wrong_is_named(api: Served, wrong: dict[str, object], param: str) -> None:
    async with api.openai() as client:
        asked = {"model": "bytes", "prompt": "once", **wrong}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(**asked)  # type: ignore[call-overload]
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert str(caught.value.body["message"]).startswith(param)  # type: ignore[index]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
async def test_a_null_is_a_field_left_out_even_one_we_do_not_have(api: Served, path: str) -> None:
    message = {"role": "user", "content": "hi", "name": None}
    body = {"max_tokens": 2, "web_search_options": None, "stop": None, "temperature": None}
    body |= {"prompt": "once"} if path == "/v1/completions" else {"messages": [message]}
    answer = await api.post(path, body)
    assert answer.status_code == (400 if path == "/v1/messages" else 200), answer.text  # it wants a model
    asked = await api.post(path, {**body, "model": "bytes", "web_search_options": {}})
    assert asked.status_code == 400
    assert "web_search_options" in asked.text


async def test_parts_that_are_no_text_are_refused_by_name(api: Served) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    async with api.openai() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                model="bytes",
                messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}, image]}],  # type: ignore[list-item]
            )
    assert caught.value.param == "messages[0].content[1].type"


async def test_a_full_queue_is_a_rate_limit_with_a_time_to_wait() -> None:
    async with served(max_queue_tokens=8) as api, api.openai() as client:
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(model="bytes", prompt="longer than that", max_tokens=4)
    assert int(caught.value.response.headers["retry-after"]) >= 1
    assert caught.value.code == "overloaded"


async def test_a_router_that_drains_answers_503_and_finishes_what_runs(api: Served) -> None:
    api.worker.pause_at = 3
    async with api.openai() as client:
        stream = await client.completions.create(model="bytes", prompt="once", max_tokens=9, stream=True)
        first = await anext(stream)
        draining = asyncio.ensure_future(api.fleet.router.hub.drain(60.0))
        assert (await api.http.get("/health")).status_code == 200
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(model="bytes", prompt="once")
        assert caught.value.status_code == 503
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert (await api.http.get("/ready")).status_code == 503
        api.worker.gate.set()
        rest = [chunk.choices[0].text async for chunk in stream]
        await draining
    assert first.choices[0].text + "".join(rest) == text_of("once", 9)


async def test_a_client_that_hangs_up_cancels_the_request(api: Served) -> None:
    api.worker.pause_at = 2
    for stream in (True, False):
        body = {"prompt": "once", "max_tokens": 50, "stream": stream}
        call = asyncio.ensure_future(api.post("/v1/completions", body))
        key = await api.worker.wait_for("paused")
        call.cancel()
        assert await api.worker.wait_for("cancel_decode") == key
        assert (await api.fleet.client.explain(key.request_id)).outcome == "cancelled"
        assert (await api.fleet.client.get_status()).running == 0
