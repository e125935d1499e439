"""Arguments of `generate` into a GenerateInput, the same for both clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from pdserve.api import GenerateInput, SamplingInput, ToolChoice
from pdserve.client.chat import Message, ToolLike, message_of, tool_choice_of, tool_of
from pdserve.client.grammars import grammar_of
from pdserve.errors import InvalidRequest, UnsupportedFeature

if TYPE_CHECKING:
    from pdserve.rpc.v1 import inference_pb2
    from pdserve.types import Grammar

T = TypeVar("T")
DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_DEADLINE_S = 600.0
CONTROL_TIMEOUT_S = 10.0
PLAN_TIMEOUT_S = 140.0
"""A placement of experts is planned first: seconds for the largest models, at most the worker's limit."""
GRACE_S = 5.0
"""How long after a deadline we still wait for the server to say so: its error tells more than ours."""


class GenerateOptions(TypedDict, total=False):
    """Options of `generate`; what is left out takes the server's documented default.

    Sampling: temperature 0 is greedy. repetition_penalty counts tokens of prompt and completion,
    presence_penalty and frequency_penalty those of the completion. logit_bias: added to logits, by token id.
    logprobs: alternatives to give beside each token's log-probability, 0 to 20; None: no log-probabilities.

    Ends: stop: texts that end an answer and are not part of it. min_tokens: no end before so many. bad_words:
    texts, or token ids, that must not be made.

    Form, at most one of them: json_schema: a schema as a mapping or as text. regex: matches the whole answer.
    choice: the texts one of which is the answer. grammar: Lark as text, or a `Grammar` of any kind.

    Several answers: n: so many. best_of: made, the n best are given. beam_width: beam search; length_penalty
    is its exponent of lengths. echo: the prompt too; prompt_logprobs: with log-probabilities.

    Chats: tools, tool_choice ("auto", "none", "required" or a `ToolChoice`), thinking.

    The call: deadline_s: seconds from now for all tries, 600 at most. priority: lower is served first.
    client_request_id: a label, returned as it is. no_prefix_cache: neither use nor fill the prefix cache.
    no_text: token ids only. trace_id: 32 hex digits. resume_window_s: not supported yet, only 0.
    """

    model: str
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float]
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    stop: Sequence[str]
    bad_words: Sequence[str | Sequence[int]]
    logprobs: int | None
    json_schema: Mapping[str, Any] | str
    regex: str
    choice: Sequence[str]
    grammar: Grammar | str | None
    n: int
    best_of: int
    beam_width: int
    length_penalty: float | None
    echo: bool
    prompt_logprobs: int | None
    tools: Sequence[ToolLike]
    tool_choice: ToolChoice | str | None
    thinking: bool | None
    deadline_s: float
    priority: int
    client_request_id: str
    no_prefix_cache: bool
    trace_id: str
    no_text: bool
    resume_window_s: float


_SAMPLING = frozenset(SamplingInput.__dataclass_fields__)


def build(
    prompt: str | None,
    messages: Sequence[Message] | None,
    token_ids: Sequence[int] | None,
    options: GenerateOptions,
) -> GenerateInput:
    """One request. Raises InvalidRequest unless exactly one of the three inputs is given, and for options
    that can not be put into a request."""
    given = [value for value in (prompt, messages, token_ids) if value is not None]
    if len(given) != 1:
        raise InvalidRequest.field("input", "give exactly one of prompt, messages and token_ids.")
    unknown = sorted(set(options) - GenerateOptions.__annotations__.keys())
    if unknown:
        raise InvalidRequest.field(unknown[0], "is no option of generate; see GenerateOptions.")
    if options.get("resume_window_s"):
        raise UnsupportedFeature.field("resume_window_s", "resuming is not supported yet; leave it out.")
    return built(lambda: _build(prompt, messages, token_ids, dict(options)))


def built(make: Callable[[], T]) -> T:
    """What `make` gives. Raises InvalidRequest where a value has a wrong type, or no message can carry it."""
    try:
        return make()
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise InvalidRequest("A value of the request has a wrong type or is out of range.") from error


def _build(
    prompt: str | None,
    messages: Sequence[Message] | None,
    token_ids: Sequence[int] | None,
    values: dict[str, Any],
) -> GenerateInput:
    values["deadline_s"] = values.get("deadline_s") or DEFAULT_DEADLINE_S
    grammar = grammar_of(values)
    words = _sequence("bad_words", values.pop("bad_words", None) or ())
    values["tools"] = tuple(map(tool_of, values.get("tools") or ()))
    values["tool_choice"] = tool_choice_of(values.get("tool_choice"))
    values["stop"] = _sequence("stop", values.get("stop") or ())
    sampling = {name: values.pop(name) for name in tuple(values) if name in _SAMPLING}
    sampling["logit_bias"] = tuple(sorted((sampling.get("logit_bias") or {}).items()))
    sampling["stop_token_ids"] = tuple(sampling.get("stop_token_ids") or ())
    sampling["bad_words"] = tuple(tuple(word) for word in words if not isinstance(word, str))
    return GenerateInput(
        prompt=prompt,
        messages=None if messages is None else tuple(map(message_of, messages)),
        token_ids=None if token_ids is None else tuple(token_ids),
        sampling=SamplingInput(**sampling, grammar=grammar),
        bad_words=tuple(word for word in words if isinstance(word, str)),
        **values,
    )


def _sequence(name: str, value: Any) -> tuple[Any, ...]:
    """A text alone would be taken for a sequence of its letters."""
    if isinstance(value, str):
        raise InvalidRequest.field(name, "give a sequence of texts, not one text.")
    return tuple(value)


def to_wire(source: GenerateInput) -> inference_pb2.GenerateRequest:
    """Raises InvalidRequest for values of a wrong type, or that no message can carry (a negative id)."""
    from pdserve.rpc.convert.generate import generate_to_pb

    try:
        return built(lambda: generate_to_pb(source))
    except InvalidRequest as error:
        name = "" if error.violations else _wrong_field(source, generate_to_pb)
        if not name:
            raise
        raise InvalidRequest.field(name, "has a wrong type or is out of range.") from error


def _wrong_field(source: GenerateInput, convert: Callable[[GenerateInput], object]) -> str:
    """The field without whose value the request can be written: protobuf does not name it. "" where it is
    more than one."""
    given, usual = source.sampling, SamplingInput()
    without: list[tuple[str, dict[str, Any]]] = [
        (each.name, {"sampling": replace(given, **{each.name: getattr(usual, each.name)})})
        for each in fields(given)
    ]
    plain = GenerateInput()
    without += [
        (each.name, {each.name: getattr(plain, each.name)})
        for each in fields(plain)
        if each.name != "sampling"
    ]
    for name, change in without:
        try:
            convert(replace(source, **change))
        except (TypeError, ValueError, AttributeError, KeyError):
            continue
        return name
    return ""
