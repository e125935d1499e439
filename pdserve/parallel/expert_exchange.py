"""Rows of tokens on their way to the ranks of their experts, and the experts' rows on their way back.

What lives here: who sends which rows, and when that is cheaper than handing all rows to all. What does not:
the experts' products and their weighted sum (`pdserve.layers.moe`), the collectives (`group`).

    SharedRows   all tokens are on all ranks (attention divided by heads). Nothing is dispatched. Experts'
                 rows come back to everybody by one gather, padded to the fullest rank; or by an all-to-all to
                 one rank per token, which sums them, and the sums are gathered.
    OwnedRows    each rank has tokens of its own (attention divided by sequences). An all-to-all there and one
                 back.

Per layer, n ranks, T tokens, C choices, even load, a rank receives (n - 1) / n times
    gather          C T rows
    all-to-all      C T / n rows of experts and T sums
    there and back  C T / n rows of experts, and of tokens not more than that or T: each goes to a rank once
so that the all-to-all wins over the gather from n > C / (C - 1) ranks on, and sooner where load is uneven: a
gather is as long as its fullest rank. It has one call more, so it must save LEAST_SAVING.

Nothing is added across ranks: a token's weighted sum is one rank's, in the token's own order of choice.
Kernels such as DeepEP's fit as another `ExpertExchange`, as long as they bring rows and leave the sum to us.

Legend: T tokens that lie on this rank, O those of which it gets the experts' rows, C choices per token,
S slots of all ranks, R ranks, U tokens that arrived, M rows of our slots, N rows that came back, E hidden
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Protocol

import torch

from pdserve.kernels.routing import SlotOrder, sort_by_slot
from pdserve.parallel.group import Group
from pdserve.parallel.shards import split

LEAST_SAVING = 1 << 20
"""Bytes. Counting and a second call cost more than few bytes do: benchmarks/results/expert_exchange.json."""

LEAST_IN_PLACE = 256 << 10
"""Bytes of gathered rows from which it is cheaper to find them where they are than to put them together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched:
    """Rows for our slots, in order of slot, each slot's in order of rank and token.

    offsets_S: int64 [our slots + 1], where each slot's rows begin. all_offsets_S: int64 [S + 1], the same
    over the rows of all ranks, wherever they are. order: of the choices of the tokens that lie here.
    slots_TC: as dispatched. source_M: each row's rank, where rows were sent; counts: rows by the rank of
    their slot, then of their token.
    """

    x_ME: torch.Tensor
    offsets_S: torch.Tensor
    all_offsets_S: torch.Tensor
    order: SlotOrder
    slots_TC: torch.Tensor
    counts: Sequence[Sequence[int]] = ()
    source_M: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """Experts' rows of tokens. row_of_OC: int64, -1 where dropped. tokens: which ones of the step, so that
    `join` must follow; None: all that lie here.
    """

    rows_NE: torch.Tensor
    row_of_OC: torch.Tensor
    tokens: range | None = None


class ExpertExchange(Protocol):
    """Called by every rank of a group in the same order; raises what the group raises. The three methods
    follow one another; the last one only where `combine` says which tokens are ours.

    alike: whether all ranks dispatch the same rows.
    """

    alike: ClassVar[bool]

    def dispatch(self, x_TE: torch.Tensor, slots_TC: torch.Tensor) -> Dispatched:
        """Brings the rows of our slots. slots_TC: int64, -1 for a choice that does not count."""
        ...

    def combine(self, rows_ME: torch.Tensor, sent: Dispatched) -> Returned:
        """Brings experts' rows back to tokens. rows_ME: of sent.x_ME, in its order."""
        ...

    def join(self, out_OE: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """All tokens' sums, [T, E], on every rank. out_OE: of `Returned.tokens`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRows:
    """All tokens on all ranks, with the same slots. slots: by rank, one after the other. least_saving: bytes
    that an all-to-all must spare the busiest rank; negative: always all to all.
    """

    alike: ClassVar[bool] = True
    slots: tuple[range, ...]
    group: Group
    least_saving: int = LEAST_SAVING

    def dispatch(self, x_TE: torch.Tensor, slots_TC: torch.Tensor) -> Dispatched:
        """See ExpertExchange."""
        order = sort_by_slot(slots_TC, self.slots[-1].stop)
        own = self.slots[self.group.rank]
        offsets_S = order.offsets_S[own.start : own.stop + 1]
        begin, end = offsets_S[[0, -1]].tolist()
        return Dispatched(
            x_ME=x_TE.index_select(0, order.token_of_M[begin:end]),
            offsets_S=offsets_S - begin,
            all_offsets_S=order.offsets_S,
            order=order,
            slots_TC=slots_TC,
        )

    def combine(self, rows_ME: torch.Tensor, sent: Dispatched) -> Returned:
        """See ExpertExchange."""
        bounds = sent.all_offsets_S[[0, *(part.stop for part in self.slots)]].tolist()
        tokens = split(len(sent.slots_TC), self.group.size)
        # Small steps are spared the counting: even without rows to send a gather would be as good.
        if self._saves((), bounds, tokens, rows_ME):
            owner_M = torch.bucketize(
                sent.order.token_of_M, torch.tensor([t.stop for t in tokens]), right=True
            )
            counts = _table(owner_M, bounds, self.group.size)
            if self._saves(counts, bounds, tokens, rows_ME):
                return self._to_owners(rows_ME, sent, owner_M, counts)
        return self._to_all(rows_ME, sent, bounds)

    def _to_all(self, rows_ME: torch.Tensor, sent: Dispatched, bounds: Sequence[int]) -> Returned:
        """By a gather, in order of slot. Many rows stay where it put them, padding between them."""
        counts = [end - begin for begin, end in pairwise(bounds)]
        most = max(counts)
        if most * self.group.size * rows_ME.shape[1] * rows_ME.itemsize < LEAST_IN_PLACE:
            return Returned(rows_NE=gather_rows(rows_ME, counts, self.group), row_of_OC=sent.order.row_of_TC)
        whole = self.group.gather(_padded(rows_ME, most))
        rank_TC = torch.bucketize(sent.order.row_of_TC, torch.tensor(bounds[1:-1]), right=True)
        shift_R = torch.tensor([rank * most - begin for rank, begin in enumerate(bounds[:-1])])
        # Rank 0's rows are not shifted, and dropped ones (-1) go with them.
        return Returned(rows_NE=whole.flatten(0, 1), row_of_OC=sent.order.row_of_TC + shift_R[rank_TC])

    def _to_owners(
        self, rows_ME: torch.Tensor, sent: Dispatched, owner_M: torch.Tensor, counts: list[list[int]]
    ) -> Returned:
        """By an all-to-all. owner_M: of the rows of all ranks."""
        rank = self.group.rank
        own = split(len(sent.slots_TC), self.group.size)[rank]
        begin = int(sent.all_offsets_S[self.slots[rank].start])
        by_owner_M = torch.argsort(owner_M[begin : begin + len(rows_ME)], stable=True)
        return Returned(
            rows_NE=self.group.all_to_all(rows_ME.index_select(0, by_owner_M), counts),
            # From rank after rank, each in order of slot: the very order of our tokens' choices alone.
            row_of_OC=sort_by_slot(sent.slots_TC[own.start : own.stop], self.slots[-1].stop).row_of_TC,
            tokens=own,
        )

    def join(self, out_OE: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """See ExpertExchange."""
        return gather_rows(out_OE, [len(own) for own in split(num_tokens, self.group.size)], self.group)

    def _saves(
        self,
        counts: Sequence[Sequence[int]],
        bounds: Sequence[int],
        tokens: Sequence[range],
        rows_ME: torch.Tensor,
    ) -> bool:
        """Whether the all-to-all of these counts is worth its second call. The same on all ranks."""
        others, row_bytes = self.group.size - 1, rows_ME.shape[1] * rows_ME.itemsize
        gathered = others * max(end - begin for begin, end in pairwise(bounds))
        moved = others * len(tokens[0]) + busiest(counts)
        return (gathered - moved) * row_bytes > self.least_saving


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedRows:
    """Each rank has tokens of its own, any number of them. slots: by rank, one after the other."""

    alike: ClassVar[bool] = False
    slots: tuple[range, ...]
    group: Group

    def dispatch(self, x_TE: torch.Tensor, slots_TC: torch.Tensor) -> Dispatched:
        """See ExpertExchange. A token goes once to each rank that has experts of it, with its slots beside
        it."""
        order = sort_by_slot(slots_TC, self.slots[-1].stop)
        token_U, counts_R = self._wanted(slots_TC)
        told = self.group.gather(torch.cat([order.offsets_S.diff(), counts_R]))
        sizes_RS, counts_RR = told[:, : -self.group.size], told[:, -self.group.size :]
        packed = _packed(x_TE.index_select(0, token_U), slots_TC.index_select(0, token_U))
        arrived = self.group.all_to_all(packed, counts_RR.tolist())
        x_UE, slots_UC = _unpacked(arrived, x_TE)
        own, rank = self.slots[self.group.rank], self.group.rank
        ours_UC = (slots_UC >= own.start) & (slots_UC < own.stop)
        here = sort_by_slot(torch.where(ours_UC, slots_UC - own.start, -1), len(own))
        source_U = torch.arange(self.group.size).repeat_interleave(counts_RR[:, rank])
        return Dispatched(
            x_ME=x_UE.index_select(0, here.token_of_M),
            offsets_S=here.offsets_S,
            all_offsets_S=_offsets(sizes_RS.sum(0)),
            order=order,
            slots_TC=slots_TC,
            counts=torch.stack([sizes_RS[:, part.start : part.stop].sum(1) for part in self.slots]).tolist(),
            source_M=source_U[here.token_of_M],
        )

    def _wanted(self, slots_TC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(token of each row to send, in order of rank, then of token; rows by rank)."""
        stops = torch.tensor([part.stop for part in self.slots])
        rank_TC = torch.bucketize(slots_TC, stops, right=True)
        wanted_TR = torch.zeros(len(slots_TC), self.group.size + 1, dtype=torch.bool)
        wanted_TR.scatter_(1, torch.where(slots_TC < 0, self.group.size, rank_TC), True)
        wanted_RT = wanted_TR[:, :-1].T
        return wanted_RT.nonzero()[:, 1], wanted_RT.sum(1)

    def combine(self, rows_ME: torch.Tensor, sent: Dispatched) -> Returned:
        """See ExpertExchange."""
        assert sent.source_M is not None
        # To each rank in order of slot, then of its tokens: the very order of its choices.
        by_source_M = torch.argsort(sent.source_M, stable=True)
        rows_NE = self.group.all_to_all(rows_ME.index_select(0, by_source_M), sent.counts)
        return Returned(rows_NE=rows_NE, row_of_OC=sent.order.row_of_TC)

    def join(self, out_OE: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Nothing is to be joined: tokens stay where they are."""
        assert out_OE.shape[0] == num_tokens
        return out_OE


def gather_rows(ours: torch.Tensor, counts: Sequence[int], group: Group) -> torch.Tensor:
    """All ranks' rows in order of rank, on every rank. counts: rows by rank. Short ones are padded."""
    most = max(counts)
    if most == 0:
        return ours
    whole = group.gather(_padded(ours, most))
    return torch.cat([rows[:count] for rows, count in zip(whole, counts, strict=True)])


def _padded(ours: torch.Tensor, most: int) -> torch.Tensor:
    if len(ours) == most:
        return ours.contiguous()
    padded = ours.new_zeros(most, *ours.shape[1:])
    padded[: len(ours)] = ours
    return padded


def _packed(x_UE: torch.Tensor, slots_UC: torch.Tensor) -> torch.Tensor:
    """Bytes of both, row by row."""
    return torch.cat([x_UE.view(torch.uint8), slots_UC.to(torch.int32).view(torch.uint8)], dim=1)


def _unpacked(packed: torch.Tensor, like_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, slots int64)."""
    width = like_TE.shape[1] * like_TE.itemsize
    x_UE, slots_UC = packed[:, :width].contiguous(), packed[:, width:].contiguous()
    return x_UE.view(like_TE.dtype), slots_UC.view(torch.int32).long()


def busiest(counts: Sequence[Sequence[int]]) -> int:
    """Rows that the busiest rank of an all-to-all sends to others or gets from them."""
    columns = list(zip(*counts, strict=True))
    return max(
        (max(sum(row), sum(columns[r])) - row[r] for r, row in enumerate(counts)),
        default=0,
    )


def _table(owner_M: torch.Tensor, bounds: Sequence[int], size: int) -> list[list[int]]:
    """Rows from each rank to each. owner_M: by row of all ranks."""
    rank_M = torch.arange(size).repeat_interleave(torch.tensor(bounds).diff())
    counts: list[list[int]] = (
        torch.bincount(rank_M * size + owner_M, minlength=size**2).view(size, size).tolist()
    )
    return counts


def _offsets(sizes: torch.Tensor) -> torch.Tensor:
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
