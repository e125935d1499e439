"""How evenly a router spreads tokens: the auxiliary balance loss, to train with and to watch in serving.

What lives here: the formula, once for sums that a worker counts and once differentiable. What does not: how
tokens choose (`routers`), counting (`moe`), metrics.

The loss is X * sum over experts of f_x * P_x (Switch, arXiv 2101.03961, equations 4 to 6): f_x is the share
of the choices that are x, before capacity drops any, and P_x the mean of the tokens' probabilities of x. It
is 1 where both are even, and X where all tokens are sure of the same expert. GShard's (arXiv 2006.16668,
algorithm 1) is the same of first choices alone, divided by X^2. With more choices than one the shares sum to
1 too, so a value does not grow with their number (transformers' loss of Mixtral is top_k times ours).

Legend: T tokens, X experts, C choices per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """What the loss of some tokens is made of; the spread of more tokens is the sum.

    chosen_X: int64, how many choices fell on each expert. probs_X: float64, sums of probabilities.
    """

    chosen_X: torch.Tensor
    probs_X: torch.Tensor

    @classmethod
    def of(cls, experts_TC: torch.Tensor, probs_TX: torch.Tensor) -> Spread:
        """experts_TC: int64, what was chosen, none dropped. probs_TX: rows sum to 1."""
        chosen_X = torch.bincount(experts_TC.flatten(), minlength=probs_TX.shape[1])
        return cls(chosen_X=chosen_X, probs_X=probs_TX.sum(0, dtype=torch.float64))

    def loss(self) -> torch.Tensor:
        """A scalar, float64; NaN without tokens."""
        return _loss(self.chosen_X.double(), self.probs_X)


def _loss(chosen_X: torch.Tensor, probs_X: torch.Tensor) -> torch.Tensor:
    return chosen_X.shape[0] * (chosen_X * probs_X).sum() / (chosen_X.sum() * probs_X.sum())


def probabilities(logits_TX: torch.Tensor, *, sigmoid: bool = False) -> torch.Tensor:
    """Rows that sum to 1, in float32 or better: a softmax, or sigmoids over their sum (DeepSeek-V3, arXiv
    2412.19437, equation 19).
    """
    logits_TX = logits_TX.to(torch.promote_types(logits_TX.dtype, torch.float32))
    if not sigmoid:
        return torch.softmax(logits_TX, dim=-1)
    scores_TX = torch.sigmoid(logits_TX)
    return scores_TX / scores_TX.sum(-1, keepdim=True)


class BalanceLoss(torch.nn.Module):
    """The loss of one layer's router in training, times its coefficient. Gradients flow through the
    probabilities; who chose whom is taken as it is, as in the paper.

    top_k: choices of a token. weight: the coefficient, alpha of the paper. sigmoid: see `probabilities`.
    """

    def __init__(self, *, top_k: int = 1, weight: float = 0.01, sigmoid: bool = False) -> None:
        super().__init__()
        self.top_k, self.weight, self.sigmoid = top_k, weight, sigmoid

    def forward(self, logits_TX: torch.Tensor, experts_TC: torch.Tensor | None = None) -> torch.Tensor:
        """A scalar of the probabilities' dtype. experts_TC: the choices where they are not the top_k of the
        logits (a bias, groups of experts)."""
        if experts_TC is None:
            experts_TC = logits_TX.topk(self.top_k, dim=-1).indices
        probs_TX = probabilities(logits_TX, sigmoid=self.sigmoid)
        chosen_X = torch.bincount(experts_TC.flatten(), minlength=logits_TX.shape[-1])
        return self.weight * _loss(chosen_X.to(probs_TX.dtype), probs_TX.sum(0))
