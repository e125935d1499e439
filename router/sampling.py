"""Sampling as asked into SamplingParams, every number within its limits, or an error naming the field.

What lives here: sampling's own fields, and checks of single numbers. What does not: what depends on the
prompt's length, and all else of a request (`router.validate`).
"""

from __future__ import annotations

import math

from pdserve.api import SamplingInput
from pdserve.errors import InvalidRequest
from pdserve.types import ModelLimits, SamplingParams

MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 10.0
MAX_PENALTY = 2.0
MAX_BIASES, MAX_BIAS = 1024, 100.0
MAX_STOP_IDS = 64
MAX_BAD_WORDS, MAX_BAD_WORD_IDS = 64, 16
MAX_LOGPROBS = 20


def sampling_params(asked: SamplingInput, limits: ModelLimits, seed: int) -> SamplingParams:
    """Everything but max_tokens, which depends on the prompt; see `router.validate` for the defaults.

    seed: used if the request names none. Raises InvalidRequest.
    """
    if asked.max_tokens is not None:
        whole("sampling.max_tokens", asked.max_tokens, 1, 2**32 - 1)
    return SamplingParams(
        temperature=_or("sampling.temperature", asked.temperature, 0.0, MAX_TEMPERATURE, default=0.0),
        top_k=_whole_or("sampling.top_k", asked.top_k, 0, limits.vocab_size, default=0),
        top_p=_open("sampling.top_p", asked.top_p, 1.0, default=1.0),
        min_p=_below_one("sampling.min_p", asked.min_p),
        seed=_whole_or("sampling.seed", asked.seed, 0, 2**64 - 1, default=seed),
        stop_token_ids=_stop_token_ids(asked.stop_token_ids, limits),
        ignore_eos=asked.ignore_eos,
        typical_p=_open("sampling.typical_p", asked.typical_p, 1.0, default=1.0),
        repetition_penalty=_open(
            "sampling.repetition_penalty", asked.repetition_penalty, MAX_REPETITION_PENALTY, default=1.0
        ),
        presence_penalty=_penalty("sampling.presence_penalty", asked.presence_penalty),
        frequency_penalty=_penalty("sampling.frequency_penalty", asked.frequency_penalty),
        logit_bias=_logit_bias(asked.logit_bias, limits),
        min_tokens=_whole_or("sampling.min_tokens", asked.min_tokens, 0, 2**32 - 1, default=0),
        bad_words=_bad_words(asked.bad_words, limits),
        logprobs=None
        if asked.logprobs is None
        else whole("sampling.logprobs", asked.logprobs, 0, _top(limits)),
        grammar=asked.grammar,
    )


def _top(limits: ModelLimits) -> int:
    return min(MAX_LOGPROBS, limits.vocab_size)


def _stop_token_ids(token_ids: tuple[int, ...], limits: ModelLimits) -> tuple[int, ...]:
    _at_most("sampling.stop_token_ids", len(token_ids), MAX_STOP_IDS, "ids")
    for token_id in token_ids:
        _token("sampling.stop_token_ids", token_id, limits)
    return token_ids


def _logit_bias(biases: tuple[tuple[int, float], ...], limits: ModelLimits) -> tuple[tuple[int, float], ...]:
    name = "sampling.logit_bias"
    _at_most(name, len(biases), MAX_BIASES, "ids")
    for token_id, bias in biases:
        _token(name, token_id, limits)
        number(name, bias, -MAX_BIAS, MAX_BIAS)
    if len({token_id for token_id, _ in biases}) < len(biases):
        raise InvalidRequest.field(name, "names an id twice; give each id once.")
    return tuple(sorted(biases))


def _bad_words(words: tuple[tuple[int, ...], ...], limits: ModelLimits) -> tuple[tuple[int, ...], ...]:
    name = "sampling.bad_words"
    _at_most(name, len(words), MAX_BAD_WORDS, "sequences")
    for word in words:
        if not 1 <= len(word) <= MAX_BAD_WORD_IDS:
            raise InvalidRequest.field(name, f"each must have 1 to {MAX_BAD_WORD_IDS} ids.")
        for token_id in word:
            _token(name, token_id, limits)
    return words


def _token(name: str, token_id: int, limits: ModelLimits) -> None:
    whole(name, token_id, 0, limits.vocab_size - 1)


def _at_most(name: str, count: int, most: int, what: str) -> None:
    if count > most:
        raise InvalidRequest.field(name, f"may have {most} {what} at most.")


def _penalty(name: str, value: float | None) -> float:
    return _or(name, value, -MAX_PENALTY, MAX_PENALTY, default=0.0)


def number(name: str, value: float, low: float, high: float) -> float:
    """A finite number in [low, high]; raises InvalidRequest."""
    if not math.isfinite(value) or not low <= value <= high:
        bounds = f"from {low:g} to {high:g}" if math.isfinite(high) else f"of at least {low:g}"
        raise InvalidRequest.field(name, f"must be a number {bounds}.")
    return value


def whole(name: str, value: int, low: int, high: int) -> int:
    """A whole number in [low, high]; raises InvalidRequest."""
    if not low <= value <= high:
        raise InvalidRequest.field(name, f"must be a whole number from {low} to {high}.")
    return value


def _or(name: str, value: float | None, low: float, high: float, *, default: float) -> float:
    return default if value is None else number(name, value, low, high)


def _whole_or(name: str, value: int | None, low: int, high: int, *, default: int) -> int:
    return default if value is None else whole(name, value, low, high)


def _open(name: str, value: float | None, high: float, *, default: float) -> float:
    """A number in (0, high]."""
    if value is None:
        return default
    if not 0.0 < value <= high:
        raise InvalidRequest.field(name, f"must be a number above 0 and at most {high:g}.")
    return value


def _below_one(name: str, value: float | None) -> float:
    """A number in [0, 1); 0 if it is not given."""
    if value is None:
        return 0.0
    if not 0.0 <= value < 1.0:
        raise InvalidRequest.field(name, "must be a number at least 0 and below 1.")
    return value
