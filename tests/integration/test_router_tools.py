"""Tools over the wire: what the workers are sent, and what comes back, in pieces, to the client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from pdserve.api import ChatMessage, Tool, ToolChoice, ToolMode
from pdserve.errors import InvalidRequest, UnsupportedFeature
from pdserve.messages import Reserve, Reserved, Token
from pdserve.rpc import convert
from pdserve.types import FinishReason, Role
from tests.support.byte_model import END_ID
from tests.support.router_kit import FakeWorker, fleet

TOOL = Tool(name="get_weather", parameters='{"type": "object", "properties": {"city": {"type": "string"}}}')
CHAT = [ChatMessage(role="user", content="Weather in Cologne?")]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def says(text: str, *, breaks_at: int | None = None) -> FakeWorker:
    """A worker whose model writes this text. breaks_at: its first try fails before that token."""
    worker = FakeWorker("d", Role.AGGREGATED)
    ids = [*text.encode(), END_ID]

    async def script(call: Reserve) -> AsyncIterator[convert.DecodeEvent]:
        yield Reserved(key=call.key, mode=call.mode, hit_tokens=0)
        for index in range(call.num_forced, len(ids)):
            if index == breaks_at and call.key.epoch == 0:
                ended = worker.ended(call, len(call.token_ids) + index, label="internal")
                yield replace(ended, retryable=True)
                return
            yield Token(key=call.key, index=index, token_id=ids[index])
        total = len(call.token_ids) - call.num_forced + len(ids)
        yield worker.ended(call, total, finish=FinishReason.STOP)

    worker.decode_script = script
    return worker


async def test_a_call_comes_as_a_call_and_the_prompt_has_the_tools() -> None:
    worker = says(f"I look.\n{CALL}\n{CALL.replace('Köln', 'Bonn')}")
    async with fleet(worker, tool_format="hermes") as running:
        events = [
            event async for event in running.client.generate(messages=CHAT, tools=[TOOL], max_tokens=300)
        ]
        result = await running.client.generate(messages=CHAT, tools=[TOOL], max_tokens=300).result()
    prompt = bytes(worker.reserves[0].token_ids).decode()
    assert '{"name": "get_weather", "parameters": {"type": "object"' in prompt
    assert result.text == "I look."
    assert [(c.name, c.arguments) for c in result.tool_calls] == [
        ("get_weather", '{"city": "Köln"}'),
        ("get_weather", '{"city": "Bonn"}'),
    ]
    assert len({call.id for call in result.tool_calls}) == 2
    assert sum(len(getattr(event, "token_ids", ())) for event in events) == len(result.token_ids)


async def test_what_was_called_and_what_it_gave_go_back_into_the_prompt() -> None:
    worker = says("It is sunny.")
    async with fleet(worker, tool_format="hermes") as running:
        stream = says(CALL)
        worker.decode_script, answer = stream.decode_script, worker.decode_script
        called = await running.client.generate(messages=CHAT, tools=[TOOL]).result()
        worker.decode_script = answer
        chat = [
            *CHAT,
            ChatMessage(role="assistant", tool_calls=called.tool_calls),
            ChatMessage(role="tool", content="sunny", tool_call_id=called.tool_calls[0].id),
        ]
        result = await running.client.generate(messages=chat, tools=[TOOL]).result()
    assert (result.text, result.tool_calls) == ("It is sunny.", ())
    prompt = bytes(worker.reserves[1].token_ids).decode()
    assert f"assistant: {CALL}\n" in prompt
    assert "user: <tool_response>\nsunny\n</tool_response>\n" in prompt


async def test_a_stream_that_was_taken_up_again_gives_the_same_call() -> None:
    async with fleet(says(CALL, breaks_at=60), tool_format="hermes") as running:
        result = await running.client.generate(messages=CHAT, tools=[TOOL]).result()
    assert result.epochs == 2
    assert [(c.name, c.arguments) for c in result.tool_calls] == [("get_weather", '{"city": "Köln"}')]


async def test_a_stop_text_within_a_call_ends_it_there() -> None:
    async with fleet(says(CALL), tool_format="hermes") as running:
        result = await running.client.generate(messages=CHAT, tools=[TOOL], stop=["öln"]).result()
    assert [c.arguments for c in result.tool_calls] == ['{"city": "K']


async def test_without_tools_what_looks_like_a_call_is_text() -> None:
    async with fleet(says(CALL), tool_format="hermes") as running:
        plain = await running.client.generate(messages=CHAT).result()
        none = await running.client.generate(
            messages=CHAT, tools=[TOOL], tool_choice=ToolChoice(mode=ToolMode.NONE)
        ).result()
    assert (plain.text, plain.tool_calls) == (none.text, none.tool_calls) == (CALL, ())


async def test_tools_are_refused_where_the_template_has_no_place_for_them() -> None:
    async with fleet(says("x")) as running:
        with pytest.raises(UnsupportedFeature, match="no place for tools"):
            await running.client.generate(messages=CHAT, tools=[TOOL]).result()
        with pytest.raises(UnsupportedFeature, match="thinking"):
            await running.client.generate(messages=CHAT, thinking=True).result()
        with pytest.raises(InvalidRequest, match=r"tools\.name"):
            await running.client.generate(messages=CHAT, tools=[Tool(name="a b")]).result()
