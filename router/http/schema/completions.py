"""Body of /v1/completions."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pdserve.api import GenerateInput
from pdserve.errors import InvalidRequest
from router.http.schema.common import SamplingBody

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 64


class CompletionBody(SamplingBody):
    """One prompt or several, as texts or token ids."""

    prompt: str | list[int] | list[str] | list[list[int]] = Field(
        description="Text, texts, ids, or lists of."
    )
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Literal[""] | None = None
    add_special_tokens: Literal[True] | None = None

    def prompts(self) -> list[str | tuple[int, ...]]:
        """Each prompt by itself. Raises InvalidRequest for none, or too many."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if given and isinstance(given[0], int):
            return [tuple(given)]
        if not 1 <= len(given) <= MAX_PROMPTS:
            raise InvalidRequest.field("prompt", f"must hold 1 to {MAX_PROMPTS} prompts.")
        return [one if isinstance(one, str) else tuple(one) for one in given]  # type: ignore[arg-type]

    def inputs(self, label: str) -> list[GenerateInput]:
        """One request for each prompt. label: the client's own."""
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        sampling = self.sampling(max_tokens=max_tokens, logprobs=self.logprobs)
        echoed = self.logprobs if self.echo else None
        return [
            GenerateInput(
                prompt=one if isinstance(one, str) else None,
                token_ids=None if isinstance(one, str) else one,
                sampling=sampling,
                stop=self.stops(),
                priority=self.priority or 0,
                client_request_id=label,
                bad_words=tuple(self.bad_words or ()),
                best_of=self.best_of or 0,
                echo=bool(self.echo or self.return_token_ids),
                prompt_logprobs=echoed if self.prompt_logprobs is None else self.prompt_logprobs,
                **self.choices(),
            )
            for one in self.prompts()
        ]
