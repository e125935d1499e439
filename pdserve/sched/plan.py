"""What the step scheduler decides and what comes back, as data. A leaf of `sched`; no behaviour.

The scheduler makes a `StepPlan`, the engine's runner carries it out and answers with a `StepResult`,
and the scheduler turns that into `SeqEvent`s for the role (prefill or decode) that submitted the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from pdserve.messages import EvaluateParams
from pdserve.types import FinishReason, SamplingParams, TokenLogprob


class SeqKind(StrEnum):
    """How far this worker takes a sequence."""

    PREFILL_ONLY = "prefill_only"
    """Compute all tokens, sample one, end there (a prefill worker's share)."""
    FULL = "full"
    """Compute what is not computed yet, then decode until a stop."""
    EVALUATE = "evaluate"
    """Compute all tokens, sample none: what was asked (`SeqSpec.evaluate`) comes in the steps' results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeqSpec:
    """A sequence as it is submitted.

    token_ids: prompt, then tokens already generated (`num_generated` of them; forced or handed over).
    num_prompt: prompt length; token_ids[num_prompt:] are generated tokens with completion index 0, 1, ….
    num_computed: rows of KV already in `pages` (0 ≤ num_computed ≤ len(token_ids) - 1).
    pages: block table so far, held under Holder(request, seq_id) by whoever submits; may be longer than
    needed (growth reserve). num_shared: leading pages that are sealed and shared (never written).
    use_prefix_cache: look token_ids up and publish full pages, under keys salted with cache_salt.
    evaluate: of EVALUATE; rows before its first one may come from the prefix cache.
    arrival: when it came, for its turn (`sequence.PATIENCE_S`) and its age: the oldest is never preempted.
    """

    seq_id: str
    kind: SeqKind
    token_ids: tuple[int, ...]
    num_prompt: int
    sampling: SamplingParams
    arrival: float
    num_computed: int = 0
    pages: tuple[int, ...] = ()
    num_shared: int = 0
    use_prefix_cache: bool = True
    cache_salt: bytes = b""
    priority: int = 0
    evaluate: EvaluateParams | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateStep:
    """What is made of the last num_rows rows of a sequence's share, at least one.

    num_top: log-probabilities of `targets`, the tokens after these rows (one less at the sequence's end),
    with so many alternatives. None: the sum of their hidden states.
    """

    num_rows: int
    targets: tuple[int, ...] = ()
    num_top: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedRows:
    """What `EvaluateStep` asked for. hidden_sum: [hidden size], added in float64."""

    logprobs: tuple[TokenLogprob, ...] = ()
    hidden_sum: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All of a sequence's tokens so far: its prompt, then what was made of it from num_prompt on."""

    token_ids: tuple[int, ...]
    num_prompt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SeqStep:
    """One sequence's share of a step: rows [start, start + len(token_ids)) of its KV are computed.

    pages: block table covering at least start + len(token_ids) rows. sample: whether a token is sampled
    after the last row; its counter is `sample_counter` (the completion index of that token). history: there
    when a token is sampled that depends on more than the row (`sequence.needs_history`). evaluate: what else
    is made of its rows.
    """

    seq_id: str
    token_ids: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    sample: bool
    sample_counter: int
    sampling: SamplingParams
    history: History | None = None
    evaluate: EvaluateStep | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step. First `zero_pages` are zeroed, then `copies` (source, target) are done, then rows computed.

    Prefill chunks come after decode rows. num_tokens is the number of rows in all.
    """

    step_id: int
    seqs: tuple[SeqStep, ...]
    zero_pages: tuple[int, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.seqs)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What the runner made of a plan. tokens: sampled token by seq_id. logprobs: those of sequences that ask
    for them. failed: seq_id → message, for sequences whose own share went wrong; the others are good.
    refused: those of them that ask for what can not be.
    elapsed_s: compute time. began_s, ended_s: by the worker's monotonic clock; None where nobody stamped it.
    evaluated: by seq_id, of those that are evaluated.
    """

    step_id: int
    tokens: dict[str, int]
    elapsed_s: float = 0.0
    began_s: float | None = None
    ended_s: float | None = None
    failed: dict[str, str] | None = None
    refused: frozenset[str] = frozenset()
    logprobs: dict[str, TokenLogprob] = field(default_factory=dict)
    evaluated: dict[str, EvaluatedRows] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageReady:
    """Page `index` of the sequence is full and sealed as `page`; or it is the tail with valid_rows rows
    (only for PREFILL_ONLY, after its last row). Sent in order of index; also for cache hits at admission."""

    seq_id: str
    index: int
    page: int
    valid_rows: int
    cached: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The sequence starts (again, after a preemption); hit_tokens came from the prefix cache just now."""

    seq_id: str
    hit_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSampled:
    """Completion token `index` of the sequence. logprob: if it asks for log-probabilities."""

    seq_id: str
    index: int
    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDone:
    """All submitted tokens are computed; comes right before the first TokenSampled after a (re)start."""

    seq_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted:
    """The sequence lost its pages to an older one and waits; it will go on token-exactly."""

    seq_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SeqFinished:
    """The sequence ended by itself. Its pages are still held under its request holder. reason is None
    for PREFILL_ONLY sequences whose first token does not end the request, and for EVALUATE."""

    seq_id: str
    reason: FinishReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeqFailed:
    """The sequence's own computation went wrong; others are not touched. Pages are still held. label: of the
    error (`pdserve.errors`)."""

    seq_id: str
    message: str
    label: str = "internal"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeqStopped:
    """A cancelled sequence is out of the running step: nothing computes on its pages any more."""

    seq_id: str


SeqEvent = PageReady | Started | TokenSampled | PromptDone | Preempted | SeqFinished | SeqFailed | SeqStopped
