"""Options of `generate` into a request, and a result from the events of a stream."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import pytest

from pdserve.api import (
    Admitted,
    ChatMessage,
    ChoiceEnd,
    Chunk,
    End,
    GenerateInput,
    PromptInfo,
    SamplingInput,
    StreamEvent,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
    ToolMode,
)
from pdserve.client.request import GenerateOptions, build, to_wire
from pdserve.client.result import Collector
from pdserve.errors import InternalError, InvalidRequest, UnsupportedFeature
from pdserve.rpc.convert import generate_from_pb
from pdserve.types import FinishReason, Grammar, GrammarKind, TokenLogprob, Usage

FORMS = {"json_schema", "regex", "choice"}


def test_every_field_of_a_request_is_an_option() -> None:
    fields = {*GenerateInput.__dataclass_fields__, *SamplingInput.__dataclass_fields__}
    assert set(GenerateOptions.__annotations__) - FORMS == fields - {
        "sampling",
        "prompt",
        "messages",
        "token_ids",
    }


def test_options_become_one_request() -> None:
    built = build(
        None,
        [{"role": "user", "content": "hi"}],
        None,
        {
            "logit_bias": {7: 1.5, 3: -2.0},
            "bad_words": ["no", [1, 2]],
            "stop": ["\n"],
            "stop_token_ids": [4],
            "logprobs": 2,
            "n": 3,
            "tools": [{"name": "f", "parameters": {"type": "object"}}],
            "tool_choice": "required",
            "thinking": False,
        },
    )
    assert built.sampling == SamplingInput(
        logit_bias=((3, -2.0), (7, 1.5)), bad_words=((1, 2),), stop_token_ids=(4,), logprobs=2
    )
    assert (built.bad_words, built.stop, built.n, built.thinking) == (("no",), ("\n",), 3, False)
    assert built.tools == (Tool(name="f", parameters='{"type": "object"}'),)
    assert built.tool_choice == ToolChoice(mode=ToolMode.REQUIRED)
    assert built.messages == (ChatMessage(role="user", content="hi"),)
    wire = generate_from_pb(to_wire(built))
    assert wire == built


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def test_messages_of_tools_and_functions_of_openai_are_taken() -> None:
    messages = [
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    built = build(None, messages, None, {"tools": [{"type": "function", "function": {"name": "f"}}]})
    assert built.messages == (
        ChatMessage(
            role="assistant", content="", tool_calls=(ToolCall(id="1", name="f", arguments='{"a": 1}'),)
        ),
        ChatMessage(role="tool", content="2", tool_call_id="1"),
    )
    assert built.tools == (Tool(name="f"),)


SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"json_schema": SCHEMA},
            Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(SCHEMA, ensure_ascii=False)),
        ),
        ({"json_schema": "{}"}, Grammar(kind=GrammarKind.JSON_SCHEMA, text="{}")),
        ({"regex": "[0-9]+"}, Grammar(kind=GrammarKind.REGEX, text="[0-9]+")),
        ({"choice": ["ja", "né"]}, Grammar(kind=GrammarKind.CHOICE, text='["ja", "né"]')),
        ({"grammar": 'start: "a"'}, Grammar(kind=GrammarKind.LARK, text='start: "a"')),
        (
            {"grammar": Grammar(kind=GrammarKind.GBNF, text="root ::= [a]")},
            Grammar(kind=GrammarKind.GBNF, text="root ::= [a]"),
        ),
        ({"grammar": None}, None),
    ],
)
def test_a_form_becomes_a_grammar(options: Any, expected: Grammar | None) -> None:
    assert build("x", None, None, options).sampling.grammar == expected


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"regex": "a", "choice": ["b"]}, "grammar"),
        ({"choice": "abc"}, "choice"),
        ({"regex": 5}, "regex"),
        ({"stop": "abc"}, "stop"),
        ({"bad_words": "abc"}, "bad_words"),
        ({"tool_choice": "named"}, "tool_choice"),
        ({"tools": [{"parameters": {}}]}, "tools"),
        ({"resume_window_s": 5.0}, "resume_window_s"),
        ({"temprature": 0.5}, "temprature"),
    ],
)
def test_what_can_not_be_asked_is_refused_by_name(options: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build("x", None, None, options)
    assert [violation.field for violation in caught.value.violations] == [field]
    assert isinstance(caught.value, UnsupportedFeature) == (field == "resume_window_s")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"seed": "1"}, "seed"),
        ({"stop": ["a", 1]}, "stop"),
        ({"stop_token_ids": [-5]}, "stop_token_ids"),
        ({"n": -1}, "n"),
    ],
)
def test_what_no_message_can_carry_is_refused_by_name(options: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        to_wire(build("x", None, None, options))
    assert [violation.field for violation in caught.value.violations] == [field]


def test_of_two_values_that_no_message_can_carry_none_is_blamed() -> None:
    with pytest.raises(InvalidRequest) as caught:
        to_wire(build("x", None, None, {"max_tokens": -1, "seed": -1}))
    assert not caught.value.violations


def test_a_call_without_a_function_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        build(None, [{"role": "assistant", "tool_calls": [{"id": "1"}]}], None, {})


def test_options_have_types_that_resolve() -> None:
    assert get_type_hints(GenerateOptions, localns={"Grammar": Grammar})["n"] is int


ADMITTED = Admitted(request_id="r", client_request_id="", prompt_tokens=1)
END = End(finish_reason=FinishReason.STOP, usage=Usage(completion_tokens=3))


def collect(*events: StreamEvent) -> Collector:
    collector = Collector()
    for event in events:
        collector.take(event)
    return collector


def test_choices_are_told_apart() -> None:
    prompt = PromptInfo(token_ids=(9,), text="p", logprobs=(TokenLogprob(token_id=9, logprob=0.0),))
    odds = TokenLogprob(token_id=3, logprob=-1.0, top=(TokenLogprob(token_id=4, logprob=-0.5),))
    result = collect(
        ADMITTED,
        prompt,
        Chunk(index=0, token_ids=(1,), text="a", choice=1, reasoning="hm"),
        Chunk(index=0, token_ids=(3,), text="b", logprobs=(odds,)),
        Chunk(index=1, token_ids=(2, 5), text="c", choice=1),
        ChoiceEnd(choice=1, finish_reason=FinishReason.LENGTH, completion_tokens=3, cumulative_logprob=-2.5),
        ChoiceEnd(choice=0, finish_reason=FinishReason.STOP, stop_text="\n", stop_token_id=8),
        END,
    ).result()
    first, second = result.choices
    assert (first.text, first.token_ids, first.logprobs) == ("b", (3,), (odds,))
    assert (first.stop_text, first.stop_token_id, first.finish_reason) == ("\n", 8, FinishReason.STOP)
    assert (second.index, second.text, second.token_ids, second.reasoning) == (1, "ac", (1, 2, 5), "hm")
    assert (second.finish_reason, second.cumulative_logprob) == (FinishReason.LENGTH, -2.5)
    assert (result.text, result.token_ids, result.logprobs, result.reasoning) == ("b", (3,), (odds,), "")
    assert result.prompt == prompt


def test_tool_calls_are_joined() -> None:
    result = collect(
        ADMITTED,
        Chunk(index=0, token_ids=(1,), text="", tool_calls=(ToolCallDelta(index=1, id="y", name="g"),)),
        Chunk(
            index=1,
            token_ids=(2,),
            text="",
            tool_calls=(
                ToolCallDelta(index=0, id="x", name="f", arguments='{"a"'),
                ToolCallDelta(index=1, arguments="{}"),
            ),
        ),
        Chunk(index=2, token_ids=(3,), text="", tool_calls=(ToolCallDelta(index=0, arguments=": 1}"),)),
        END,
    ).result()
    assert result.tool_calls == (
        ToolCall(id="x", name="f", arguments='{"a": 1}'),
        ToolCall(id="y", name="g", arguments="{}"),
    )


@pytest.mark.parametrize(
    "events",
    [
        (Chunk(index=0, token_ids=(1,), text="", choice=1), END),
        (
            Chunk(index=0, token_ids=(1,), text=""),
            ChoiceEnd(choice=0, finish_reason=FinishReason.STOP),
            Chunk(index=1, token_ids=(1,), text=""),
        ),
        (Chunk(index=1, token_ids=(1,), text="", choice=1),),
        (Chunk(index=0, token_ids=(1,), text=""),),
    ],
)
def test_streams_that_are_not_whole_are_errors(events: tuple[StreamEvent, ...]) -> None:
    with pytest.raises(InternalError):
        collect(ADMITTED, *events).result()


def test_a_request_that_made_nothing_has_one_empty_choice() -> None:
    result = collect(ADMITTED, END).result()
    assert (result.text, len(result.choices), result.finish_reason) == ("", 1, FinishReason.STOP)
