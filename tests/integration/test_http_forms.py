"""Every kind of event in every API's form: scripted events, read by the packages people have.

The helpers of those packages put streams together and fail on events that do not fit; a whole answer and the
stream of the same events must say the same.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from pdserve.api import Chunk, PromptInfo, StreamEvent, ToolCallDelta, ToolChoice, ToolMode
from pdserve.types import FinishReason, GrammarKind, TokenLogprob
from tests.support.http_kit import END, Script, Served, ended, served

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
OPENAI_TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
CALLS: tuple[StreamEvent, ...] = (
    Chunk(index=0, token_ids=(1,), text="", reasoning="Which city? "),
    Chunk(index=1, token_ids=(2,), text="", reasoning="Oslo."),
    Chunk(index=2, token_ids=(3,), text="Let me see."),
    Chunk(index=3, token_ids=(4,), text="", tool_calls=(ToolCallDelta(index=0, id="c0", name="weather"),)),
    Chunk(index=4, token_ids=(5,), text="", tool_calls=(ToolCallDelta(index=0, arguments='{"city": '),)),
    Chunk(
        index=5,
        token_ids=(6,),
        text="",
        tool_calls=(
            ToolCallDelta(index=0, arguments='"Oslo"}'),
            ToolCallDelta(index=1, id="c1", name="weather", arguments='{"city": "Rome"}'),
        ),
    ),
    ended(),
    END,
)


def token(text: str, logprob: float, *top: TokenLogprob) -> TokenLogprob:
    return TokenLogprob(token_id=ord(text[0]), logprob=logprob, top=top, token=text.encode())


LOGPROBS: tuple[StreamEvent, ...] = (
    Chunk(
        index=0, token_ids=(65,), text="A", logprobs=(token("A", -0.5, token("A", -0.5), token("B", -1.0)),)
    ),
    Chunk(index=1, token_ids=(67,), text="C", logprobs=(token("C", -2.0, token("D", -0.1)),)),
    ended(why=FinishReason.LENGTH),
    END,
)


@pytest_asyncio.fixture
async def api() -> AsyncIterator[Served]:
    async with served() as running:
        yield running


# ---- chats -------------------------------------------------------------------------------------------


async def test_a_chat_calls_tools_whole_and_streamed(api: Served) -> None:
    script = Script(api, *CALLS)
    async with api.openai() as client:
        whole = await client.chat.completions.create(
            model="bytes", messages=MESSAGES, tools=OPENAI_TOOLS, tool_choice="required"
        )
        async with client.chat.completions.stream(
            model="bytes",
            messages=MESSAGES,
            tools=[{**OPENAI_TOOLS[0], "function": {**OPENAI_TOOLS[0]["function"], "strict": True}}],
        ) as stream:
            final = await stream.get_final_completion()
    message = whole.choices[0].message
    assert whole.choices[0].finish_reason == final.choices[0].finish_reason == "tool_calls"
    for calls in (message.tool_calls, final.choices[0].message.tool_calls):
        assert calls is not None
        told = [(call.id, call.function.name, json.loads(call.function.arguments)) for call in calls]
        assert told == [("c0", "weather", {"city": "Oslo"}), ("c1", "weather", {"city": "Rome"})]
    assert message.content == final.choices[0].message.content == "Let me see."
    assert message.model_extra == {"reasoning": "Which city? Oslo."}
    assert script.asked[0].tools[0].name == "weather"
    assert json.loads(script.asked[0].tools[0].parameters) == SCHEMA
    assert script.asked[0].tool_choice == ToolChoice(mode=ToolMode.REQUIRED)


async def test_one_call_at_most_can_be_asked_for_only_without_tools(api: Served) -> None:
    Script(api, *CALLS)
    body = {"model": "bytes", "messages": MESSAGES, "parallel_tool_calls": False}
    assert (await api.post("/v1/chat/completions", body)).status_code == 200
    refused = await api.post("/v1/chat/completions", {**body, "tools": OPENAI_TOOLS})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "parallel_tool_calls"


async def test_a_chat_of_tools_goes_on_with_what_they_answered(api: Served) -> None:
    script = Script(api, *CALLS)
    call = {"id": "c0", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    async with api.openai() as client:
        await client.chat.completions.create(
            model="bytes",
            messages=[
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": None, "tool_calls": [call]},  # type: ignore[list-item]
                {"role": "tool", "tool_call_id": "c0", "content": "rain"},
            ],
            tools=OPENAI_TOOLS,
            tool_choice={"type": "function", "function": {"name": "weather"}},
        )
    (asked,) = script.asked
    assert asked.messages is not None
    assert [message.role for message in asked.messages] == ["system", "user", "assistant", "tool"]
    assert asked.messages[1].content == "ab"
    assert asked.messages[2].tool_calls[0].name == "weather"
    assert asked.messages[3].tool_call_id == "c0"
    assert asked.tool_choice == ToolChoice(mode=ToolMode.NAMED, name="weather")


async def test_a_chats_logprobs_come_with_bytes_and_alternatives(api: Served) -> None:
    script = Script(api, *LOGPROBS)
    async with api.openai() as client:
        asked: Any = {"model": "bytes", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
        whole = await client.chat.completions.create(**asked)
        stream = await client.chat.completions.create(**asked, stream=True)
        streamed = [chunk.choices[0].logprobs async for chunk in stream if chunk.choices[0].logprobs]
    assert whole.choices[0].logprobs is not None
    content = whole.choices[0].logprobs.content
    assert content is not None
    assert [(one.token, one.logprob, one.bytes) for one in content] == [("A", -0.5, [65]), ("C", -2.0, [67])]
    assert [one.token for one in content[0].top_logprobs] == ["A", "B"]
    assert [one for part in streamed for one in part.content or ()] == content
    assert script.asked[0].sampling.logprobs == 2


async def test_choices_keep_apart(api: Served) -> None:
    script = Script(
        api,
        Chunk(index=0, token_ids=(1,), text="one", choice=0),
        Chunk(index=0, token_ids=(1,), text="two", choice=1),
        ended(1),
        Chunk(index=1, token_ids=(2,), text=" more", choice=0),
        ended(0, stop_text="\n"),
        END,
    )
    async with api.openai() as client:
        async with client.chat.completions.stream(model="bytes", messages=MESSAGES, n=2) as events:
            final = await events.get_final_completion()
        whole = await client.chat.completions.create(model="bytes", messages=MESSAGES, n=2)
    for made in (whole, final):
        assert [choice.message.content for choice in made.choices] == ["one more", "two"]
        assert [choice.finish_reason for choice in made.choices] == ["stop", "stop"]
    assert whole.choices[0].model_extra == {"stop_reason": "\n"}
    assert script.asked[0].n == 2


@pytest.mark.parametrize(
    ("asked", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_SCHEMA, '{"type":"object"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            GrammarKind.JSON_SCHEMA,
            SCHEMA,
        ),
        ({"extra_body": {"structured_outputs": {"regex": "a+"}}}, GrammarKind.REGEX, "a+"),
        ({"extra_body": {"structured_outputs": {"choice": ["a", "b"]}}}, GrammarKind.CHOICE, '["a","b"]'),
        ({"extra_body": {"structured_outputs": {"json": SCHEMA}}}, GrammarKind.JSON_SCHEMA, SCHEMA),
        ({"extra_body": {"structured_outputs": {"grammar": 'root ::= "a"'}}}, GrammarKind.GBNF, None),
        ({"extra_body": {"structured_outputs": {"grammar": 'start: "a"'}}}, GrammarKind.LARK, None),
    ],
)
async def test_forms_of_output_become_grammars(api: Served, asked: Any, kind: Any, text: Any) -> None:
    script = Script(api, *LOGPROBS)
    async with api.openai() as client:
        await client.chat.completions.create(model="bytes", messages=MESSAGES, **asked)
    grammar = script.asked[0].sampling.grammar
    assert grammar is not None
    assert grammar.kind is kind
    if text is not None:
        assert (json.loads(grammar.text) if isinstance(text, dict) else grammar.text) == text


# ---- completions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_an_echo_with_logprobs_begins_with_the_prompts(api: Served, stream: bool) -> None:
    prompt = PromptInfo(
        token_ids=(120, 121), text="xy", logprobs=(token("x", 0.0), token("y", -3.0, token("z", -0.2)))
    )
    script = Script(api, prompt, *LOGPROBS)
    texts: list[str] = []
    parts: list[Any] = []
    async with api.openai() as client:
        asked: Any = {"model": "bytes", "prompt": "xy", "echo": True, "logprobs": 1}
        if stream:
            async for chunk in await client.completions.create(**asked, stream=True):
                texts.append(chunk.choices[0].text)
                parts.append(chunk.choices[0].logprobs)
        else:
            made = await client.completions.create(**asked)
            texts, parts = [made.choices[0].text], [made.choices[0].logprobs]
    told = [part for part in parts if part]
    assert "".join(texts) == "xyAC"
    assert [value for part in told for value in part.token_logprobs] == [None, -3.0, -0.5, -2.0]
    assert [value for part in told for value in part.text_offset] == [0, 1, 2, 3]
    assert [value for part in told for value in part.top_logprobs][1:3] == [
        {"z": -0.2},
        {"A": -0.5, "B": -1.0},
    ]
    assert script.asked[0].echo
    assert script.asked[0].prompt_logprobs == 1


async def test_vllms_fields_reach_the_hub(api: Served) -> None:
    script = Script(api, *LOGPROBS)
    body = {
        "prompt": [1, 2], "max_tokens": 5, "top_k": -1, "min_p": 0.1, "typical_p": 0.9, "min_tokens": 2,
        "repetition_penalty": 1.1, "ignore_eos": True, "stop_token_ids": [9], "bad_words": ["no"],
        "priority": -3, "logit_bias": {"7": 1.5, "3": -2}, "best_of": 3, "n": 2, "presence_penalty": 0.5,
        "frequency_penalty": 0.25, "seed": 11, "stop": ["x", "y"], "top_p": 0.5, "prompt_logprobs": 2,
    }  # fmt: skip
    answer = await api.http.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "a1"
    (asked,) = script.asked
    sampling = asked.sampling
    assert (sampling.top_k, sampling.min_p, sampling.typical_p, sampling.min_tokens) == (0, 0.1, 0.9, 2)
    assert (sampling.repetition_penalty, sampling.ignore_eos, sampling.stop_token_ids) == (1.1, True, (9,))
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.top_p) == (0.5, 0.25, 0.5)
    assert (sampling.logit_bias, sampling.seed, sampling.max_tokens) == (((3, -2.0), (7, 1.5)), 11, 5)
    assert (asked.bad_words, asked.priority, asked.best_of, asked.n) == (("no",), -3, 3, 2)
    assert (asked.stop, asked.token_ids, asked.client_request_id) == (("x", "y"), (1, 2), "mine")
    assert asked.prompt_logprobs == 2
    assert sampling.temperature == 1.0


async def test_beams_take_the_place_of_sampling(api: Served) -> None:
    script = Script(api, *LOGPROBS)
    body = {"prompt": "x", "n": 3, "use_beam_search": True, "length_penalty": 0.5}
    assert (await api.post("/v1/completions", body)).status_code == 200
    (asked,) = script.asked
    assert (asked.n, asked.beam_width, asked.length_penalty) == (3, 3, 0.5)
    assert asked.sampling.temperature is None


# ---- responses ---------------------------------------------------------------------------------------


async def test_a_response_has_items_whole_and_streamed(api: Served) -> None:
    script = Script(api, *CALLS)
    tools: list[Any] = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": None}]
    async with api.openai() as client:
        whole = await client.responses.create(
            model="bytes", input="hi", tools=tools, instructions="Be brief."
        )
        async with client.responses.stream(model="bytes", input=MESSAGES) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
    for made in (whole, final):
        assert [item.type for item in made.output] == [
            "reasoning",
            "message",
            "function_call",
            "function_call",
        ]
        assert made.output_text == "Let me see."
        assert made.status == "completed"
        assert made.usage is not None
        assert made.usage.input_tokens_details.cached_tokens == 4
    calls = [item for item in final.output if item.type == "function_call"]
    assert [(call.call_id, json.loads(call.arguments)["city"]) for call in calls] == [
        ("c0", "Oslo"),
        ("c1", "Rome"),
    ]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert script.asked[0].messages is not None
    assert [message.role for message in script.asked[0].messages] == ["system", "user"]


async def test_a_response_goes_on_with_earlier_items(api: Served) -> None:
    script = Script(api, *CALLS)
    async with api.openai() as client:
        first = await client.responses.create(model="bytes", input="hi")
        items: list[Any] = [item.model_dump(exclude_none=True) for item in first.output]
        outputs: list[Any] = [
            {"type": "function_call_output", "call_id": name, "output": "rain"} for name in ("c0", "c1")
        ]
        await client.responses.create(model="bytes", input=[*MESSAGES, *items, *outputs])
    messages = script.asked[1].messages
    assert messages is not None
    assert [message.role for message in messages] == ["user", "assistant", "tool", "tool"]
    assert messages[1].reasoning == "Which city? Oslo."
    assert [call.id for call in messages[1].tool_calls] == ["c0", "c1"]


async def test_an_answer_cut_off_is_incomplete(api: Served) -> None:
    Script(api, *LOGPROBS)
    async with api.openai() as client:
        made = await client.responses.create(model="bytes", input="hi", max_output_tokens=2)
    assert made.status == "incomplete"
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("field", [{"store": True}, {"previous_response_id": "x"}, {"background": True}])
async def test_what_would_have_to_be_kept_is_refused_by_name(api: Served, field: dict[str, Any]) -> None:
    answer = await api.post("/v1/responses", {"input": "hi", **field})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == next(iter(field))


# ---- messages ----------------------------------------------------------------------------------------


async def test_a_message_has_blocks_whole_and_streamed(api: Served) -> None:
    script = Script(api, *CALLS)
    tools: list[Any] = [{"name": "weather", "input_schema": SCHEMA}]
    async with api.anthropic() as client:
        asked: Any = {
            "model": "bytes",
            "max_tokens": 9,
            "messages": MESSAGES,
            "tools": tools,
            "system": "Brief.",
        }
        whole = await client.messages.create(**asked, tool_choice={"type": "any"})
        async with client.messages.stream(**asked) as stream:
            final = await stream.get_final_message()
    for made in (whole, final):
        assert [block.type for block in made.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert [b.input for b in made.content if b.type == "tool_use"] == [{"city": "Oslo"}, {"city": "Rome"}]
        assert [b.text for b in made.content if b.type == "text"] == ["Let me see."]
        assert [b.thinking for b in made.content if b.type == "thinking"] == ["Which city? Oslo."]
        assert made.stop_reason == "tool_use"
        assert (made.usage.input_tokens, made.usage.cache_read_input_tokens) == (3, 4)
        assert made.usage.output_tokens == 5
    assert script.asked[0].tool_choice == ToolChoice(mode=ToolMode.REQUIRED)
    assert script.asked[0].messages is not None
    assert script.asked[0].messages[0].role == "system"


async def test_a_conversation_of_blocks_becomes_messages(api: Served) -> None:
    script = Script(api, *CALLS)
    turns: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "so"},
                {"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "rain"}]},
                {"type": "text", "text": "and now?"},
            ],
        },
    ]
    async with api.anthropic() as client:
        await client.messages.create(model="bytes", max_tokens=9, messages=turns, stop_sequences=["."])
    (asked,) = script.asked
    assert asked.messages is not None
    assert [message.role for message in asked.messages] == ["user", "assistant", "tool", "user"]
    assert asked.messages[1].reasoning == "hm"
    assert json.loads(asked.messages[1].tool_calls[0].arguments) == {"city": "Oslo"}
    assert (asked.messages[2].tool_call_id, asked.messages[2].content) == ("t", "rain")
    assert asked.stop == (".",)


async def test_a_stop_sequence_is_told(api: Served) -> None:
    Script(api, Chunk(index=0, token_ids=(1,), text="so"), ended(stop_text="."), END)
    async with api.anthropic() as client:
        made = await client.messages.create(model="bytes", max_tokens=9, messages=MESSAGES)
    assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", ".")
