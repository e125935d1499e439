"""RoPE frequencies and factors against transformers' own, for every scaling, in both spellings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pdserve.layers.rope import RopeTable
from pdserve.models.hf_config import config_from_hf

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "original_max_position_embeddings": 1024, **LLAMA3},
    "llama3-own-length": {"rope_type": "llama3", **LLAMA3},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn-factor-1": {"rope_type": "yarn", "factor": 1.0},
    "yarn-attention": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "attention_factor": 0.7
    },
    "yarn-mscale": {
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 1024, "mscale": 0.707,
        "mscale_all_dim": 1.0, "beta_fast": 24, "beta_slow": 2,
    },
    "yarn-plain-range": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "truncate": False
    },
}  # fmt: skip


def transformers_rows(scaling: dict[str, Any], positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    config = LlamaConfig(**SHAPE, rope_parameters={"rope_theta": 500_000.0, **scaling})
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    return cos[0], sin[0]


@pytest.mark.parametrize("name", SCALINGS)
def test_rows_equal_transformers(name: str) -> None:
    scaling = SCALINGS[name]
    positions = torch.tensor([0, 1, 2, 3, 17, 511, 512, 1023, 1024, 2500, 4095])
    values = {"model_type": "llama", **SHAPE, "rope_parameters": {"rope_theta": 500_000.0, **scaling}}
    cos, sin = RopeTable(config_from_hf(values).rope).rows(positions)
    expected_cos, expected_sin = transformers_rows(scaling, positions)
    torch.testing.assert_close(cos, expected_cos, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sin, expected_sin, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", SCALINGS)
def test_the_older_spelling_means_the_same(name: str) -> None:
    scaling = dict(SCALINGS[name])
    new = {"model_type": "llama", **SHAPE, "rope_parameters": {"rope_theta": 500_000.0, **scaling}}
    scaling["type"] = scaling.pop("rope_type")
    old = {"model_type": "llama", **SHAPE, "rope_theta": 500_000.0, "rope_scaling": scaling}
    assert config_from_hf(old) == config_from_hf(new)


def test_rows_do_not_depend_on_when_the_table_grew() -> None:
    rope = config_from_hf({"model_type": "llama", **SHAPE}).rope
    grown, at_once = RopeTable(rope), RopeTable(rope)
    positions = torch.tensor([3, 1500, 4000])
    for position in (1, 1400, 4090):
        grown.rows(torch.tensor([position]))
    for ours, theirs in zip(grown.rows(positions), at_once.rows(positions), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("scaling", "context"),
    [("default", 4096), ("linear", 10240), ("dynamic", 8192), ("llama3", 4096), ("yarn", 4096)],
)
def test_a_stretched_context_counts(scaling: str, context: int) -> None:
    values = {"model_type": "llama", **SHAPE, "rope_parameters": SCALINGS[scaling]}
    assert config_from_hf(values).max_context == context
