"""Body of /v1/responses: items in, items out, nothing kept between calls."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from pdserve.api import ChatMessage, GenerateInput, SamplingInput, Tool, ToolCall, ToolChoice, ToolMode
from pdserve.errors import InvalidRequest
from pdserve.types import Grammar
from router.http.schema.common import DEFAULT_TEMPERATURE, Body, check_parallel, schema_grammar
from router.http.strict_json import dump
from router.validate import AS_MANY_AS_FIT

LOGPROBS = "message.output_text.logprobs"


class TextItem(Body):
    """A part of a message."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = Field(None, max_length=0)
    logprobs: list[Any] | None = Field(None, exclude=True)


class MessageItem(Body):
    """A message of any role, new or from an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[TextItem]
    id: str | None = None
    status: str | None = None


class CallItem(Body):
    """What the model called before."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class OutputItem(Body):
    """What a function answered."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[TextItem]
    id: str | None = None
    status: str | None = None


class ReasoningText(Body):
    """A part of what was thought."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Body):
    """What the model thought before."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[Any] | None = Field(None, max_length=0)
    content: list[ReasoningText] | None = None
    encrypted_content: None = None
    status: str | None = None


def _kind(item: Any) -> str:
    """A message need not say that it is one."""
    if isinstance(item, dict):
        return str(item.get("type", "message"))
    return "message"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class FunctionTool(Body):
    """A function that may be called."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        """This tool as ours."""
        parameters = "" if self.parameters is None else dump(self.parameters).decode()
        return Tool(name=self.name, description=self.description or "", parameters=parameters)


class NamedFunction(Body):
    """The function to call."""

    type: Literal["function"]
    name: str


class TextFormat(Body):
    """The output's form."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(Body):
    """How text is to be."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Body):
    """How much to think: "none" asks the model not to, where its template knows how."""

    effort: Literal["none"] | None = None
    summary: None = None


class StreamOptions(Body):
    """Nothing is padded."""

    include_obfuscation: Literal[False] | None = None


class ResponsesBody(Body):
    """Items, and how to go on with them. store: answers are not kept, whatever the default elsewhere."""

    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    store: Literal[False] | None = None
    previous_response_id: None = None
    conversation: None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None

    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are part of the answer."""
        return LOGPROBS in (self.include or ())

    def generate_input(self, label: str) -> GenerateInput:
        """This as ours. label: the client's own."""
        if self.top_logprobs and not self.wants_logprobs():
            raise InvalidRequest.field("top_logprobs", f'needs include: ["{LOGPROBS}"].')
        sampling = SamplingInput(
            temperature=DEFAULT_TEMPERATURE if self.temperature is None else self.temperature,
            top_p=self.top_p,
            max_tokens=AS_MANY_AS_FIT if self.max_output_tokens is None else self.max_output_tokens,
            logprobs=(self.top_logprobs or 0) if self.wants_logprobs() else None,
            grammar=self._grammar(),
        )
        check_parallel(self.parallel_tool_calls, self.tools)
        none = self.reasoning is not None and self.reasoning.effort == "none"
        return GenerateInput(
            messages=self._messages(),
            sampling=sampling,
            client_request_id=label,
            tools=tuple(tool.tool() for tool in self.tools or ()),
            tool_choice=self._tool_choice(),
            thinking=False if none else None,
        )

    def _grammar(self) -> Grammar | None:
        format_ = None if self.text is None else self.text.format
        if format_ is None or format_.type == "text":
            return None
        if format_.type == "json_object":
            return schema_grammar({"type": "object"})
        if format_.schema_ is None:
            raise InvalidRequest.field("text.format.schema", "is required with this type.")
        return schema_grammar(format_.schema_)

    def _tool_choice(self) -> ToolChoice | None:
        given = self.tool_choice
        if given is None:
            return None
        if isinstance(given, str):
            return ToolChoice(mode=ToolMode(given))
        return ToolChoice(mode=ToolMode.NAMED, name=given.name)

    def _messages(self) -> tuple[ChatMessage, ...]:
        made = [] if not self.instructions else [ChatMessage(role="system", content=self.instructions)]
        if isinstance(self.input, str):
            return (*made, ChatMessage(role="user", content=self.input))
        turn = _Turn()
        for item in self.input:
            made += turn.add(item)
        return (*made, *turn.flush())


class _Turn:
    """Puts an assistant's thoughts, text and calls, which come as items, together into one message."""

    def __init__(self) -> None:
        self._content, self._reasoning = "", ""
        self._calls: tuple[ToolCall, ...] = ()

    def add(self, item: MessageItem | CallItem | OutputItem | ReasoningItem) -> list[ChatMessage]:
        """Messages that are complete with this item."""
        if isinstance(item, ReasoningItem):
            done = self.flush() if self._content or self._calls else []
            self._reasoning += "".join(part.text for part in item.content or ())
            return done
        if isinstance(item, CallItem):
            call = ToolCall(id=item.call_id, name=item.name, arguments=item.arguments)
            self._calls = (*self._calls, call)
            return []
        if isinstance(item, OutputItem):
            text = _text(item.output)
            return [*self.flush(), ChatMessage(role="tool", content=text, tool_call_id=item.call_id)]
        if item.role == "assistant":
            done = self.flush() if self._content or self._calls else []
            self._content = _text(item.content)
            return done
        role = "system" if item.role == "developer" else item.role
        return [*self.flush(), ChatMessage(role=role, content=_text(item.content))]

    def flush(self) -> list[ChatMessage]:
        """The message so far, if there is any."""
        if not (self._content or self._reasoning or self._calls):
            return []
        message = ChatMessage(
            role="assistant", content=self._content, reasoning=self._reasoning, tool_calls=self._calls
        )
        self._content, self._reasoning, self._calls = "", "", ()
        return [message]


def _text(content: str | list[TextItem]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
