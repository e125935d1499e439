"""A rank whose sequences are its own: which part of a step it computes, and how rank 0 gets all logits.

What lives here: the split of a plan by home, taking part without rows, and logits on their way to rank 0.
What does not: choosing homes (`pdserve.kvcache.manager`), the model between (`pdserve.models.sharded_rows`).

All ranks have the whole plan, so each knows how many rows of logits every other one has.

Legend: T tokens of ours, R rows of ours that are looked at, A rows of all ranks that are, E hidden size,
V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from pdserve.engine.batch import build_batch, num_wanted
from pdserve.kernels.kv_view import KVView
from pdserve.kvcache.homes import Homes
from pdserve.models.sharded_rows import OwnRowsDecoder
from pdserve.parallel.group import Group
from pdserve.sched.plan import SeqStep, StepPlan


class OwnRows:
    """Of one rank; its compute thread's."""

    def __init__(self, homes: Homes, group: Group) -> None:
        """homes: by rank, of the pages of all."""
        self.homes = homes
        self._group = group

    def part(self, plan: StepPlan) -> StepPlan:
        """The plan with our pages alone among those to zero and to copy."""
        return dataclasses.replace(
            plan,
            zero_pages=tuple(page for page in plan.zero_pages if self._ours(page)),
            copies=tuple((source, target) for source, target in plan.copies if self._ours(target)),
        )

    def fault(self, seq: SeqStep) -> str | None:
        """Why a sequence with pages that exist can not be computed, or None."""
        if len({self.homes.home(page) for page in seq.pages}) > 1:
            return "its block table names pages of several ranks"
        return None

    def compute(
        self, decoder: OwnRowsDecoder, seqs: Sequence[SeqStep], kv: KVView, *, hidden: bool = False
    ) -> tuple[tuple[SeqStep, ...], torch.Tensor]:
        """Our rows of a step, together with the other ranks.

        Returns the sequences of rows A and their logits [A, V], in order of rank, on rank 0; of no use on the
        others. hidden: the states before the head instead [A, E]. Raises what the group raises.
        """
        by_rank: list[list[SeqStep]] = [[] for _ in range(self._group.size)]
        for seq in seqs:
            by_rank[self.homes.home(seq.pages[0])].append(seq)
        own = by_rank[self._group.rank]
        if own:
            batch = build_batch(own, kv.page_size)
            x_RE = decoder.hidden(batch.token_ids_T, kv, batch.meta, batch.logit_rows_R)
        else:
            x_RE = decoder.take_part()
        wanted = [[seq for seq in of_rank if num_wanted(seq)] for of_rank in by_rank]
        rows = [sum(map(num_wanted, of_rank)) for of_rank in wanted]
        results = self._to_first(x_RE if hidden else decoder.logits(x_RE), rows)
        return tuple(seq for of_rank in wanted for seq in of_rank), results

    def _ours(self, page: int) -> bool:
        return self.homes.home(page) == self._group.rank

    def _to_first(self, results: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """rows: of results, by rank."""
        if not any(rows[1:]):
            return results
        others = [0] * (self._group.size - 1)
        return self._group.all_to_all(results.contiguous(), [[count, *others] for count in rows])


def everywhere(plan: StepPlan, homes: Homes) -> StepPlan:
    """A plan of warming up, on pages of home 0, as the same on pages of every home at once."""
    first = [homes.pages(home).start for home in range(homes.num_homes)]
    seqs = (
        dataclasses.replace(seq, seq_id=f"{seq.seq_id}@{at}", pages=tuple(at + page for page in seq.pages))
        for at in first
        for seq in plan.seqs
    )
    zero = (at + page for at in first for page in plan.zero_pages)
    return dataclasses.replace(plan, seqs=tuple(seqs), zero_pages=tuple(zero))
