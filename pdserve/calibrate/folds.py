"""Where a scale between two operations goes so that it costs nothing at run time: into the weights before and
after it.

What lives here: the pairs of a dense layer, and folding. What does not: choosing scales
(`pdserve.quant.smooth`).

| pair | divided by the scale | multiplied |
|---|---|---|
| `qkv` | weight of the norm before attention | columns of q, k, v |
| `out` | rows (and bias) of v | columns of o; query heads of a KV head have its scales |
| `gate_up` | weight of the norm before the MLP | columns of gate, up |
| `down` | rows (and bias) of up | columns of down |

Folding `out` changes the values in the KV cache: a worker that folds it can exchange pages with no other
form.

Legend: N outputs, K inputs, P values that scale together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pdserve.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """before: names of what is divided (a norm's weight, or rows of a linear's weight and its bias). after:
    names of weights whose columns are multiplied. tie_K: which scale each input has, None for its own.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    tie_K: torch.Tensor | None = None


def pairs(config: ModelConfig, layer: int, *, values: bool) -> dict[str, Pair]:
    """The pairs of a layer by name. values: with `out`, which changes the cache."""
    stem = f"model.layers.{layer}."
    attention, mlp = f"{stem}self_attn.", f"{stem}mlp."
    found = {
        "qkv": Pair(
            before=(f"{stem}input_layernorm.weight",),
            after=tuple(f"{attention}{part}_proj.weight" for part in "qkv"),
        )
    }
    if values and config.clip_qkv is None:
        found["out"] = Pair(
            before=(f"{attention}v_proj.weight", f"{attention}v_proj.bias"),
            after=(f"{attention}o_proj.weight",),
            tie_K=_value_of_input(config),
        )
    return found | {
        "gate_up": Pair(
            before=(f"{stem}post_attention_layernorm.weight",),
            after=(f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"),
        ),
        "down": Pair(
            before=(f"{mlp}up_proj.weight", f"{mlp}up_proj.bias"),
            after=(f"{mlp}down_proj.weight",),
        ),
    }


def _value_of_input(config: ModelConfig) -> torch.Tensor:
    """For each input of o (query head, element): the row of v that it comes from."""
    copies = config.num_heads // config.num_kv_heads
    rows = torch.arange(config.num_kv_heads * config.head_dim).view(config.num_kv_heads, config.head_dim)
    return rows.repeat_interleave(copies, dim=0).reshape(-1)


def fold(
    weights: Mapping[str, torch.Tensor], pair: Pair, scale_P: torch.Tensor, stored: torch.dtype
) -> dict[str, torch.Tensor]:
    """The changed weights, float32. stored: the type a norm's weight is stored in; its rounding is made good
    in the columns after it.
    """
    changed: dict[str, torch.Tensor] = {}
    for name in pair.before:
        weight = weights.get(name)
        if weight is None:
            continue
        shape = (-1, 1) if weight.dim() == 2 else (-1,)
        changed[name] = weight.to(torch.float32) / scale_P.view(shape)
        if weight.dim() == 1 and len(pair.before) == 1:
            changed[name] = changed[name].to(stored).to(torch.float32)
            whole = changed[name] != 0
            scale_P = torch.where(whole, weight.to(torch.float32) / changed[name], scale_P)
    scale_K = scale_P if pair.tie_K is None else scale_P[pair.tie_K]
    for name in pair.after:
        changed[name] = weights[name].to(torch.float32) * scale_K
    return changed
