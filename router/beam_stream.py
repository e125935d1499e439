"""Beam search over workers: each beam's next token is a run of one token on the worker that has its pages.

A run finds the full pages of its prompt and its beam in that worker's prefix cache; a beam that dies has
nothing to free, as its run has ended. A worker that dies costs its runs a try: they know their beam's tokens.
What does not live here: which beams go on (`beam`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from pdserve.api import Admitted, ChoiceEnd, Chunk, End, StreamEvent
from pdserve.types import PeerRef, SamplingParams
from router.beam import Beam, BeamSearch, EndedBeam
from router.choices import Merged, summed
from router.job import Job
from router.validate import ValidRequest


async def beams(job: Job) -> AsyncIterator[StreamEvent]:
    """The n best of `beam_width` beams, best first, once the search is over. Tokens of those count."""
    request, wanted = job.request, job.request.wanted
    search = BeamSearch(
        width=wanted.beam_width, max_tokens=request.sampling.max_tokens, end_ids=request.stop_ids,
        length_penalty=wanted.length_penalty, min_tokens=request.sampling.min_tokens,
    )  # fmt: skip
    pinned: PeerRef | None = None
    whole: End | None = None
    while not search.done:
        async with Merged(job) as merged:
            runs = [
                job.start(_expansion(request, beam, search), pinned=pinned, remember=False)
                for beam in search.beams
            ]
            for run in runs:
                merged.add(run)
            chunks: dict[str, Chunk] = {}
            async for run, event in merged.events():
                if isinstance(event, Chunk):
                    chunks[run.request_id] = event
                elif isinstance(event, End):
                    whole = event if whole is None else summed((whole, event))
                elif isinstance(event, Admitted) and run.request_id == job.request_id:
                    yield event
        pinned = runs[0].decode_worker
        search.step([chunks[run.request_id].logprobs[0].top for run in runs])
    best = search.ended[: wanted.n]
    for number, ended in enumerate(best):
        chunk, choice_end = _told(job, ended, number)
        yield chunk
        yield choice_end
    assert whole is not None
    yield _end(whole, best)


def _expansion(request: ValidRequest, beam: Beam, search: BeamSearch) -> ValidRequest:
    """The request for one token after a beam, with what could have come in its place."""
    num = max(request.sampling.logprobs or 0, search.num_alternatives)
    return replace(
        request,
        token_ids=request.token_ids + beam.token_ids,
        sampling=SamplingParams(max_tokens=1, ignore_eos=True, logprobs=num),
        stop_ids=frozenset(),
        want_text=False,
    )


def _told(job: Job, ended: EndedBeam, number: int) -> tuple[Chunk, ChoiceEnd]:
    """A beam as a choice."""
    asked = job.request.sampling.logprobs
    out = job.output(job.request, number)
    for token in ended.beam.tokens:
        out.push(token.token_id, None if asked is None else replace(token, top=token.top[:asked]))
    out.finish()
    return out.take(), replace(out.end(ended.finish), cumulative_logprob=ended.beam.total)


def _end(whole: End, best: Sequence[EndedBeam]) -> End:
    usage = replace(whole.usage, completion_tokens=sum(len(entry.beam.tokens) for entry in best))
    return replace(whole, finish_reason=best[0].finish, usage=usage)
