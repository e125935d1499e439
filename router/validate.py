"""A client's request into a ValidRequest, or a typed error naming the field. Only that goes further.

Two steps, as tokenising lies between them: `check_fields` sees all but token ids, `check_prompt` the ids.
Documented defaults: temperature 0 (greedy), top_k 0, top_p 1, min_p 0, typical_p 1, no penalties, a drawn
seed, max_tokens 256 (never past the context), a deadline of 600 s, priority 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdserve.api import GenerateInput, SamplingInput
from pdserve.chat.parser import ChatPlan
from pdserve.errors import InvalidRequest, NeverFits, PromptTooLong, UnknownModel, UnsupportedFeature
from pdserve.types import ModelLimits, SamplingParams
from router.sampling import MAX_LOGPROBS, number, sampling_params, whole
from router.validate_chat import check_chat
from router.wanted import Wanted, check_wanted

DEFAULT_MAX_TOKENS = 256
DEFAULT_DEADLINE_S = MAX_DEADLINE_S = 600.0
AS_MANY_AS_FIT = 2**32 - 1
"""As max_tokens: to the end of the context, or as many as the largest pool holds."""
MAX_STOP_TEXTS, MAX_STOP_BYTES = 16, 256
MAX_PRIORITY = 100
MAX_FIGURES = 180_000
"""Log-probabilities in one answer: they fill most of a message of 4 MB."""
MAX_LABEL_BYTES = 128
_TRACE_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What requests are checked against. capacity: KV rows of the largest empty pool, None if not known."""

    model: str
    limits: ModelLimits
    capacity: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A request whose fields are in order; its prompt is not tokenised yet. max_tokens None: the default."""

    source: GenerateInput
    sampling: SamplingParams
    max_tokens: int | None
    deadline_s: float
    wanted: Wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidRequest:
    """What the rest of the router sees. stop_ids: ids that end the stream, the model's own included. chat:
    how a chat's answer is read."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: tuple[str, ...]
    stop_ids: frozenset[int]
    deadline_s: float
    priority: int
    client_request_id: str
    use_prefix_cache: bool
    trace_id: str
    want_text: bool
    wanted: Wanted
    chat: ChatPlan | None = None


def check_fields(source: GenerateInput, target: Target, *, seed: int) -> Checked:
    """Everything but token ids. seed: used if the request names none.

    Raises InvalidRequest, UnsupportedFeature or UnknownModel, whose message names the field.
    """
    if source.model and source.model != target.model:
        raise UnknownModel("model: this server does not serve that model; GetModel tells which it serves.")
    _check_input(source)
    _check_plain(source)
    _check_stop(source.stop)
    _check_grammar(source.sampling)
    return Checked(
        source=source,
        sampling=sampling_params(source.sampling, target.limits, seed),
        max_tokens=source.sampling.max_tokens,
        wanted=check_wanted(source, target.limits),
        deadline_s=check_deadline(source.deadline_s),
    )


def check_figures(name: str, num_figures: int) -> None:
    """Raises InvalidRequest for more log-probabilities, alternatives included, than one message holds."""
    if num_figures > MAX_FIGURES:
        raise InvalidRequest.field(
            name, f"asks for {num_figures} log-probabilities, {MAX_FIGURES} at most: send fewer tokens."
        )


def check_vocabulary(name: str, token_ids: Sequence[int], limits: ModelLimits) -> None:
    """Raises InvalidRequest for an id that the model does not have."""
    size = limits.vocab_size
    if max(token_ids, default=0) >= size or min(token_ids, default=0) < 0:
        raise InvalidRequest.field(name, f"ids must be below the vocabulary size, {size}.")


def check_deadline(deadline_s: float) -> float:
    """Seconds that a request may take, the default for 0. Raises InvalidRequest."""
    return number("deadline_s", deadline_s, 0.0, MAX_DEADLINE_S) or DEFAULT_DEADLINE_S


def with_bad_words(checked: Checked, words: tuple[tuple[int, ...], ...]) -> Checked:
    """The same, with what its bad texts are spelled by."""
    sampling = checked.sampling
    return replace(checked, sampling=replace(sampling, bad_words=sampling.bad_words + words))


def check_prompt(
    checked: Checked, token_ids: tuple[int, ...], target: Target, chat: ChatPlan | None = None
) -> ValidRequest:
    """The prompt's ids, and how much completion fits behind them. chat: how a chat's answer is read.

    Raises InvalidRequest (empty, or an id outside the vocabulary), PromptTooLong or NeverFits.
    """
    limits = target.limits
    if not token_ids:
        raise InvalidRequest.field("prompt", "is empty; send at least one token.")
    check_vocabulary("tokens", token_ids, limits)
    source, sampling = checked.source, checked.sampling
    if chat is not None and chat.grammar is not None:
        sampling = replace(sampling, grammar=chat.grammar)
    if source.prompt_logprobs is not None:
        check_figures("prompt_logprobs", len(token_ids) * (1 + source.prompt_logprobs))
    max_tokens = _max_tokens(checked.max_tokens, len(token_ids), target)
    if sampling.min_tokens > max_tokens:
        raise InvalidRequest.field("sampling.min_tokens", f"is more than max_tokens, which is {max_tokens}.")
    stops = frozenset(sampling.stop_token_ids)
    return ValidRequest(
        token_ids=token_ids,
        sampling=replace(sampling, max_tokens=max_tokens),
        stop=source.stop,
        stop_ids=stops if sampling.ignore_eos else stops | frozenset(limits.end_token_ids),
        deadline_s=checked.deadline_s,
        priority=source.priority,
        client_request_id=source.client_request_id,
        use_prefix_cache=not source.no_prefix_cache,
        trace_id=source.trace_id,
        want_text=not source.no_text,
        wanted=checked.wanted,
        chat=chat,
    )


def _max_tokens(asked: int | None, num_prompt: int, target: Target) -> int:
    """Clamped to what is left of the context; what no pool can hold is refused if it was asked for."""
    left = target.limits.max_context - num_prompt
    if left < 1:
        raise PromptTooLong(
            f"The prompt has {num_prompt} tokens; the model's context is {target.limits.max_context}, "
            "one of which is the answer's: send a shorter prompt."
        )
    wanted = min(DEFAULT_MAX_TOKENS if asked is None else asked, left)
    if target.capacity is None or num_prompt + wanted <= target.capacity:
        return wanted
    if asked in (None, AS_MANY_AS_FIT) and num_prompt < target.capacity:
        return target.capacity - num_prompt
    raise NeverFits(
        f"The prompt and max_tokens need {num_prompt + wanted} tokens of KV cache; the largest worker "
        f"holds {target.capacity}: ask for less, or start workers with more KV memory."
    )


def _check_input(source: GenerateInput) -> None:
    given = [value for value in (source.prompt, source.messages, source.token_ids) if value is not None]
    if len(given) != 1:
        raise InvalidRequest.field("input", "send exactly one of prompt, chat and tokens.")
    if source.prompt == "":
        raise InvalidRequest.field("prompt", "is empty; send at least one character.")
    if source.token_ids == ():
        raise InvalidRequest.field("tokens", "is empty; send at least one token.")
    check_chat(source)


def _check_plain(source: GenerateInput) -> None:
    if source.prompt_logprobs is not None:
        whole("prompt_logprobs", source.prompt_logprobs, 0, MAX_LOGPROBS)
    if number("resume_window_s", source.resume_window_s, 0.0, math.inf) > 0:
        raise UnsupportedFeature.field("resume_window_s", "resuming is not supported yet; send 0.")
    whole("priority", source.priority, -MAX_PRIORITY, MAX_PRIORITY)
    if len(source.client_request_id.encode()) > MAX_LABEL_BYTES:
        raise InvalidRequest.field("client_request_id", f"may have {MAX_LABEL_BYTES} bytes at most.")
    if source.trace_id and not _TRACE_ID.fullmatch(source.trace_id):
        raise InvalidRequest.field("trace_id", "must be 32 lower-case hex digits.")


def _check_grammar(sampling: SamplingInput) -> None:
    """What it can not go together with; the grammar itself is compiled later (`router.grammars`)."""
    if sampling.grammar is not None and sampling.ignore_eos:
        raise InvalidRequest.field(
            "sampling.ignore_eos", "can not go with a grammar: an end token is how its answers end."
        )


def _check_stop(stop: tuple[str, ...]) -> None:
    if len(stop) > MAX_STOP_TEXTS:
        raise InvalidRequest.field("stop", f"may have {MAX_STOP_TEXTS} texts at most.")
    for text in stop:
        if not text or len(text.encode()) > MAX_STOP_BYTES:
            raise InvalidRequest.field("stop", f"each text must have 1 to {MAX_STOP_BYTES} bytes.")
