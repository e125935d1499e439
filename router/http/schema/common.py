"""What bodies have in common: strictness, sampling, structured output, options of streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pdserve.api import SamplingInput
from pdserve.errors import InvalidRequest, UnsupportedFeature
from pdserve.types import Grammar, GrammarKind
from router.grammars import dialect_of
from router.http.strict_json import dump

DEFAULT_TEMPERATURE = 1.0
"""What clients of these APIs expect where none is given; pdserve's own default is 0."""


class Body(BaseModel):
    """A JSON object of which we know every field. No value is converted: "1" is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """Clients write null for what they leave out; so it asks for nothing, whatever the field."""
        if not isinstance(value, dict):
            return value
        return {name: given for name, given in value.items() if given is not None or name in cls._names()}

    @classmethod
    def _names(cls) -> frozenset[str]:
        return frozenset(field.alias or name for name, field in cls.model_fields.items())


class StreamOptions(Body):
    """include_usage: one more chunk at the end, with the token counts. continuous_usage_stats: counts so far
    in every chunk, as vLLM has it."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class StructuredOutputs(Body):
    """vLLM's way to ask for a form of output; one of the four. grammar: GBNF if it has "::=", else Lark."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class JsonSchema(Body):
    """OpenAI's description of a schema. strict: it is always kept to."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The output's form: any text, any JSON object, or what a schema allows."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class SamplingBody(Body):
    """Fields of completions and chats: OpenAI's, and those of vLLM that we have too."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None

    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    include_stop_str_in_output: Literal[False] | None = None

    def stops(self) -> tuple[str, ...]:
        """The stop texts."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts. Raises InvalidRequest where nothing streams."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest.field("stream_options", "is for streams; send stream: true, too.")
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def counts_always(self) -> bool:
        """Whether each chunk of a stream has the token counts so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def sampling(self, *, max_tokens: int, logprobs: int | None) -> SamplingInput:
        """These fields as ours. Raises InvalidRequest for what can not be said in one request."""
        top_k = 0 if self.top_k == -1 else self.top_k  # vLLM's way to say off
        usual = None if self.use_beam_search else DEFAULT_TEMPERATURE
        return SamplingInput(
            temperature=usual if self.temperature is None else self.temperature,
            top_k=top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            typical_p=self.typical_p,
            seed=self.seed,
            max_tokens=max_tokens,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=_biases(self.logit_bias or {}),
            min_tokens=self.min_tokens,
            logprobs=logprobs,
            grammar=_grammar(self.response_format, self.structured_outputs),
        )

    def choices(self) -> dict[str, Any]:
        """n, or the beams in its place, as fields of GenerateInput."""
        if self.n is not None and self.n < 1:
            raise InvalidRequest.field("n", "must be at least 1.")
        n = self.n or 1
        if self.use_beam_search:
            return {"n": n, "beam_width": max(n, 2), "length_penalty": self.length_penalty}
        return {"n": 0 if n == 1 else n, "length_penalty": self.length_penalty}


def check_parallel(asked: bool | None, tools: Sequence[object] | None) -> None:
    """A model that is offered tools may call several. Raises UnsupportedFeature where one is asked for."""
    if asked is False and tools:
        raise UnsupportedFeature.field(
            "parallel_tool_calls", "can not be false with tools; take the first call."
        )


def schema_grammar(schema: dict[str, Any]) -> Grammar:
    """The grammar of a JSON schema."""
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=dump(schema).decode())


def _biases(given: dict[str, float]) -> tuple[tuple[int, float], ...]:
    try:
        return tuple(sorted((int(name), bias) for name, bias in given.items()))
    except ValueError:
        raise InvalidRequest.field("logit_bias", "its names must be token ids.") from None


def _grammar(format_: ResponseFormat | None, outputs: StructuredOutputs | None) -> Grammar | None:
    by_format = None if format_ is None else _of_format(format_)
    if by_format is not None and outputs is not None:
        raise InvalidRequest.field("structured_outputs", "can not go with response_format; leave one out.")
    return by_format if outputs is None else _of_outputs(outputs)


def _of_format(format_: ResponseFormat) -> Grammar | None:
    if format_.type == "text":
        return None
    if format_.type == "json_object":
        return schema_grammar({"type": "object"})
    if format_.json_schema is None or format_.json_schema.schema_ is None:
        raise InvalidRequest.field("response_format.json_schema.schema", "is required with this type.")
    return schema_grammar(format_.json_schema.schema_)


def _of_outputs(outputs: StructuredOutputs) -> Grammar:
    if len(outputs.model_fields_set) != 1:
        raise InvalidRequest.field("structured_outputs", "send one of json, regex, choice and grammar.")
    if outputs.json_ is not None:
        schema = outputs.json_
        text = schema if isinstance(schema, str) else dump(schema).decode()
        return Grammar(kind=GrammarKind.JSON_SCHEMA, text=text)
    if outputs.regex is not None:
        return Grammar(kind=GrammarKind.REGEX, text=outputs.regex)
    if outputs.choice is not None:
        return Grammar(kind=GrammarKind.CHOICE, text=dump(outputs.choice).decode())
    text = outputs.grammar or ""
    return Grammar(kind=dialect_of(text), text=text)
