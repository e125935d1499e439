"""Beam search over one prompt, as a pure state machine: which beams go on, and which are best.

What lives here: scores, when a beam ends, when the search does. What does not: who computes log-probabilities
(`beam_stream`). Equal to transformers' `generate(num_beams=..., early_stopping=False)`: scores are sums of
log-probabilities over length ^ length_penalty; a beam that ends with an end token counts if it is among the
`width` best of its step; the search is over when the best open beam, scored at its present length, is not
better than the worst of `width` ended ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdserve.types import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Beam:
    """Completion tokens so far, each with its log-probability and alternatives. total: their sum."""

    tokens: tuple[TokenLogprob, ...] = ()
    total: float = 0.0

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token.token_id for token in self.tokens)

    def then(self, token: TokenLogprob, top: tuple[TokenLogprob, ...]) -> Beam:
        """This beam and one token more. top: what could have come in its place."""
        made = replace(token, top=top)
        return Beam(tokens=(*self.tokens, made), total=self.total + token.logprob)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedBeam:
    """score: what beams are compared by."""

    beam: Beam
    score: float
    finish: FinishReason


class BeamSearch:
    """One search. While it is not `done`, give `step` what may follow each of `beams`."""

    def __init__(
        self,
        *,
        width: int,
        max_tokens: int,
        end_ids: frozenset[int] = frozenset(),
        length_penalty: float = 1.0,
        min_tokens: int = 0,
    ) -> None:
        """end_ids: tokens that end a beam, but not before it has `min_tokens`."""
        self._width, self._max_tokens = width, max_tokens
        self._end_ids, self._min_tokens = end_ids, min_tokens
        self._length_penalty = length_penalty
        self._length = 0
        self.beams: tuple[Beam, ...] = (Beam(),)
        self.ended: tuple[EndedBeam, ...] = ()
        self.done = False

    @property
    def num_alternatives(self) -> int:
        """How many of the likeliest tokens `step` must see of each beam: `width` of them do not end it."""
        return self._width + len(self._end_ids)

    def step(self, alternatives: Sequence[tuple[TokenLogprob, ...]]) -> None:
        """alternatives: for each of `beams`, the likeliest next tokens, best first."""
        ends = self._end_ids if self._length >= self._min_tokens else frozenset()
        never = self._end_ids - ends
        longer = [
            beam.then(token, top)
            for beam, top in zip(self.beams, alternatives, strict=True)
            for token in top
            if token.token_id not in never
        ]
        longer.sort(key=lambda beam: -beam.total)
        self._length += 1
        last = self._length == self._max_tokens
        over = [beam for beam in longer[: self._width] if last or beam.tokens[-1].token_id in ends]
        ended = sorted((*self.ended, *map(self._end, over)), key=lambda entry: -entry.score)
        self.ended = tuple(ended[: self._width])
        going_on = [beam for beam in longer if beam.tokens[-1].token_id not in ends]
        self.beams = () if last else tuple(going_on[: self._width])
        self.done = not self.beams or not self._can_improve(self.beams[0])

    def _can_improve(self, best: Beam) -> bool:
        return len(self.ended) < self._width or self._score(best) > self.ended[-1].score

    def _end(self, beam: Beam) -> EndedBeam:
        finish = FinishReason.STOP if beam.tokens[-1].token_id in self._end_ids else FinishReason.LENGTH
        return EndedBeam(beam=beam, score=self._score(beam), finish=finish)

    def _score(self, beam: Beam) -> float:
        return float(beam.total / len(beam.tokens) ** self._length_penalty)
