"""What one completion has given and its client has not taken yet: tokens, their log-probabilities, text.

Not here: when tokens come (`lifecycle`), where they go (`request`, `choices`), the text itself (`model`).
"""

from __future__ import annotations

from collections.abc import Callable

from pdserve.api import ChoiceEnd, Chunk
from pdserve.chat.parts import Part, joined
from pdserve.types import FinishReason, TokenLogprob
from router.model import TextStream
from router.validate import ValidRequest

Spell = Callable[[TokenLogprob], TokenLogprob]
"""Adds the bytes of tokens to a log-probability and its alternatives."""


class Output:
    """One choice of one request. Every token goes in once and in order."""

    def __init__(
        self, request: ValidRequest, text: TextStream | None, spell: Spell, *, choice: int = 0
    ) -> None:
        """text: None where neither text is wanted nor a stop text can come."""
        self._text, self._spell, self._choice = text, spell, choice
        self._want_text, self._stop_ids = request.want_text, request.stop_ids
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._parts: list[Part] = []
        self._num_tokens = 0
        self._last_id = -1
        self._sum: float | None = None

    @property
    def waits(self) -> bool:
        """Whether there is something to take."""
        return bool(self._ids or self._parts)

    @property
    def stopped(self) -> bool:
        """Whether a stop text was found."""
        return self._text is not None and self._text.stopped

    def push(self, token_id: int, logprob: TokenLogprob | None) -> None:
        """The next token."""
        self._ids.append(token_id)
        self._num_tokens, self._last_id = self._num_tokens + 1, token_id
        if logprob is not None:
            self._logprobs.append(self._spell(logprob))
            self._sum = (self._sum or 0.0) + logprob.logprob
        if self._text is not None:
            self._give(self._text.push(token_id))

    def finish(self) -> None:
        """No token follows: what text was held back is certain now."""
        if self._text is not None:
            self._give(self._text.finish())

    def take(self) -> Chunk:
        """All that came since it was last called."""
        part = joined(self._parts)
        chunk = Chunk(
            index=self._num_tokens - len(self._ids), token_ids=tuple(self._ids), text=part.text,
            choice=self._choice, logprobs=tuple(self._logprobs), reasoning=part.reasoning,
            tool_calls=part.tool_calls,
        )  # fmt: skip
        self._ids, self._logprobs, self._parts = [], [], []
        return chunk

    def end(self, finish: FinishReason) -> ChoiceEnd:
        """How the choice ended, and by what."""
        stop_text = self._text.stop_text if self._text is not None else ""
        by_token = finish is FinishReason.STOP and not stop_text and self._last_id in self._stop_ids
        return ChoiceEnd(
            choice=self._choice, finish_reason=finish, completion_tokens=self._num_tokens,
            stop_text=stop_text, stop_token_id=self._last_id if by_token else None,
            cumulative_logprob=self._sum,
        )  # fmt: skip

    def _give(self, part: Part) -> None:
        if self._want_text and part:
            self._parts.append(part)
