"""LangChain's OpenAI chat model against the HTTP API: asked, streamed, with tools, with a form of output."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from pdserve.api import Chunk, ToolCallDelta, ToolMode
from pdserve.types import GrammarKind
from tests.support.byte_model import text_of
from tests.support.http_kit import END, Script, Served, ended, served

CHAT = "user: hi\n"


class Weather(BaseModel):
    """The weather of a city."""

    city: str


@pytest_asyncio.fixture
async def api() -> AsyncIterator[Served]:
    async with served() as running:
        running.worker.ends_at = 9
        yield running


def model(api: Served, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=f"{api.url}/v1", api_key="none", model="bytes", max_retries=0, **options)  # type: ignore[arg-type]


async def test_a_question_is_answered(api: Served) -> None:
    made = await model(api).ainvoke("hi")
    assert made.content == text_of(CHAT, 9)
    assert made.usage_metadata is not None
    assert made.usage_metadata["input_tokens"] == len(CHAT)


async def test_an_answer_streams(api: Served) -> None:
    parts = [str(part.content) async for part in model(api).astream("hi")]
    assert "".join(parts) == text_of(CHAT, 9)
    assert len([part for part in parts if part]) > 1


async def test_tools_are_called(api: Served) -> None:
    call = ToolCallDelta(index=0, id="c0", name="Weather", arguments='{"city": "Oslo"}')
    script = Script(api, Chunk(index=0, token_ids=(1,), text="", tool_calls=(call,)), ended(), END)
    made = await model(api).bind_tools([Weather]).ainvoke("hi")
    assert [(one["name"], one["args"]) for one in made.tool_calls] == [("Weather", {"city": "Oslo"})]
    assert script.asked[0].tools[0].name == "Weather"
    again = await model(api).bind_tools([Weather], tool_choice="Weather").ainvoke("hi")
    assert again.tool_calls
    choice = script.asked[1].tool_choice
    assert choice is not None
    assert choice.mode is ToolMode.NAMED


async def test_a_form_of_output_is_kept_to(api: Served) -> None:
    script = Script(api, Chunk(index=0, token_ids=(1,), text='{"city": "Oslo"}'), ended(), END)
    made = await model(api).with_structured_output(Weather, method="json_schema").ainvoke("hi")
    assert made == Weather(city="Oslo")
    grammar = script.asked[0].sampling.grammar
    assert grammar is not None
    assert grammar.kind is GrammarKind.JSON_SCHEMA
