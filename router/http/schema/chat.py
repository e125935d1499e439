"""Body of /v1/chat/completions: messages, tools, and what else only chats have."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pdserve.api import ChatMessage, GenerateInput, Tool, ToolCall, ToolChoice, ToolMode
from pdserve.errors import InvalidRequest
from router.http.schema.common import Body, SamplingBody, check_parallel
from router.http.strict_json import dump
from router.validate import AS_MANY_AS_FIT


class TextPart(Body):
    """A part of a message's content; other kinds of parts are refused."""

    type: Literal["text"]
    text: str


Content = str | list[TextPart]


class FunctionCall(Body):
    """What an assistant called. arguments: a JSON object, as text."""

    name: str
    arguments: str


class CallBody(Body):
    """One tool call of an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Instruction(Body):
    """A message of the system or the developer, or of the user."""

    role: Literal["system", "developer", "user"]
    content: Content

    def message(self) -> ChatMessage:
        """This message as ours; a developer is the system."""
        return ChatMessage(role="user" if self.role == "user" else "system", content=text_of(self.content))


class AssistantMessage(Body):
    """What the model said, thought and called before."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: list[CallBody] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: Literal[""] | None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = Field(None, max_length=0)

    def message(self) -> ChatMessage:
        """This message as ours."""
        return ChatMessage(
            role="assistant",
            content="" if self.content is None else text_of(self.content),
            tool_calls=tuple(
                ToolCall(id=c.id, name=c.function.name, arguments=c.function.arguments)
                for c in self.tool_calls or ()
            ),
            reasoning=self.reasoning or self.reasoning_content or "",
        )


class ToolMessage(Body):
    """What a tool answered."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str

    def message(self) -> ChatMessage:
        """This message as ours."""
        return ChatMessage(role="tool", content=text_of(self.content), tool_call_id=self.tool_call_id)


Message = Annotated[Instruction | AssistantMessage | ToolMessage, Field(discriminator="role")]


class FunctionBody(Body):
    """A function that may be called. parameters: a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionBody

    def tool(self) -> Tool:
        """This tool as ours."""
        parameters = self.function.parameters
        return Tool(
            name=self.function.name,
            description=self.function.description or "",
            parameters="" if parameters is None else dump(parameters).decode(),
        )


class FunctionName(Body):
    """A function by its name."""

    name: str


class NamedTool(Body):
    """The tool to call."""

    type: Literal["function"]
    function: FunctionName


class TemplateOptions(Body):
    """What the model's chat template may be told."""

    enable_thinking: bool | None = None


class ChatBody(SamplingBody):
    """A conversation, and how to go on with it."""

    messages: list[Message]
    tools: list[ToolBody] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    chat_template_kwargs: TemplateOptions | None = None
    add_generation_prompt: Literal[True] | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: None = None
    verbosity: Literal["medium"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = Field(None, max_length=0)
    audio: None = None
    prediction: None = None
    safety_identifier: str | None = None

    def input(self, label: str) -> GenerateInput:
        """This chat as ours. label: the client's own."""
        options = self.chat_template_kwargs
        check_parallel(self.parallel_tool_calls, self.tools)
        return GenerateInput(
            messages=tuple(message.message() for message in self.messages),
            sampling=self.sampling(max_tokens=self._max_tokens(), logprobs=self._logprobs()),
            stop=self.stops(),
            priority=self.priority or 0,
            client_request_id=label,
            bad_words=tuple(self.bad_words or ()),
            echo=bool(self.return_token_ids),
            prompt_logprobs=self.prompt_logprobs,
            tools=tuple(tool.tool() for tool in self.tools or ()),
            tool_choice=tool_choice(self.tool_choice),
            thinking=None if options is None else options.enable_thinking,
            **self.choices(),
        )

    def _max_tokens(self) -> int:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise InvalidRequest.field("max_tokens", "is max_completion_tokens' old name; send one of them.")
        asked = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return AS_MANY_AS_FIT if asked is None else asked

    def _logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest.field("top_logprobs", "needs logprobs: true.")
        return (self.top_logprobs or 0) if self.logprobs else None


def tool_choice(given: str | NamedTool | None) -> ToolChoice | None:
    """Which tool is to be called, as ours."""
    if given is None:
        return None
    if isinstance(given, str):
        return ToolChoice(mode=ToolMode(given))
    return ToolChoice(mode=ToolMode.NAMED, name=given.function.name)


def text_of(content: Content) -> str:
    """A content's text; parts follow each other with nothing between."""
    return content if isinstance(content, str) else "".join(part.text for part in content)
