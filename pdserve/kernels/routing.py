"""Around the experts of a mixture: which experts a token takes, the order by expert, and the weighted sum.

What lives here: the operators and their plain forms. What does not: the products (`grouped_linear`), router
kinds with capacity (`pdserve.layers.routers`), the layer (`pdserve.layers.moe`).

Legend: T tokens, X experts, C choices per token (top-k), S slots, M rows = choices that count, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pdserve.kernels.native import DTYPE_CODE, library


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """How a token's experts follow from its logits. normalise: weights are divided by their sum, then scaled.

    sigmoid: scores are sigmoids (DeepSeek-V3, arXiv 2412.19437, section 2.1.2), otherwise a softmax. groups,
    top_groups: experts lie in equal groups, and only those of the best groups count; a group's worth is its
    best score, with sigmoids the sum of its two best (biased ones).
    """

    top_k: int
    normalise: bool
    scale: float = 1.0
    sigmoid: bool = False
    groups: int = 1
    top_groups: int = 1


def route_top_k(
    logits_TX: torch.Tensor, how: TopK, bias_X: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts_TC int64, weights_TC float32): the experts of the highest scores, the highest first.

    Equal ones come in order of their number. logits_TX: float32. bias_X: float32, added to the scores for the
    choice, not for the weights. A token's choice depends on its own logits alone.
    """
    assert logits_TX.dtype is torch.float32
    assert bias_X is None or bias_X.dtype is torch.float32
    logits_TX = logits_TX.contiguous()
    tokens, num_experts = logits_TX.shape
    experts_TC = torch.empty(tokens, how.top_k, dtype=torch.int64)
    weights_TC = torch.empty(tokens, how.top_k)
    library().pds_route_top_k(
        experts_TC.data_ptr(), weights_TC.data_ptr(), logits_TX.data_ptr(),
        None if bias_X is None else bias_X.data_ptr(),
        tokens, num_experts, how.top_k, how.groups, how.top_groups, how.sigmoid, how.normalise, how.scale,
    )  # fmt: skip
    return experts_TC, weights_TC


def route_top_k_reference(
    logits_TX: torch.Tensor, how: TopK, bias_X: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch form of `route_top_k`."""
    scores = torch.sigmoid(logits_TX) if how.sigmoid else torch.softmax(logits_TX, dim=-1)
    choice = scores if bias_X is None else scores + bias_X
    grouped = choice.view(choice.shape[0], how.groups, -1)
    best = grouped.topk(min(2 if how.sigmoid else 1, grouped.shape[2]), dim=-1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(
        1, best.topk(how.top_groups, dim=-1).indices, True
    )
    choice = grouped.masked_fill(~kept[:, :, None], float("-inf")).view_as(choice)
    order = torch.argsort(choice, dim=-1, descending=True, stable=True)[:, : how.top_k]
    weights = scores.gather(1, order)
    return order, how.scale * (weights / weights.sum(dim=-1, keepdim=True) if how.normalise else weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotOrder:
    """Choices sorted by slot, in their own order within a slot.

    offsets_S: int64 [S + 1], where each slot's rows begin. row_of_TC: int64, a choice's row, -1 for a choice
    that does not count. token_of_M: int64, a row's token.
    """

    offsets_S: torch.Tensor
    row_of_TC: torch.Tensor
    token_of_M: torch.Tensor


def sort_by_slot(slots_TC: torch.Tensor, num_slots: int) -> SlotOrder:
    """Sorts. slots_TC: int64 in [0, num_slots), or -1 for a choice that does not count."""
    assert slots_TC.dtype is torch.int64
    slots_TC = slots_TC.contiguous()
    offsets_S = torch.empty(num_slots + 1, dtype=torch.int64)
    row_of_TC = torch.empty_like(slots_TC)
    token_of = torch.empty(slots_TC.numel(), dtype=torch.int64)
    rows = library().pds_sort_by_slot(
        offsets_S.data_ptr(), row_of_TC.data_ptr(), token_of.data_ptr(), slots_TC.data_ptr(),
        *slots_TC.shape, num_slots,
    )  # fmt: skip
    return SlotOrder(offsets_S=offsets_S, row_of_TC=row_of_TC, token_of_M=token_of[:rows])


def sort_by_slot_reference(slots_TC: torch.Tensor, num_slots: int) -> SlotOrder:
    """Plain torch form of `sort_by_slot`."""
    flat = slots_TC.flatten()
    order = torch.argsort(flat, stable=True)
    choice_of_M = order[flat[order] >= 0]
    row_of = torch.full_like(flat, -1)
    row_of[choice_of_M] = torch.arange(choice_of_M.numel())
    ends = torch.bincount(flat[choice_of_M], minlength=num_slots).cumsum(0)
    return SlotOrder(
        offsets_S=torch.cat([torch.zeros(1, dtype=torch.int64), ends]),
        row_of_TC=row_of.view_as(slots_TC),
        token_of_M=choice_of_M // slots_TC.shape[1],
    )


def combine(
    rows_ME: torch.Tensor,
    row_of_TC: torch.Tensor,
    weights_TC: torch.Tensor,
    totals_T: torch.Tensor,
    shared_TE: torch.Tensor | None = None,
    shared_gate_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each token's weighted sum of its experts' rows [T, E], in float32, rounded once to rows' dtype.

    With y_a the first row that counts: total * y_a + sum of w_c * (y_c - y_a), which is sum of w_c * y_c
    where totals_T is the sum of the weights that count. In this form equal rows of weights that sum to 1
    (total 1) give exactly that row, which is why upcycled experts repeat their dense model's bits. The order
    is the token's own order of choice. Without any row that counts the sum is 0.

    row_of_TC: int64, -1 for a choice that does not count. weights_TC, totals_T: float32. shared_TE: added,
    times the sigmoid of shared_gate_T (float32) if given.
    """
    tokens, top_k = row_of_TC.shape
    rows_ME, row_of_TC, weights_TC = rows_ME.contiguous(), row_of_TC.contiguous(), weights_TC.contiguous()
    totals_T = totals_T.contiguous()
    shared_TE = None if shared_TE is None else shared_TE.contiguous()
    shared_gate_T = None if shared_gate_T is None else shared_gate_T.contiguous()
    out_TE = torch.empty(tokens, rows_ME.shape[1], dtype=rows_ME.dtype)
    library().pds_combine(
        out_TE.data_ptr(), rows_ME.data_ptr(), row_of_TC.data_ptr(), weights_TC.data_ptr(),
        totals_T.data_ptr(),
        None if shared_TE is None else shared_TE.data_ptr(),
        None if shared_gate_T is None else shared_gate_T.data_ptr(),
        tokens, top_k, rows_ME.shape[1], DTYPE_CODE[rows_ME.dtype],
    )  # fmt: skip
    return out_TE


def combine_reference(
    rows_ME: torch.Tensor,
    row_of_TC: torch.Tensor,
    weights_TC: torch.Tensor,
    totals_T: torch.Tensor,
    shared_TE: torch.Tensor | None = None,
    shared_gate_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plain torch form of `combine`: sum of w_c * y_c over the choices that count. totals_T is not needed."""
    padded = torch.cat([rows_ME.float(), torch.zeros(1, rows_ME.shape[1])])
    out = (padded[row_of_TC] * weights_TC[:, :, None]).sum(dim=1)
    if shared_TE is not None:
        scale = torch.ones(out.shape[0]) if shared_gate_T is None else torch.sigmoid(shared_gate_T)
        out = out + scale[:, None] * shared_TE.float()
    return out.to(rows_ME.dtype)
