"""The prompt as its request gets it back: its tokens, its text and its tokens' log-probabilities.

What lives here: making a PromptInfo. What does not: when it is sent (`hub`), calls to workers (`evaluate`).
"""

from __future__ import annotations

from pdserve.api import GenerateInput, PromptInfo
from pdserve.messages import EvaluateParams
from pdserve.types import TokenLogprob
from router.evaluate import Evaluator, Text
from router.job import Job


async def prompt_info(job: Job, source: GenerateInput, evaluator: Evaluator) -> PromptInfo:
    """The prompt as it was given, or as its tokens are written; log-probabilities if they are asked for.
    Raises what `Evaluator.run` does."""
    token_ids, text = job.request.token_ids, source.prompt or ""
    if source.prompt is None and not source.no_text:
        text = await job.model.decode(token_ids)
    logprobs: tuple[TokenLogprob, ...] = ()
    if source.prompt_logprobs is not None:
        logprobs = await _logprobs(job, source.prompt_logprobs, evaluator)
    return PromptInfo(token_ids=token_ids, text="" if source.no_text else text, logprobs=logprobs)


async def _logprobs(job: Job, num_top: int, evaluator: Evaluator) -> tuple[TokenLogprob, ...]:
    """One for each token; nothing says how likely the first one is: it has 0 and no alternatives."""
    request, shared = job.request, job.shared
    found = [TokenLogprob(token_id=request.token_ids[0], logprob=0.0)]
    if len(request.token_ids) > 1:
        text = Text(
            token_ids=request.token_ids, params=EvaluateParams(num_top=num_top), tenant=shared.tenant,
            cache_salt=shared.cache_salt, deadline_at=shared.deadline_at, priority=request.priority,
            use_prefix_cache=request.use_prefix_cache,
        )  # fmt: skip
        found += (await evaluator.run(text)).result.logprobs
    return await job.model.all_spelled(found)
