"""The mixture of experts that a config.json describes: how many, how wide, in which layers, how chosen.

What lives here: reading and checking those fields. What does not: the rest of the configuration
(`hf_config`), weights.
"""

from __future__ import annotations

from pdserve.layers.routers import RouterKind
from pdserve.models.config import MAX_EXPERTS, MAX_LAYERS, MAX_WIDTH, Architecture, ExpertsConfig
from pdserve.models.fields import Fields

ROUTER = "pdserve_router"
"""Our own field: an object with kind, capacity_factor and seed, for routers with capacity (docs/moe.md)."""


def experts_from_hf(fields: Fields, arch: Architecture, num_layers: int) -> ExpertsConfig | None:
    """None for a family without experts. Raises ModelError for values that do not fit together."""
    family = arch.experts
    if family is None:
        return None
    count = "num_experts" if fields.has("num_experts") else "num_local_experts"
    num_experts = fields.integer(count, 1, MAX_EXPERTS, family.num_experts)
    layers = _layers(fields, num_layers) if family.sparse_layers else (True,) * num_layers
    if not any(layers):
        fields.refuse("decoder_sparse_step", "leaves no layer with experts")
    router = fields.mapping(ROUTER)
    kind = router.text("kind", RouterKind.CHOICE)
    if kind not in list(RouterKind):
        router.refuse("kind", f"must be one of {', '.join(RouterKind)}")
    return ExpertsConfig(
        num_experts=num_experts,
        top_k=fields.integer("num_experts_per_tok", 1, num_experts, family.top_k),
        intermediate_size=fields.integer(family.width_field, 1, MAX_WIDTH, family.width),
        normalise=fields.flag("norm_topk_prob", False) if family.normalise is None else family.normalise,
        layers=layers,
        shared_size=_shared_size(fields, family.shared_size),
        router=RouterKind(kind),
        capacity_factor=router.number("capacity_factor", 0, 1000, 1.25),
        seed=router.integer("seed", 0, 2**63 - 1, 0),
    )


def _shared_size(fields: Fields, default: int) -> int:
    return fields.integer("shared_expert_intermediate_size", 1, MAX_WIDTH, default) if default else 0


def _layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Every decoder_sparse_step-th layer has experts, except those that mlp_only_layers lists."""
    step = fields.integer("decoder_sparse_step", 1, MAX_LAYERS, 1)
    dense = fields.raw("mlp_only_layers") or []
    if not isinstance(dense, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in dense):
        fields.refuse("mlp_only_layers", "must be a list of layers")
    return tuple((i + 1) % step == 0 and i not in dense for i in range(num_layers))
