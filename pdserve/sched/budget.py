"""How many rows of a step each sequence gets. Pure sums; see `SchedConfig` for the meaning of the sizes."""

from __future__ import annotations

from collections.abc import Iterable

from pdserve.sched.config import SchedConfig
from pdserve.sched.plan import SeqKind
from pdserve.sched.sequence import Seq


class Budget:
    """Rows left for prefill chunks in the step being planned."""

    def __init__(self, config: SchedConfig, num_decode_rows: int) -> None:
        self._config = config
        self.left = max(config.token_budget - num_decode_rows, config.least_prefill_rows)

    @classmethod
    def after(cls, config: SchedConfig, seqs: Iterable[Seq]) -> Budget:
        """What is left once every sequence in `seqs` (in order of service) has its share."""
        seqs = tuple(seqs)
        budget = cls(config, sum(seq.remaining == 1 for seq in seqs))
        for seq in seqs:
            budget.share(seq)
        return budget

    def may_start(self, seq: Seq) -> bool:
        """Whether a waiting sequence would get a share in this step."""
        return self.left >= (self._chunk(seq) if self._config.deterministic else 1)

    def share(self, seq: Seq) -> int:
        """Rows that the sequence gets; 0: none in this step. A single row is never refused."""
        if seq.remaining == 1:
            return 1
        rows = self._chunk(seq)
        if rows > self.left:
            rows = 0 if self._config.deterministic else self.left
        # A whole chunk that has to wait closes the step: nobody behind it goes first.
        self.left = self.left - rows if rows else 0
        return rows

    def _chunk(self, seq: Seq) -> int:
        """Rows up to the next absolute chunk border, or to the end of the tokens; see also `tail_tokens`."""
        size, tail = self._config.chunk_tokens, self._config.tail_tokens
        end = min((seq.num_computed // size + 1) * size, len(seq.tokens))
        last = len(seq.tokens) - end
        handed_over = seq.spec.kind is SeqKind.PREFILL_ONLY and not self._config.deterministic
        if handed_over and tail and 2 * tail < last <= size:
            page = self._config.page_size  # whole pages before the tail, so that all of them move meanwhile
            end = max(end, (len(seq.tokens) - tail) // page * page)  # large pages: no border behind it
        return end - seq.num_computed
