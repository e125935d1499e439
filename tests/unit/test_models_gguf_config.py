"""Reading GGUF metadata: the same model as config.json gives, RoPE scalings, refusals with a sentence."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pdserve.errors import ModelError
from pdserve.layers.rope import RopeTable
from pdserve.models.config import ModelConfig
from pdserve.models.gguf_config import config_from_gguf
from pdserve.models.gguf_weights import hf_name
from pdserve.models.hf_config import config_from_hf

LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 4096,
    "llama.embedding_length": 256,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "llama.rope.freq_base": 500_000.0,
    "llama.vocab_size": 99,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
HF: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 99,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NAMES = frozenset({"output.weight"})


def read(names: frozenset[str] = NAMES, factors: tuple[float, ...] = (), **changes: Any) -> ModelConfig:
    metadata = LLAMA | {key.replace("__", "."): value for key, value in changes.items()}
    return config_from_gguf({k: v for k, v in metadata.items() if v is not None}, names, factors)


def hf(**rope: Any) -> ModelConfig:
    return config_from_hf({**HF, "rope_parameters": {"rope_theta": 500_000.0, **rope}})


def assert_same_rope(ours: ModelConfig, theirs: ModelConfig) -> None:
    positions = torch.tensor([0, 1, 77, 4095])
    for a, b in zip(
        RopeTable(ours.rope).rows(positions), RopeTable(theirs.rope).rows(positions), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


def test_the_same_model_as_config_json_gives() -> None:
    assert read() == hf()


def test_a_missing_head_means_tied_and_biases_show_in_the_tensors() -> None:
    config = read(frozenset({"blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_gate.bias"}))
    assert (config.tied_embeddings, config.qkv_bias, config.o_bias, config.mlp_bias) == (True,) * 4


def test_vocabulary_and_kv_heads_have_defaults() -> None:
    config = read(
        llama__vocab_size=None, llama__attention__head_count_kv=None, tokenizer__ggml__tokens=["a"] * 7
    )
    assert (config.vocab_size, config.num_kv_heads) == (7, 4)


def test_linear_scaling_old_and_new_key() -> None:
    linear = hf(rope_type="linear", factor=4.0)
    assert_same_rope(read(llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0), linear)
    assert_same_rope(read(llama__rope__scale_linear=4.0), linear)


def test_yarn() -> None:
    yarn = hf(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024)
    keys = {
        "llama__rope__scaling__type": "yarn",
        "llama__rope__scaling__factor": 4.0,
        "llama__rope__scaling__original_context_length": 1024,
    }
    assert_same_rope(read(**keys), yarn)
    extra = read(**keys, llama__rope__scaling__attn_factor=0.5)
    assert extra.rope.attention_factor == pytest.approx(yarn.rope.attention_factor / 2)


def test_factors_as_llama_cpp_derives_them_are_llama3_scaling() -> None:
    llama3 = hf(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=1024,
    )
    factors = []
    for i in range(0, 64, 2):
        wavelength = 2 * math.pi * 500_000.0 ** (i / 64)
        smooth = (1024 / wavelength - 1.0) / (4.0 - 1.0)
        between = 1 / ((1 - smooth) / 8.0 + smooth)
        factors.append(1.0 if wavelength < 1024 / 4 else 8.0 if wavelength > 1024 else between)
    assert_same_rope(read(factors=tuple(factors)), llama3)


DEEPSEEK: dict[str, Any] = {
    "rope.dimension_count": 8,
    "attention.key_length": 20,
    "attention.value_length": 12,
    "attention.kv_lora_rank": 24,
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_feed_forward_length": 40,
    "leading_dense_block_count": 1,
}


def read_deepseek(**changes: Any) -> ModelConfig:
    shared = {k.removeprefix("llama."): v for k, v in LLAMA.items() if k.startswith("llama.")}
    other = {k: v for k, v in LLAMA.items() if not k.startswith(("llama.", "general."))}
    keys = {**shared, **DEEPSEEK, **{k.replace("__", "."): v for k, v in changes.items()}}
    named = {f"deepseek2.{k}": v for k, v in keys.items()}
    return config_from_gguf({**other, **named, "general.architecture": "deepseek2"}, NAMES)


def test_deepseek_by_its_scores() -> None:
    plain, v3 = read_deepseek(), read_deepseek(expert_gating_func=2, expert_group_count=4)
    assert (plain.architecture, v3.architecture) == ("deepseek_v2", "deepseek_v3")
    assert plain.experts is not None
    assert plain.experts.layers == (False, True)
    assert plain.latent is not None
    assert (plain.latent.nope_dim, plain.latent.v_dim, plain.head_dim) == (12, 12, 16)
    assert read_deepseek(leading_dense_block_count=2).experts is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"attention__kv_lora_rank": 23}, "latent rows have an odd number"),
        ({"attention__key_length": 8}, "key_length must be an integer from 9"),
        ({"expert_gating_func": 3}, "expert_gating_func must be an integer from 1 to 2"),
        ({"expert_group_count": 3}, "expert_group_count must divide the experts"),
        ({"expert_group_count": 8, "expert_group_used_count": 1}, "and leave enough of them"),
    ],
)
def test_a_deepseek_that_can_not_be_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        read_deepseek(**changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"general__architecture": "gemma"}, "'gemma' are not supported"),
        ({"general__architecture": 5}, "general.architecture must be a short text"),
        ({"llama__block_count": None}, "llama.block_count is missing"),
        ({"llama__block_count": 5000}, "must be an integer from 1 to 1024"),
        ({"llama__attention__head_count_kv": [2, 2]}, "head_count_kv must be an integer"),
        ({"llama__attention__value_length": 32}, "must equal attention.key_length"),
        ({"llama__rope__dimension_count": 32}, "must equal the head dimension"),
        ({"llama__rope__scaling__type": "longrope"}, "must be none, linear or yarn"),
        ({"llama__attention__sliding_window": 100}, "is not supported in a GGUF file"),
        ({"llama__expert_count": 8}, "expert_used_count is missing"),
        ({"llama__expert_count": 8, "llama__expert_used_count": 9}, "expert_used_count must be an integer"),
        ({"llama__expert_count": 8, "llama__expert_used_count": 2}, "expert_count asks for experts"),
        ({"general__architecture": "deepseek_v2"}, "deepseek_v2 is not a name that GGUF has"),
        ({"general__architecture": "qwen2", "qwen2__expert_count": 8}, "Mixture-of-experts models of arch"),
        ({"split__count": 3}, "one part of several"),
        ({"llama__rope__freq_base": float("nan")}, "freq_base must be a number"),
        ({"tokenizer__ggml__eos_token_id": 99}, "outside its vocabulary"),
        ({"factors": (1.0,)}, "RoPE factors do not fit"),
        ({"factors": (0.0,) * 32}, "RoPE factors do not fit"),
    ],
)
def test_what_is_not_supported_is_refused_with_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        read(**changes)


@pytest.mark.parametrize(
    "name", ["blk.00.attn_q.weight", "blk.1.ffn_gate.03.weight", "v.patch.weight", "", "x"]
)
def test_unknown_tensors_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match="no supported model has"):
        hf_name(name)
