"""Reading config.json: families' defaults as transformers has them, a sentence for what is not supported."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.errors import ModelError
from pdserve.models.hf_config import config_from_hf

BASE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "eos_token_id": [3, 2],
    "bos_token_id": 1,
}
QWEN = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}


def read(**fields: Any) -> Any:
    return config_from_hf({**BASE, **fields})


def test_llama_defaults() -> None:
    config = read()
    assert (config.num_kv_heads, config.head_dim, config.windows) == (4, 16, (0, 0, 0, 0))
    assert (config.end_token_ids, config.bos_token_id) == ((2, 3), 1)
    assert not any((config.qkv_bias, config.o_bias, config.mlp_bias, config.tied_embeddings))
    limits = config.limits()
    assert (limits.vocab_size, limits.max_context, limits.end_token_ids) == (100, 256, (2, 3))


def test_mistral_has_a_window_unless_it_is_null() -> None:
    mistral = {"model_type": "mistral", "architectures": None, "num_key_value_heads": 2}
    assert read(**mistral).windows == (4096,) * 4
    assert read(**mistral, sliding_window=9).windows == (9,) * 4
    assert read(**mistral, sliding_window=None).windows == (0,) * 4


def test_absent_kv_heads_are_the_family_s_default_and_null_means_all_heads() -> None:
    qwen3 = {"model_type": "qwen3", "architectures": None}
    assert read(**qwen3, num_attention_heads=32).num_kv_heads == 32
    assert read(**qwen3, num_key_value_heads=None).num_kv_heads == 4


def test_qwen_windows_by_layer() -> None:
    assert read(**QWEN, sliding_window=9).windows == (0,) * 4
    windowed = {**QWEN, "use_sliding_window": True, "sliding_window": 9}
    assert read(**windowed, max_window_layers=3).windows == (0, 0, 0, 9)
    layers = ["sliding_attention", "full_attention"] * 2
    assert read(**windowed, layer_types=layers).windows == (9, 0, 9, 0)


def test_qwen_has_biases_on_qkv_alone_and_qwen3_norms_on_heads() -> None:
    qwen2 = read(**QWEN)
    assert qwen2.qkv_bias
    assert not qwen2.o_bias
    qwen3 = read(model_type="qwen3", architectures=["Qwen3ForCausalLM"], num_key_value_heads=2)
    assert (qwen3.qk_norm, qwen3.head_dim, qwen3.qkv_bias) == (True, 128, False)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"model_type": "gpt2"}, "not supported; supported are: llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "model_type is missing"),
        ({"model_type": 7}, "model_type must be a short text"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures must name LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be an integer"),
        ({"hidden_size": True}, "hidden_size must be an integer"),
        ({"hidden_size": 2**40}, "hidden_size must be an integer from 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer from 1"),
        ({"num_key_value_heads": 3}, "not a multiple of its KV heads"),
        ({"head_dim": 15}, "head dimension is odd"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": 100}, "outside its vocabulary"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "must be the same for all layers"),
        ({"rope_scaling": {"type": "su", "factor": 2}}, "rope_type must be one of default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor must be a number from 1"),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "factor must be a number"),
        ({"rope_parameters": {"rope_theta": 1.0}}, "rope_theta must be a number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}},
            "high_freq_factor must be greater",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 8, "beta_fast": 1, "beta_slow": 32}},
            "beta_fast must not be less",
        ),
        ({**QWEN, "use_sliding_window": True, "layer_types": ["moving"] * 4}, "layer_types must name"),
    ],
)
def test_what_is_not_supported_is_refused_with_a_sentence(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence) as caught:
        read(**fields)
    assert caught.value.message.endswith(".")
