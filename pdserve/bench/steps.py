"""Steps to measure, as plans for the runner: a prompt in chunks, or a token of each of many sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pdserve.bench.floors import Rows
from pdserve.sched.plan import SeqStep, StepPlan
from pdserve.types import SamplingParams

PAGE = 16
PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One prompt of `context` tokens in chunks, or one decode step of `batch` sequences whose contexts are
    that long with the new token. chunk: tokens computed at once. vocab: token ids there are.
    """

    phase: str
    context: int
    batch: int = 1
    chunk: int = 512
    vocab: int = 40000

    @property
    def name(self) -> str:
        """Unique among cases of one chunk size."""
        if self.phase == PREFILL:
            return f"prefill-{self.context}"
        return f"decode-{self.batch}x{self.context}"

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return self.context if self.phase == PREFILL else self.batch

    @property
    def num_pages(self) -> int:
        """Pages the plans use: the pool's first."""
        return self.batch * -(-self.context // PAGE)

    def rows(self) -> Iterator[Rows]:
        """Each step's rows."""
        if self.phase == DECODE:
            yield Rows(queries=(1,) * self.batch, contexts=(self.context,) * self.batch, wanted=self.batch)
            return
        for start, end in self._chunks():
            yield Rows(queries=(end - start,), contexts=(end,), wanted=int(end == self.context))

    def plans(self) -> tuple[StepPlan, ...]:
        """The steps, in order."""
        if self.phase == PREFILL:
            chunks = list(self._chunks())
            return tuple(_plan([self._seq(0, start, end)]) for start, end in chunks)
        return (_plan([self._seq(i, self.context - 1, self.context) for i in range(self.batch)]),)

    def _chunks(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self.context, self.chunk):
            yield start, min(start + self.chunk, self.context)

    def _seq(self, number: int, start: int, end: int) -> SeqStep:
        each = -(-self.context // PAGE)
        return SeqStep(
            seq_id=str(number),
            token_ids=tuple((7 * row + number) % self.vocab for row in range(start, end)),
            start=start,
            pages=tuple(range(number * each, (number + 1) * each)),
            sample=end == self.context,
            sample_counter=0,
            sampling=SamplingParams(),
        )


def _plan(seqs: list[SeqStep]) -> StepPlan:
    return StepPlan(step_id=0, seqs=tuple(seqs))


def fill_plans(num_pages: int, tokens: int, vocab: int) -> Iterator[StepPlan]:
    """Real keys and values in every page of a pool: a short prompt's, copied. tokens: of the prompt."""
    case = Case(phase=PREFILL, context=min(tokens, num_pages * PAGE), chunk=tokens, vocab=vocab)
    yield from case.plans()
    used = max(1, case.context // PAGE)
    copies = tuple((page % used, page) for page in range(case.num_pages, num_pages))
    yield StepPlan(step_id=0, seqs=(), copies=copies)
