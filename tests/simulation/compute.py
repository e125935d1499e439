"""The simulated engine: carries step plans out on row numbers, and checks S1 while it does.

Before a row is computed, every row under it must be the row of this very request's prefix: that is what
wrong KV means, seen before it can make a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.sched.plan import SeqStep, StepPlan, StepResult
from tests.simulation.model import sample

if TYPE_CHECKING:
    from tests.simulation.process import Process


class Compute:
    """The compute thread of one process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._chains: dict[str, list[int]] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        """Zeroes, copies, computes, samples."""
        process, rows = self._process, self._process.memory.rows
        size = process.shape.page_size
        for page in plan.zero_pages:
            rows[page][:] = [0] * size
        for source, target in plan.copies:
            rows[target][:] = rows[source]
        tokens: dict[str, int] = {}
        failed: dict[str, str] = {}
        for seq in plan.seqs:
            if process.fleet.is_poisoned(seq.seq_id):
                failed[seq.seq_id] = "the computation failed"
                continue
            chain = self._chain(seq)
            tainted = self._check(seq, chain)
            for row in range(seq.start, seq.start + len(seq.token_ids)):
                rows[seq.pages[row // size]][row % size] = -chain[row] - 1 if tainted else chain[row]
            if seq.sample:
                tokens[seq.seq_id] = self._sample(seq, chain[seq.start + len(seq.token_ids) - 1])
        return StepResult(step_id=plan.step_id, tokens=tokens, failed=failed or None)

    def _chain(self, seq: SeqStep) -> list[int]:
        """The rows that this request's tokens must have, up to the end of the step."""
        process, attempt = self._process, self._process.fleet.attempt(seq.seq_id)
        chain = self._chains.get(seq.seq_id)
        if chain is None:
            chain = self._chains[seq.seq_id] = list(attempt.rows)
        texts, end = process.world.texts, seq.start + len(seq.token_ids)
        for at in range(seq.start, end):
            token = seq.token_ids[at - seq.start]
            before = chain[at - 1] if at else texts.root(attempt.tenant)
            row = texts.row(before, token)
            if at < len(chain):
                if chain[at] != row:
                    raise process.world.breach(
                        "S1", f"{process.name}: {seq.seq_id} runs other tokens at row {at}"
                    )
            elif (before, token) not in process.fleet.samples.get((attempt.key, at - attempt.num_prompt), ()):
                detail = f"{process.name}: {seq.seq_id} goes on with a token that nobody sampled for it"
                raise process.world.breach("S1", detail)
            else:
                chain.append(row)
        return chain

    def _check(self, seq: SeqStep, chain: list[int]) -> bool:
        """Whether rows under the step are tainted by bytes that a fault flipped in this very pool, which a
        worker does not see when it computes: what it makes of them is wrong too, and may go nowhere."""
        process, size = self._process, self._process.shape.page_size
        rows, tainted = process.memory.rows, False
        full, rest = divmod(seq.start, size)
        for index in range(full):
            if rows[seq.pages[index]] != chain[index * size : (index + 1) * size]:
                tainted = self._wrong(seq, chain, index, size)
        if rest and rows[seq.pages[full]][:rest] != chain[full * size : seq.start]:
            tainted = self._wrong(seq, chain, full, rest)
        return tainted

    def _wrong(self, seq: SeqStep, chain: list[int], index: int, num_rows: int) -> bool:
        """Wrong KV under a request (S1), unless it is our own, flipped or computed from what was."""
        process, page = self._process, seq.pages[index]
        start, mine = index * process.shape.page_size, process.fleet.faults.flips_in(process)
        for at in range(num_rows):
            got, want = process.memory.rows[page][at], chain[start + at]
            if got != want and not (mine and got == -want - 1):
                detail = f"{process.name}: wrong KV under {seq.seq_id}: page {page} (index {index}) row {at}"
                raise process.world.breach("S1", f"{detail} is {got}, not {want}")
        return True

    def _sample(self, seq: SeqStep, row: int) -> int:
        process = self._process
        attempt = process.fleet.attempt(seq.seq_id)
        sampler = process.incarnation if attempt.sampled else 0
        token = sample(row, sampler)
        process.fleet.samples.setdefault((attempt.key, seq.sample_counter), set()).add((row, token))
        return token
