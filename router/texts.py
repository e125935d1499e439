"""What clients ask of texts besides generating: their tokens, vectors of them, how likely they are.

What lives here: checking what is asked, and the answers. What does not: tokenisers (`router.model`), calls to
workers (`evaluate`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pdserve.api import (
    ContinuationScore,
    Embeddings,
    EmbedInput,
    GenerateInput,
    ScoreInput,
    Scores,
    TextOrTokens,
    Tokenized,
    TokenizeInput,
)
from pdserve.errors import Cancelled, InternalError, InvalidRequest, PdserveError, PromptTooLong
from pdserve.messages import EvaluateParams
from pdserve.types import FinishReason, TokenLogprob, Usage
from router.caller import ANONYMOUS, Caller
from router.calls import Metadata
from router.evaluate import Text, Told
from router.hub import Hub
from router.model import ServedModel
from router.record import TextsRecord
from router.validate import Target, check_deadline, check_fields, check_figures, check_vocabulary

T = TypeVar("T", Embeddings, Scores)
MAX_INPUTS = 64


async def tokenize(hub: Hub, source: TokenizeInput) -> Tokenized:
    """The tokens of a plain prompt, or of a chat in the model's template, as Generate would compute them.

    Raises UnknownModel, Unavailable, InvalidRequest or UnsupportedFeature, as Generate does for that input.
    """
    model = hub.served(source.model)
    asked = GenerateInput(prompt=source.prompt, messages=source.messages, tools=source.tools)
    check_fields(asked, Target(model=model.name, limits=model.limits), seed=0)
    if source.no_special_tokens and source.prompt is None:
        raise InvalidRequest.field("no_special_tokens", "is for a plain prompt; leave it out for a chat.")
    if source.prompt is None:
        ids = await model.encode(asked)
    else:
        ids = await model.encode_plain(source.prompt, special_tokens=not source.no_special_tokens)
    tokens = await model.all_bytes(ids)
    return Tokenized(ids=ids, tokens=tokens, max_context=hub.bounded(model.limits).max_context)


async def detokenize(hub: Hub, token_ids: Sequence[int], model_name: str = "") -> str:
    """The text of token ids, special tokens as they are written. Raises UnknownModel, Unavailable, or
    InvalidRequest for an id outside the vocabulary."""
    model = hub.served(model_name)
    check_vocabulary("ids", token_ids, model.limits)
    return await model.decode(token_ids)


async def embed(
    hub: Hub, source: EmbedInput, time_left_s: float | None = None, caller: Caller = ANONYMOUS
) -> Embeddings:
    """A vector for each input, of the final norm's output. time_left_s: of the caller's own deadline.

    Raises InvalidRequest, PromptTooLong, UnknownModel, Unavailable, Overloaded or DeadlineExpired.
    """
    record = hub.recorder.begin_texts("embeddings", source.model, hub.now())
    return await _request(hub, caller, record, _embed(hub, source, time_left_s, caller, record.headers))


async def _embed(
    hub: Hub, source: EmbedInput, time_left_s: float | None, caller: Caller, trace: Metadata
) -> Embeddings:
    asker = replace(_asker(hub, source.model, source.deadline_s, time_left_s, caller), trace=trace)
    _check_count("inputs", source.inputs)
    texts = [await asker.ids(each, "inputs") for each in source.inputs]
    params = EvaluateParams(pooling=source.pooling)
    told = await _all([asker.run(ids, params) for ids in texts])
    vectors = [each.result.vector for each in told]
    if not source.no_normalise:
        vectors = [_normalised(vector) for vector in vectors]
    return Embeddings(vectors=tuple(vectors), usage=_usage(texts, told))


async def score(
    hub: Hub, source: ScoreInput, time_left_s: float | None = None, caller: Caller = ANONYMOUS
) -> Scores:
    """Log-probabilities of each continuation's tokens behind the prompt. As `embed`."""
    record = hub.recorder.begin_texts("score", source.model, hub.now())
    return await _request(hub, caller, record, _score(hub, source, time_left_s, caller, record.headers))


async def _score(
    hub: Hub, source: ScoreInput, time_left_s: float | None, caller: Caller, trace: Metadata
) -> Scores:
    asker = replace(_asker(hub, source.model, source.deadline_s, time_left_s, caller), trace=trace)
    _check_count("continuations", source.continuations)
    prompt = await asker.ids(source.prompt, "prompt")
    rest = [await asker.ids(each, "continuations", alone=False) for each in source.continuations]
    texts = [prompt + ids for ids in rest]
    for ids in texts:
        asker.check_length(ids, "continuations")
    check_figures("continuations", sum(map(len, rest)))
    params = EvaluateParams(num_top=0, from_index=len(prompt))
    # The first computes the prompt's pages, which the others then find in that worker's cache.
    first = await asker.run(texts[0], params)
    near = replace(asker, near=first.incarnation)
    told = [first, *await _all([near.run(ids, params) for ids in texts[1:]])]
    scores = [await asker.score(each.result.logprobs) for each in told]
    return Scores(scores=tuple(scores), usage=_usage(texts, told))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asker:
    """Who asks, of which model, until when. trace: goes with calls to workers."""

    hub: Hub
    model: ServedModel
    deadline_at: float
    tenant: str
    near: int | None = None
    trace: Metadata = ()

    async def ids(self, value: TextOrTokens, name: str, *, alone: bool = True) -> tuple[int, ...]:
        """Checked token ids. alone: nothing is put before a text but what the model wants there."""
        if not value:
            raise InvalidRequest.field(name, "must not be empty; send at least one character or token.")
        if isinstance(value, str):
            value = await self.model.encode_plain(value, special_tokens=alone)
        check_vocabulary(name, value, self.model.limits)
        self.check_length(value, name)
        return value

    def check_length(self, token_ids: Sequence[int], name: str) -> None:
        limit = self.hub.bounded(self.model.limits).max_context
        if len(token_ids) > limit:
            raise PromptTooLong.field(name, f"has {len(token_ids)} tokens; the model's context is {limit}.")

    async def run(self, token_ids: tuple[int, ...], params: EvaluateParams) -> Told:
        text = Text(
            token_ids=token_ids,
            params=params,
            tenant=self.tenant,
            deadline_at=self.deadline_at,
            near=self.near,
            trace=self.trace,
        )
        return await self.hub.evaluator.run(text)

    async def score(self, logprobs: Sequence[TokenLogprob]) -> ContinuationScore:
        total = math.fsum(each.logprob for each in logprobs)
        return ContinuationScore(logprob=total, tokens=await self.model.all_spelled(logprobs))


def _asker(hub: Hub, model_name: str, deadline_s: float, time_left_s: float | None, caller: Caller) -> _Asker:
    limit_s = min(check_deadline(deadline_s), math.inf if time_left_s is None else time_left_s)
    model = hub.served(model_name)
    return _Asker(hub=hub, model=model, deadline_at=hub.now() + limit_s, tenant=caller.tenant)


def _check_count(name: str, values: Sequence[TextOrTokens]) -> None:
    if not 1 <= len(values) <= MAX_INPUTS:
        raise InvalidRequest.field(name, f"must be 1 to {MAX_INPUTS}.")


def _normalised(vector: tuple[float, ...]) -> tuple[float, ...]:
    length = math.sqrt(math.fsum(value * value for value in vector))
    return tuple(value / length for value in vector) if length else vector


def _usage(texts: Sequence[Sequence[int]], told: Sequence[Told]) -> Usage:
    return Usage(
        prompt_tokens=sum(map(len, texts)), cached_tokens=sum(each.result.cached_tokens for each in told)
    )


async def _request(hub: Hub, caller: Caller, record: TextsRecord, work: Coroutine[Any, Any, T]) -> T:
    """One request: counted and told of by how it ends, waited for when the router shuts down."""
    outcome: str = Cancelled.label
    usage: Usage | None = None
    try:
        with hub.guest():
            result = await work
        hub.metrics.prompt(result.usage)
        outcome, usage = FinishReason.STOP, result.usage
        return result
    except PdserveError as error:
        outcome = error.label
        raise
    except Exception:
        outcome = InternalError.label
        raise
    finally:
        work.close()
        hub.metrics.outcome(outcome)
        record.ended(outcome, caller.tenant, usage, model=hub.model_name, now=hub.now())


async def _all(work: Sequence[Coroutine[Any, Any, Told]]) -> list[Told]:
    """All results in order; the first that fails ends the others and is raised."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
