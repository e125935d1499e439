"""Router kinds: from a token's logits over the experts to the experts it takes and their weights.

What lives here: token choice (the serving default) and the capacity routers of GShard and Switch. What does
not: the layer that uses them (`moe`), products and sorting (kernels), balance losses (`router_loss`).

In token choice a token depends on itself alone. With capacity it does not: who comes first in the step takes
an expert's places, so a request's text depends on its neighbours (docs/moe.md).

Legend: T tokens of the step, X experts, C choices per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch

from pdserve.kernels.routing import TopK, route_top_k
from pdserve.layers.router_loss import Spread, probabilities

DROPPED = -1


class RouterKind(StrEnum):
    """How tokens find experts."""

    CHOICE = "token_choice"
    GSHARD = "gshard"
    SWITCH = "switch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Where a step's tokens go. experts_TC: int64, DROPPED for a choice that does not count.

    weights_TC: float32, of the outputs; of no meaning where dropped. totals_T: float32, the sum of those that
    count; exactly 1 (or their scale) where they are normalised.
    """

    experts_TC: torch.Tensor
    weights_TC: torch.Tensor
    totals_T: torch.Tensor


class Router(Protocol):
    """Called by the compute thread only. May keep a random state; changes nothing else."""

    def __call__(self, logits_TX: torch.Tensor) -> Routing:
        """logits_TX: float32."""
        ...

    def spread(self, logits_TX: torch.Tensor) -> Spread:
        """How evenly tokens of these logits go to experts. Changes nothing, the random state neither."""
        ...


def capacity(tokens: int, num_experts: int, top_k: int, factor: float) -> int:
    """Places of each expert: factor times its even share of the choices, rounded up, at least 1."""
    return max(1, math.ceil(tokens * top_k / num_experts * factor))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChoice:
    """The experts of the highest scores, no capacity. bias_X: see `route_top_k`."""

    how: TopK
    bias_X: torch.Tensor | None = None

    def __call__(self, logits_TX: torch.Tensor) -> Routing:
        experts_TC, weights_TC = route_top_k(logits_TX, self.how, self.bias_X)
        whole = self.how.normalise
        totals_T = torch.full((len(weights_TC),), self.how.scale) if whole else _sum_in_order(weights_TC)
        return Routing(experts_TC=experts_TC, weights_TC=weights_TC, totals_T=totals_T)

    def spread(self, logits_TX: torch.Tensor) -> Spread:
        """Of all choices."""
        experts_TC, _ = route_top_k(logits_TX, self.how, self.bias_X)
        return Spread.of(experts_TC, probabilities(logits_TX, sigmoid=self.how.sigmoid))


def _sum_in_order(weights_TC: torch.Tensor) -> torch.Tensor:
    """Row sums by one chain of additions, whatever the number of rows."""
    total = weights_TC[:, 0]
    for choice in range(1, weights_TC.shape[1]):
        total = total + weights_TC[:, choice]
    return total


def _places(experts_T: torch.Tensor, num_experts: int, taken_X: torch.Tensor) -> torch.Tensor:
    """How many choices of the same expert come before each token's, counting from taken_X."""
    one_hot_TX = torch.nn.functional.one_hot(experts_T, num_experts)
    before_TX = one_hot_TX.cumsum(0) - one_hot_TX + taken_X
    return before_TX.gather(1, experts_T[:, None])[:, 0]


def route_switch(logits_TX: torch.Tensor, places: int) -> Routing:
    """Switch routing (arXiv 2101.03961, section 2.1): top-1, weighted by its probability; late ones drop."""
    num_experts = logits_TX.shape[1]
    probs_TX = torch.softmax(logits_TX.float(), dim=-1)
    weights_T, experts_T = probs_TX.max(dim=-1)
    none_X = torch.zeros(num_experts, dtype=torch.int64)
    kept_T = _places(experts_T, num_experts, none_X) < places
    return Routing(
        experts_TC=torch.where(kept_T, experts_T, DROPPED)[:, None],
        weights_TC=weights_T[:, None],
        totals_T=weights_T * kept_T,
    )


def route_gshard(logits_TX: torch.Tensor, places: int, uniform_T: torch.Tensor) -> Routing:
    """GShard's top-2 gating for one group (arXiv 2006.16668, algorithm 1).

    First choices take places in order of token, then second ones, each place counted whether or not it is
    used. The second counts where twice its normalised weight exceeds uniform_T (float32 in [0, 1)).
    """
    num_experts = logits_TX.shape[1]
    experts_T2, top_T2 = route_top_k(logits_TX.float(), TopK(top_k=2, normalise=True))
    counts_X = torch.bincount(experts_T2[:, 0], minlength=num_experts)
    first_T = _places(experts_T2[:, 0], num_experts, torch.zeros_like(counts_X)) < places
    second_T = _places(experts_T2[:, 1], num_experts, counts_X) < places
    kept_T2 = torch.stack([first_T, second_T & (2 * top_T2[:, 1] > uniform_T)], dim=1)
    return Routing(
        experts_TC=torch.where(kept_T2, experts_T2, DROPPED),
        weights_TC=top_T2,
        totals_T=_sum_in_order(top_T2 * kept_T2),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchRouter:
    """`route_switch` with a capacity factor."""

    factor: float

    def __call__(self, logits_TX: torch.Tensor) -> Routing:
        tokens, num_experts = logits_TX.shape
        return route_switch(logits_TX, capacity(tokens, num_experts, 1, self.factor))

    def spread(self, logits_TX: torch.Tensor) -> Spread:
        """Whether or not a token is dropped."""
        return _first_choices(logits_TX)


class GShardRouter:
    """`route_gshard` with a capacity factor and random numbers of a seed, one after the other."""

    def __init__(self, factor: float, seed: int) -> None:
        self._factor = factor
        self._random = torch.Generator().manual_seed(seed)

    def __call__(self, logits_TX: torch.Tensor) -> Routing:
        tokens, num_experts = logits_TX.shape
        uniform_T = torch.rand(tokens, generator=self._random)
        return route_gshard(logits_TX, capacity(tokens, num_experts, 2, self._factor), uniform_T)

    def spread(self, logits_TX: torch.Tensor) -> Spread:
        """Of first choices alone, as the paper's loss."""
        return _first_choices(logits_TX)


def _first_choices(logits_TX: torch.Tensor) -> Spread:
    return Spread.of(logits_TX.argmax(dim=-1), probabilities(logits_TX))


def make_router(
    kind: RouterKind, how: TopK, bias_X: torch.Tensor | None, *, capacity_factor: float, seed: int
) -> Router:
    """The router of a layer; Switch and GShard take one and two experts and heed neither how nor bias_X."""
    if kind is RouterKind.SWITCH:
        return SwitchRouter(factor=capacity_factor)
    if kind is RouterKind.GSHARD:
        return GShardRouter(capacity_factor, seed)
    return TokenChoice(how=how, bias_X=bias_X)
