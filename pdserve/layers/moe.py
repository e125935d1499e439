"""The mixture-of-experts half of a decoder layer, for one device: route, sort, grouped SwiGLU, weighted sum.

What lives here: the order of kernels, the map from experts to slots, and the count of tokens by expert. What
does not: how tokens choose (`routers`), weights' names (`pdserve.models`), parallelism (another
`ExpertRunner` takes `LocalExperts`' place from outside).

Legend: T tokens, X experts, C choices per token, S slots, M rows = choices that count, E hidden size,
L layers, O tokens summed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pdserve.errors import ConfigError
from pdserve.kernels.activation import silu_mul
from pdserve.kernels.grouped_linear import PackedGroups, grouped_linear
from pdserve.kernels.linear import Linear
from pdserve.kernels.routing import combine, sort_by_slot
from pdserve.layers.mlp import GatedMLP
from pdserve.layers.router_loss import Spread
from pdserve.layers.routers import DROPPED, Router

SPREAD_EVERY = 16
"""Steps from one to the next whose spread over experts is counted."""


class ExpertMap:
    """Which slot (a place for an expert's weights) computes which expert. Immutable.

    slots_X: int64; one slot per expert, no slot twice.
    """

    def __init__(self, slots: Sequence[int], num_slots: int) -> None:
        """Raises ConfigError unless every expert has a slot of its own below num_slots."""
        if len(set(slots)) != len(slots) or any(not 0 <= s < num_slots for s in slots):
            raise ConfigError("an expert map must give every expert a slot of its own that exists")
        self.num_slots = num_slots
        # One more row, so that DROPPED (-1) maps to itself.
        self._slots = torch.tensor([*slots, DROPPED], dtype=torch.int64)
        self.slots_X = self._slots[:-1]

    @classmethod
    def identity(cls, num_experts: int) -> ExpertMap:
        """Expert i in slot i."""
        return cls(range(num_experts), num_experts)

    def __call__(self, experts_TC: torch.Tensor) -> torch.Tensor:
        """Slots of experts, DROPPED where dropped."""
        return self._slots[experts_TC]

    def counts(self, offsets_S: torch.Tensor) -> torch.Tensor:
        """Rows by expert. offsets_S: where each slot's rows begin, and their end."""
        return offsets_S.diff()[self.slots_X]


class ExpertLoad:
    """Tokens by layer and expert since `reset`. Written by the compute thread, read by any (a moment late).

    counts_LX: int64, choices that were computed. chosen_LX and probs_LX: sums of the `Spread` of every
    SPREAD_EVERY-th step, of which the auxiliary loss is made. Rows of layers without experts stay zero.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.counts_LX = torch.zeros(num_layers, num_experts, dtype=torch.int64)
        self.chosen_LX = torch.zeros(num_layers, num_experts, dtype=torch.int64)
        self.probs_LX = torch.zeros(num_layers, num_experts, dtype=torch.float64)
        self._steps = [0] * num_layers

    def reset(self) -> None:
        """Forgets everything counted so far."""
        for counted in (self.counts_LX, self.chosen_LX, self.probs_LX):
            counted.zero_()
        self._steps = [0] * len(self._steps)

    def add(self, layer: int, counts_X: torch.Tensor, spread: Callable[[], Spread]) -> None:
        """One step of one layer. counts_X: int64. spread: of its tokens; asked for now and then, as it costs
        a softmax."""
        self.counts_LX[layer] += counts_X
        if self._steps[layer] % SPREAD_EVERY == 0:
            of_step = spread()
            self.chosen_LX[layer] += of_step.chosen_X
            self.probs_LX[layer] += of_step.probs_X
        self._steps[layer] += 1

    def balance(self) -> torch.Tensor:
        """[L] float64: the auxiliary loss of all tokens of those steps (1: even); NaN without tokens."""
        rows = zip(self.chosen_LX, self.probs_LX, strict=True)
        return torch.stack([Spread(chosen_X=chosen, probs_X=probs).loss() for chosen, probs in rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRows:
    """What experts computed. rows_ME: one row per choice that counts. row_of_TC: int64, -1 where dropped.

    counts_X: int64, rows by expert. tokens: None, or the only ones of the step whose rows these are: then
    their sums are joined to the others' (`ExpertRunner.join`).
    """

    rows_ME: torch.Tensor
    row_of_TC: torch.Tensor
    counts_X: torch.Tensor
    tokens: range | None = None


class ExpertRunner(Protocol):
    """Computes the experts of a step, here or elsewhere. Called by the compute thread only."""

    def __call__(self, x_TE: torch.Tensor, experts_TC: torch.Tensor) -> ExpertRows:
        """A row depends on its token and expert alone. experts_TC: int64, DROPPED where nothing is wanted."""
        ...

    def join(self, out_OE: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """All of [num_tokens, E]. out_OE: the layer's output of `ExpertRows.tokens`. Called where they are
        not None."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalExperts:
    """All experts on this device. gate_up: per slot, rows of gate, then of up."""

    gate_up: PackedGroups
    down: PackedGroups
    map: ExpertMap

    def __call__(self, x_TE: torch.Tensor, experts_TC: torch.Tensor) -> ExpertRows:
        order = sort_by_slot(self.map(experts_TC), self.map.num_slots)
        x_ME = x_TE.index_select(0, order.token_of_M)
        hidden_MF = silu_mul(grouped_linear(x_ME, order.offsets_S, self.gate_up))
        return ExpertRows(
            rows_ME=grouped_linear(hidden_MF, order.offsets_S, self.down),
            row_of_TC=order.row_of_TC,
            counts_X=self.map.counts(order.offsets_S),
        )

    def join(self, out_OE: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Never called: all rows are here."""
        assert out_OE.shape[0] == num_tokens
        return out_OE


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpert:
    """An expert that every token takes. gate: the sigmoid of it scales the output (Qwen2-MoE), or None."""

    mlp: GatedMLP
    gate: Linear | None

    def __call__(self, x_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(output [T, E], gate [T] float32 before its sigmoid, or None)."""
        gate_T1 = None if self.gate is None else self.gate(x_TE, out_float32=True)
        return self.mlp(x_TE), None if gate_T1 is None else gate_T1[:, 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoE:
    """layer: index into `load`. gate: the router's logits, computed in float32 whatever the dtype."""

    layer: int
    gate: Linear
    router: Router
    experts: ExpertRunner
    shared: SharedExpert | None
    load: ExpertLoad

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        """[T, E] to [T, E]; a row that no expert takes is zero (the residual passes it on)."""
        logits_TX = self.gate(x_TE, out_float32=True)
        routing = self.router(logits_TX)
        done = self.experts(x_TE, routing.experts_TC)
        self.load.add(self.layer, done.counts_X, lambda: self.router.spread(logits_TX))
        if done.tokens is None:
            return self._sum(x_TE, done, routing.weights_TC, routing.totals_T)
        own = slice(done.tokens.start, done.tokens.stop)
        out_OE = self._sum(x_TE[own], done, routing.weights_TC[own], routing.totals_T[own])
        return self.experts.join(out_OE, x_TE.shape[0])

    def _sum(
        self, x_OE: torch.Tensor, done: ExpertRows, weights_OC: torch.Tensor, totals_O: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum of the tokens whose rows are here, and the shared expert's part."""
        shared_OE, gate_O = (None, None) if self.shared is None else self.shared(x_OE)
        return combine(done.rows_ME, done.row_of_TC, weights_OC, totals_O, shared_OE, gate_O)
