"""Configurations and weights of experts: what is read, what is refused with a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.engine.runner import page_layout
from pdserve.errors import ConfigError, ModelError
from pdserve.layers.moe import ExpertMap
from pdserve.layers.routers import DROPPED, RouterKind
from pdserve.models.hf_config import config_from_hf
from pdserve.models.loader import load_model
from pdserve.models.sharded import shard_config
from pdserve.parallel.shards import shards
from tests.support import tiny_models, tiny_moe

BASE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def read(model_type: str, **fields: Any) -> Any:
    return config_from_hf({**BASE, "model_type": model_type, **fields})


def test_families_defaults_are_those_of_transformers() -> None:
    mixtral, qwen2 = read("mixtral").experts, read("qwen2_moe").experts
    qwen3, olmoe = read("qwen3_moe").experts, read("olmoe").experts
    assert (mixtral.num_experts, mixtral.top_k, mixtral.normalise) == (8, 2, True)
    assert (mixtral.intermediate_size, mixtral.shared_size) == (128, 0)
    assert (qwen2.num_experts, qwen2.top_k, qwen2.normalise, qwen2.shared_size) == (60, 4, False, 5632)
    assert (qwen3.num_experts, qwen3.top_k, qwen3.intermediate_size) == (128, 8, 768)
    assert (olmoe.num_experts, olmoe.top_k, olmoe.intermediate_size) == (64, 8, 128)
    assert all(x.router is RouterKind.CHOICE for x in (mixtral, qwen2, qwen3, olmoe))
    assert read("mixtral").rope.theta == 1e6
    assert read("mixtral").windows == (0,) * 4
    assert read("qwen3_moe", use_sliding_window=True, sliding_window=9).windows == (9,) * 4
    assert read("llama").experts is None


def test_layers_with_experts() -> None:
    config = read("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[3])
    assert config.experts.layers == (False, True, False, False)
    assert [config.has_experts(i) for i in range(4)] == [False, True, False, False]
    assert not read("llama").has_experts(0)


def test_deepseek_defaults_and_the_shape_of_its_pages() -> None:
    v3, v2 = read("deepseek_v3"), read("deepseek_v2", num_experts_per_tok=6, q_lora_rank=None)
    assert v3.experts.layers == (False, False, False, True)
    assert (v3.experts.num_experts, v3.experts.top_k, v3.experts.groups, v3.experts.top_groups) == (
        256,
        8,
        8,
        4,
    )
    assert (v3.experts.sigmoid, v3.experts.biased, v3.experts.normalise, v3.experts.scale) == (
        True,
        True,
        True,
        2.5,
    )
    assert (v3.experts.shared_size, v3.experts.shared_gate) == (2048, False)
    assert (v2.experts.num_experts, v2.experts.groups, v2.experts.sigmoid, v2.experts.shared_size) == (
        64,
        1,
        False,
        2814,
    )
    assert (v3.latent.q_rank, v2.latent.q_rank, v3.latent.kv_rank) == (1536, None, 512)
    assert read("deepseek_v2", num_experts_per_tok=6, first_k_dense_replace=9).experts is None
    layout = page_layout(v3, page_size=16, dtype="bfloat16")
    assert layout.page_bytes == 4 * 16 * (512 + 64) * 2
    plain = page_layout(read("mixtral"), page_size=16, dtype="bfloat16")
    assert layout.inner != plain.inner


def test_latent_rows_are_every_rank_s_and_heads_are_divided() -> None:
    config = read("deepseek_v3")
    own = [shard_config(config, shard) for shard in shards(config, 3)]
    assert [(c.num_heads, c.num_kv_heads, c.head_dim) for c in own] == [(n, 1, 288) for n in (2, 1, 1)]


def test_a_router_with_capacity_is_asked_for_by_name() -> None:
    router = {"kind": "gshard", "capacity_factor": 2, "seed": 5}
    experts = read("mixtral", pdserve_router=router).experts
    assert (experts.router, experts.capacity_factor, experts.seed) == (RouterKind.GSHARD, 2.0, 5)


@pytest.mark.parametrize(
    ("model_type", "fields", "sentence"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok must be an integer from 1 to 8"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts must be an integer"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size must be"),
        ("qwen3_moe", {"decoder_sparse_step": 5}, "decoder_sparse_step leaves no layer with experts"),
        ("qwen3_moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers must be a list of layers"),
        ("mixtral", {"pdserve_router": {"kind": "hash"}}, "kind must be one of token_choice, gshard, switch"),
        ("mixtral", {"pdserve_router": {"kind": "switch"}}, "its switch router takes 1 expert"),
        ("mixtral", {"pdserve_router": 3}, "pdserve_router must be an object"),
        ("deepseek_v3", {"n_group": 3, "topk_group": 1}, "n_group must divide the experts"),
        (
            "deepseek_v3",
            {"n_group": 128, "topk_group": 1},
            "n_group must divide the experts and leave enough",
        ),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method is not one that this family has"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq must be 1"),
        ("deepseek_v3", {"kv_lora_rank": 5}, "kv_lora_rank must make an even number"),
        ("deepseek_v2", {"num_experts_per_tok": 2, "norm_topk_prob": True}, "norm_topk_prob must be false"),
        ("deepseek_v2", {"num_experts_per_tok": 2, "mlp_bias": True}, "mlp_bias must be false"),
        ("deepseek_v2", {}, "num_experts_per_tok is missing"),
    ],
)
def test_what_does_not_fit_is_refused(model_type: str, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        read(model_type, **fields)


def _without_one(tensors: dict[str, torch.Tensor], stem: str) -> None:
    del tensors[f"{stem}.2.w1.weight"]


def _with_a_gap(tensors: dict[str, torch.Tensor], stem: str) -> None:
    for part in ("w1", "w3"):
        del tensors[f"{stem}.2.{part}.weight"]


def _with_one_narrower(tensors: dict[str, torch.Tensor], stem: str) -> None:
    tensors[f"{stem}.2.w1.weight"] = tensors[f"{stem}.2.w1.weight"][:-1].clone()


def _with_too_many(tensors: dict[str, torch.Tensor], stem: str) -> None:
    for part in ("w1", "w2", "w3"):
        tensors[f"{stem}.6.{part}.weight"] = tensors[f"{stem}.2.{part}.weight"].clone()


def _twice(tensors: dict[str, torch.Tensor], stem: str) -> None:
    tensors["model.layers.1.mlp.experts.down_proj"] = torch.zeros(6, 64, 96)


def _under_both_names(tensors: dict[str, torch.Tensor], stem: str) -> None:
    tensors["model.layers.1.mlp.experts.2.gate_proj.weight"] = tensors[f"{stem}.2.w1.weight"].clone()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (_without_one, "lack some experts of model.layers.1.mlp.experts.gate_up_proj"),
        (_with_a_gap, "lack some experts of model.layers.1.mlp.experts.gate_up_proj"),
        (_with_one_narrower, "have different shapes"),
        (_with_too_many, "has another shape than the configuration says"),
        (_twice, "twice: stacked and by expert"),
        (_under_both_names, "or hold them twice"),
    ],
)
def test_damaged_experts_are_refused(
    damage: Callable[[dict[str, torch.Tensor], str], None], sentence: str, tmp_path: Path
) -> None:
    tiny_models.save(tiny_moe.mixtral(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors, "model.layers.1.block_sparse_moe.experts")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=sentence):
        load_model(str(tmp_path), "float32")


def test_a_config_without_the_experts_weights_says_what_is_missing(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.mistral(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"lack 9 of its weights, model.layers.0.mlp.experts.down_proj"):
        load_model(str(tmp_path), "float32")


def test_an_expert_map_gives_every_expert_a_slot_of_its_own() -> None:
    slots = ExpertMap([2, 0, 3], num_slots=4)
    assert slots(torch.tensor([[0, 1], [DROPPED, 2]])).tolist() == [[2, 0], [DROPPED, 3]]
    assert slots.slots_X.tolist() == [2, 0, 3]
    assert ExpertMap.identity(3).slots_X.tolist() == [0, 1, 2]
    for wrong in ([0, 0], [0, 4], [-1, 2]):
        with pytest.raises(ConfigError, match="slot of its own"):
            ExpertMap(wrong, num_slots=4)
