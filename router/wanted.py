"""Which completions a request wants of its prompt: how many, which of them, by beam search or not. Pure.

What lives here: those fields of a request, checked. What does not: all its other fields (`validate`).
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.api import GenerateInput, SamplingInput
from pdserve.errors import InvalidRequest, UnsupportedFeature
from pdserve.types import ModelLimits
from router.sampling import MAX_LOGPROBS, number

MAX_CHOICES = 8
MAX_LENGTH_PENALTY = 10.0
_NOT_WITH_BEAMS = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "bad_words", "grammar",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """n: choices to give. best_of: choices to make of which those are the best; n if all are given.

    beam_width: beams of a search of which n are given; 0: no search. length_penalty: see `router.beam`.
    """

    n: int = 1
    best_of: int = 1
    beam_width: int = 0
    length_penalty: float = 1.0

    @property
    def num_runs(self) -> int:
        """How many completions are made at once."""
        return max(self.best_of, self.beam_width)


def check_wanted(source: GenerateInput, limits: ModelLimits) -> Wanted:
    """Raises InvalidRequest or UnsupportedFeature that names the field."""
    for name in ("n", "best_of", "beam_width"):
        if not 0 <= getattr(source, name) <= MAX_CHOICES:
            raise InvalidRequest.field(name, f"must be a whole number from 0 to {MAX_CHOICES}.")
    n = source.n or 1
    if source.beam_width:
        return _beam_search(source, n, limits)
    if source.length_penalty is not None:
        raise InvalidRequest.field("length_penalty", "is of beam search: set beam_width, or leave it out.")
    best_of = source.best_of or n
    if best_of < n:
        raise InvalidRequest.field("best_of", f"is less than n, {n}: make as many at least.")
    return Wanted(n=n, best_of=best_of)


def _beam_search(source: GenerateInput, n: int, limits: ModelLimits) -> Wanted:
    if n > source.beam_width:
        raise InvalidRequest.field("n", f"is more than beam_width, {source.beam_width}: ask for more beams.")
    if source.best_of:
        raise InvalidRequest.field("best_of", "can not be had with beam search; leave one of them out.")
    penalty = 1.0 if source.length_penalty is None else source.length_penalty
    number("length_penalty", penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    _check_plain_search(source, limits)
    return Wanted(n=n, beam_width=source.beam_width, length_penalty=penalty)


def _check_plain_search(source: GenerateInput, limits: ModelLimits) -> None:
    """Beams are compared by the model's own probabilities: nothing may change those, nor cut a text."""
    asked = source.sampling
    plain = SamplingInput(temperature=0.0 if asked.temperature == 0 else None)
    named = {f"sampling.{name}": getattr(asked, name) != getattr(plain, name) for name in _NOT_WITH_BEAMS}
    named |= {name: bool(getattr(source, name)) for name in ("stop", "bad_words", "tools")}
    for name, given in named.items():
        if given:
            raise UnsupportedFeature.field(name, "can not be had with beam search; leave it out.")
    ends = {*asked.stop_token_ids, *(() if asked.ignore_eos else limits.end_token_ids)}
    if source.beam_width + len(ends) > MAX_LOGPROBS:  # a step looks at so many alternatives
        most = MAX_LOGPROBS - source.beam_width
        raise InvalidRequest.field("sampling.stop_token_ids", f"may be {most} here, the model's included.")
