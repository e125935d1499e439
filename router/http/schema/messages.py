"""Bodies of Anthropic's /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pdserve.api import (
    ChatMessage,
    GenerateInput,
    SamplingInput,
    TokenizeInput,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
)
from router.http.schema.common import DEFAULT_TEMPERATURE, Body
from router.http.strict_json import dump


class CacheControl(Body):
    """Asks for what is done anyway: prefixes are cached."""

    type: Literal["ephemeral"]


class TextBlock(Body):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = Field(None, max_length=0)


class ThinkingBlock(Body):
    """What the model thought before."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(Body):
    """What the model called before."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolResultBlock(Body):
    """What a tool answered."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class UserTurn(Body):
    """What the user says, and what tools answered."""

    role: Literal["user"]
    content: str | list[UserBlock]

    def messages(self) -> list[ChatMessage]:
        """Tools' answers first, each by itself, then the text."""
        if isinstance(self.content, str):
            return [ChatMessage(role="user", content=self.content)]
        results = [block for block in self.content if isinstance(block, ToolResultBlock)]
        text = [block.text for block in self.content if isinstance(block, TextBlock)]
        made = [
            ChatMessage(role="tool", content=text_of(one.content or ""), tool_call_id=one.tool_use_id)
            for one in results
        ]
        return [*made, ChatMessage(role="user", content="".join(text))] if text or not made else made


class AssistantTurn(Body):
    """What the model said, thought and called."""

    role: Literal["assistant"]
    content: str | list[AssistantBlock]

    def messages(self) -> list[ChatMessage]:
        """One message."""
        blocks = self.content
        if isinstance(blocks, str):
            return [ChatMessage(role="assistant", content=blocks)]
        calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
        return [
            ChatMessage(
                role="assistant",
                content="".join(block.text for block in blocks if isinstance(block, TextBlock)),
                reasoning="".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)),
                tool_calls=tuple(
                    ToolCall(id=call.id, name=call.name, arguments=dump(call.input).decode())
                    for call in calls
                ),
            )
        ]


Turn = Annotated[UserTurn | AssistantTurn, Field(discriminator="role")]


class ToolBody(Body):
    """A tool of the client's."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None

    def tool(self) -> Tool:
        """This tool as ours."""
        schema = dump(self.input_schema).decode()
        return Tool(name=self.name, description=self.description or "", parameters=schema)


class ToolChoiceBody(Body):
    """Whether tools are to be called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: Literal[False] | None = None

    def choice(self) -> ToolChoice:
        """This as ours."""
        modes = {"any": ToolMode.REQUIRED, "tool": ToolMode.NAMED}
        return ToolChoice(mode=modes.get(self.type) or ToolMode(self.type), name=self.name or "")


class Thinking(Body):
    """Whether the model should think first; a budget for it is not supported."""

    type: Literal["disabled", "enabled", "adaptive"]


class Metadata(Body):
    """A label for who asks."""

    user_id: str | None = None


class CountBody(Body):
    """A conversation whose tokens are counted."""

    model: str
    messages: list[Turn]
    system: str | list[TextBlock] | None = None
    tools: list[ToolBody] | None = None
    tool_choice: ToolChoiceBody | None = None
    thinking: Thinking | None = None

    def chat(self) -> tuple[ChatMessage, ...]:
        """All messages, the system's first."""
        system = [] if not self.system else [ChatMessage(role="system", content=text_of(self.system))]
        return (*system, *(message for turn in self.messages for message in turn.messages()))

    def all_tools(self) -> tuple[Tool, ...]:
        """The tools as ours."""
        return tuple(tool.tool() for tool in self.tools or ())

    def tokenize_input(self) -> TokenizeInput:
        """This as ours."""
        return TokenizeInput(messages=self.chat(), tools=self.all_tools())


class MessagesBody(CountBody):
    """A conversation, and how to go on with it."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def input(self, label: str) -> GenerateInput:
        """This as ours. label: the client's own."""
        sampling = SamplingInput(
            temperature=DEFAULT_TEMPERATURE if self.temperature is None else self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            max_tokens=self.max_tokens,
        )
        return GenerateInput(
            messages=self.chat(),
            sampling=sampling,
            stop=tuple(self.stop_sequences or ()),
            client_request_id=label,
            tools=self.all_tools(),
            tool_choice=None if self.tool_choice is None else self.tool_choice.choice(),
            thinking=None if self.thinking is None else self.thinking.type != "disabled",
        )


def text_of(content: str | list[TextBlock]) -> str:
    """A content's text; blocks follow each other with nothing between."""
    return content if isinstance(content, str) else "".join(block.text for block in content)
