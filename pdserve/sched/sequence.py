"""One sequence inside the scheduler: its tokens, how far it is computed, its pages. State and sums only."""

from __future__ import annotations

from pdserve.errors import InternalError
from pdserve.kvcache.allocator import Holder, HolderKind
from pdserve.kvcache.contentkeys import KeyChain
from pdserve.kvcache.layout import pages_for
from pdserve.messages import EvaluateParams
from pdserve.sched.plan import EvaluateStep, History, SeqKind, SeqSpec
from pdserve.types import SamplingParams

PATIENCE_S = 0.001
"""A request's turn comes this long after its arrival for each row it has to compute, about what that takes on
a small machine: a chat overtakes a prompt of thousands of tokens, but none that waited long enough."""


class Seq:
    """Mutable; only the scheduler's own parts touch it.

    tokens: prompt and all generated tokens. num_computed: rows in `pages`. num_shared: leading pages never
    written. copies: (source, target) pages still to be copied. replaced: sources, dropped after the copy.
    """

    __slots__ = (
        "cancelled",
        "chain",
        "copies",
        "holder",
        "needs_history",
        "num_computed",
        "num_shared",
        "order",
        "pages",
        "prompt_done_due",
        "replaced",
        "spec",
        "tokens",
        "turn",
    )

    def __init__(self, spec: SeqSpec, order: int) -> None:
        self.spec = spec
        self.order = order
        self.needs_history = needs_history(spec.sampling)
        self.holder = Holder(HolderKind.REQUEST, spec.seq_id)
        self.tokens = list(spec.token_ids)
        self.num_computed = spec.num_computed
        self.turn = spec.arrival + PATIENCE_S * (len(spec.token_ids) - spec.num_computed)
        self.pages = spec.pages
        self.num_shared = spec.num_shared
        self.chain: KeyChain | None = None
        self.copies: tuple[tuple[int, int], ...] = ()
        self.replaced: tuple[int, ...] = ()
        self.prompt_done_due = False
        self.cancelled = False

    @property
    def seq_id(self) -> str:
        return self.spec.seq_id

    @property
    def rank(self) -> tuple[int, float, int]:
        """Order of service: lower first. It never changes, so nobody is overtaken for ever."""
        return (self.spec.priority, self.turn, self.order)

    @property
    def age(self) -> tuple[float, int]:
        """Order of preemption: highest, the youngest, first."""
        return (self.spec.arrival, self.order)

    @property
    def remaining(self) -> int:
        """Rows to compute before the next token is sampled; never 0."""
        return len(self.tokens) - self.num_computed

    @property
    def num_completion(self) -> int:
        """Completion tokens so far: index and counter of the next one."""
        return len(self.tokens) - self.spec.num_prompt

    def missing_pages(self, page_size: int) -> int:
        """Pages to bind before all rows of `tokens` have a place."""
        return max(0, pages_for(len(self.tokens), page_size) - len(self.pages))

    def history(self) -> History | None:
        """For a step that samples: all tokens so far, if its next one depends on them."""
        if not self.needs_history:
            return None
        return History(token_ids=tuple(self.tokens), num_prompt=self.spec.num_prompt)

    def need_not_compute(self, num_rows: int) -> None:
        """Its turn comes sooner by rows that are cached. Only before it is in the roster."""
        self.turn -= PATIENCE_S * num_rows

    def started(self) -> None:
        """Called when it is admitted with its pages: says whether PromptDone is due (see `PromptDone`)."""
        handed_over = self.num_completion > 0 and self.remaining == 1
        self.prompt_done_due = self.spec.kind is SeqKind.PREFILL_ONLY or not handed_over

    def forget_pages(self) -> None:
        """Back to nothing computed; tokens stay, so that it goes on token-exactly."""
        self.pages = ()
        self.num_shared = self.num_computed = 0
        self.copies = ()
        self.replaced = ()


def needs_history(sampling: SamplingParams) -> bool:
    """Whether a token depends on those before it in other ways than by the model's logits."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
        or sampling.min_tokens > 0
        or bool(sampling.bad_words)
        or sampling.grammar is not None
    )


def evaluate_step(seq: Seq, params: EvaluateParams, num_rows: int) -> EvaluateStep | None:
    """What is made of the sequence's next rows; None: nothing, they are only computed."""
    start, end = seq.num_computed, seq.num_computed + num_rows
    first = max(start, params.first_row(len(seq.tokens)))
    if first >= end:
        return None
    targets = () if params.num_top is None else tuple(seq.tokens[first + 1 : end + 1])
    return EvaluateStep(num_rows=end - first, targets=targets, num_top=params.num_top)


def check_spec(spec: SeqSpec, page_size: int) -> None:
    """Raises InternalError for a spec that breaks `SeqSpec`'s rules: the role's fault, not a client's."""
    tokens = len(spec.token_ids)
    rules = {
        "num_prompt is within token_ids": 1 <= spec.num_prompt <= tokens,
        "at least one row is left to compute": 0 <= spec.num_computed < tokens,
        "pages hold the computed rows": spec.num_computed <= len(spec.pages) * page_size,
        "shared pages are among the pages": 0 <= spec.num_shared <= len(spec.pages),
        "only what is evaluated says what for": (spec.kind is SeqKind.EVALUATE)
        == (spec.evaluate is not None),
        "a token is left to generate": tokens - spec.num_prompt < spec.sampling.max_tokens,
    }
    broken = [rule for rule, good in rules.items() if not good]
    if broken:
        raise InternalError(f"a sequence was submitted that can not run: {broken[0]}")
