"""What a finished step means for each of its sequences: sealed pages, tokens, stops. Pure."""

from __future__ import annotations

from pdserve.sched.binding import PageBinder
from pdserve.sched.config import SchedConfig
from pdserve.sched.plan import (
    PromptDone,
    SeqEvent,
    SeqFailed,
    SeqFinished,
    SeqKind,
    SeqStep,
    SeqStopped,
    StepResult,
    TokenSampled,
)
from pdserve.sched.roster import Roster
from pdserve.sched.sequence import Seq
from pdserve.types import FinishReason


class Outcomes:
    """Applies step results. Sequences that end leave the roster; their pages stay held for the role."""

    def __init__(self, config: SchedConfig, roster: Roster, binder: PageBinder) -> None:
        self._roster = roster
        self._binder = binder
        self._end_tokens = frozenset(config.end_token_ids)

    def settle(self, step: SeqStep, result: StepResult) -> list[SeqEvent]:
        """Events of one sequence's share of the step."""
        seq = self._roster.get(step.seq_id)
        if seq is None:
            return []
        self._binder.drop_replaced(seq)
        if seq.cancelled:
            self._roster.remove(seq)
            return [SeqStopped(seq_id=seq.seq_id)]
        if (message := _failure(step, result)) is not None:
            self._roster.remove(seq)
            label = "invalid_request" if seq.seq_id in result.refused else "internal"
            return [SeqFailed(seq_id=seq.seq_id, message=message, label=label)]
        seq.num_computed = step.start + len(step.token_ids)
        events: list[SeqEvent] = [*self._binder.seal_full(seq, step.start)]
        if seq.spec.kind is SeqKind.EVALUATE and not seq.remaining:
            self._roster.remove(seq)
            return [*events, SeqFinished(seq_id=seq.seq_id, reason=None)]
        return events + self._sampled(seq, result) if step.sample else events

    def _sampled(self, seq: Seq, result: StepResult) -> list[SeqEvent]:
        token_id, logprob = result.tokens[seq.seq_id], result.logprobs.get(seq.seq_id)
        prefill_only = seq.spec.kind is SeqKind.PREFILL_ONLY
        events: list[SeqEvent] = [*self._binder.seal_tail(seq)] if prefill_only else []
        if seq.prompt_done_due:
            seq.prompt_done_due = False
            events.append(PromptDone(seq_id=seq.seq_id))
        index = seq.num_completion
        events.append(TokenSampled(seq_id=seq.seq_id, index=index, token_id=token_id, logprob=logprob))
        seq.tokens.append(token_id)
        reason = self._stop_reason(seq, token_id)
        if prefill_only or reason is not None:
            self._roster.remove(seq)
            events.append(SeqFinished(seq_id=seq.seq_id, reason=reason))
        return events

    def _stop_reason(self, seq: Seq, token_id: int) -> FinishReason | None:
        sampling = seq.spec.sampling
        ends = token_id in self._end_tokens and not sampling.ignore_eos
        if ends or token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if seq.num_completion >= sampling.max_tokens else None


def _failure(step: SeqStep, result: StepResult) -> str | None:
    """Why the share is no good, or None."""
    if result.failed and step.seq_id in result.failed:
        return result.failed[step.seq_id]
    if step.sample and step.seq_id not in result.tokens:
        return "the engine sampled no token"
    return None
