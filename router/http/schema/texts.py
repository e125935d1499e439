"""Bodies of /tokenize, /detokenize and /v1/embeddings."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pdserve.api import EmbedInput, TextOrTokens, TokenizeInput
from pdserve.errors import InvalidRequest
from router.http.schema.chat import Message, ToolBody
from router.http.schema.common import Body


class TokenizeBody(Body):
    """A prompt or a chat, as vLLM takes them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[ToolBody] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: Literal[True] | None = None
    return_token_strs: bool | None = None

    def input(self) -> TokenizeInput:
        """This as ours. Raises InvalidRequest unless it is one of the two."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest.field("prompt", "send one of prompt and messages.")
        messages = None if self.messages is None else tuple(one.message() for one in self.messages)
        return TokenizeInput(
            prompt=self.prompt,
            messages=messages,
            tools=tuple(tool.tool() for tool in self.tools or ()),
            no_special_tokens=self.add_special_tokens is False,
        )


class DetokenizeBody(Body):
    """Token ids."""

    model: str | None = None
    tokens: list[int]


class EmbedBody(Body):
    """Texts or token ids to make vectors of. dimensions: only the model's own."""

    model: str | None = None
    input: str | list[int] | list[str] | list[list[int]] = Field(description="Text, texts, ids, or lists of.")
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None

    def inputs(self) -> EmbedInput:
        """This as ours."""
        given = self.input
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            return EmbedInput(inputs=(_one(given),))
        return EmbedInput(inputs=tuple(_one(one) for one in given))


def _one(given: object) -> TextOrTokens:
    return given if isinstance(given, str) else tuple(given)  # type: ignore[arg-type]
