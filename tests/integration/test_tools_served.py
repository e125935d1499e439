"""Tools with the default model, over a prefill and a decode worker: a call that must come comes, and its
arguments validate against the tool's own schema."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from jsonschema import validate

from pdserve.api import Chunk, Tool, ToolChoice, ToolMode
from pdserve.errors import InvalidRequest
from pdserve.types import FinishReason, Role
from tests.support.stack import Stack

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"$ref": "#/$defs/unit"},
    },
    "required": ["city", "days", "unit"], "additionalProperties": False,
    "$defs": {"unit": {"enum": ["celsius", "fahrenheit"]}},
}  # fmt: skip
FORECAST = Tool(name="get_forecast", description="The weather.", parameters=json.dumps(SCHEMA))
NOW = Tool(name="now", description="The time.")
CHAT = [{"role": "user", "content": "What will the weather be like in Cologne next week?"}]
NAMED = ToolChoice(mode=ToolMode.NAMED, name="get_forecast")


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    made = Stack.start({Role.PREFILL: 1, Role.DECODE: 1}, router_flags=("--tool-format", "hermes"))
    yield made
    made.stop()


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_the_tool_named_is_called_with_arguments_that_validate(stack: Stack, seed: int | None) -> None:
    sampling = {} if seed is None else {"temperature": 1.0, "seed": seed}
    with stack.client() as client:
        stream = client.generate(
            messages=CHAT, tools=[NOW, FORECAST], tool_choice=NAMED, max_tokens=200, **sampling
        )
        chunks = [chunk for chunk in stream if isinstance(chunk, Chunk)]
        result = stream.result()
    assert result.finish_reason is FinishReason.STOP, result
    assert result.text == ""
    (call,) = result.tool_calls
    assert call.name == "get_forecast"
    validate(json.loads(call.arguments), SCHEMA)
    assert result.ledger.prefill_worker == "prefill-0"
    deltas = [delta for chunk in chunks for delta in chunk.tool_calls]
    assert len(deltas) > 3
    assert "".join(delta.arguments for delta in deltas) == call.arguments


def test_where_a_call_is_required_one_or_more_come(stack: Stack) -> None:
    with stack.client() as client:
        result = client.generate(
            messages=CHAT,
            tools=[NOW, FORECAST],
            tool_choice="required",
            max_tokens=400,
            temperature=1.0,
            seed=5,
        ).result()
    assert result.tool_calls
    assert result.text == ""
    for call in result.tool_calls[: -1 if result.finish_reason is FinishReason.LENGTH else None]:
        validate(json.loads(call.arguments), SCHEMA if call.name == "get_forecast" else {"maxProperties": 0})


def test_a_schema_that_can_not_be_enforced_is_told_as_the_tools(stack: Stack) -> None:
    bad = Tool(name="bad", parameters='{"type": "object", "properties": {"a": {"$ref": "https://x/y"}}}')
    with stack.client() as client:
        with pytest.raises(InvalidRequest) as caught:
            client.generate(messages=CHAT, tools=[bad], tool_choice="required").result()
        assert caught.value.violations[0].field == "tools"
        # Where the model decides, nothing is enforced, so nothing is in the way.
        assert client.generate(messages=CHAT, tools=[bad], max_tokens=4).result().token_ids
