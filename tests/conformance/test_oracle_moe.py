"""Mixtures of experts against transformers: every architecture and its options, tiny random weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from pdserve.layers.rope import RopeTable
from pdserve.models.loader import load_model
from pdserve.types import SamplingParams
from tests.support import deepseek_gguf, tiny_models, tiny_moe
from tests.support.engine_driver import EngineDriver

NEW_TOKENS = 12
GGUF = {
    "mixtral": tiny_moe.mixtral,
    "qwen2moe": tiny_moe.qwen2_moe,
    "qwen3moe": lambda: tiny_moe.qwen3_moe(norm_topk_prob=True),
    "olmoe": lambda: tiny_moe.olmoe(clip_qkv=0.7),
}


def prompts() -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(11)
    return {
        f"p{n}": torch.randint(0, tiny_models.VOCAB, (n,), generator=generator).tolist() for n in (5, 61, 90)
    }


def drive(source: Path, **options: Any) -> EngineDriver:
    driver = EngineDriver(
        load_model(str(source), "float32"), num_pages=64, chunk_tokens=32, capture_logits=True, **options
    )
    for seq_id, token_ids in prompts().items():
        driver.submit(seq_id, token_ids, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
    driver.run()
    return driver


def assert_agrees(model: PreTrainedModel, driver: EngineDriver) -> None:
    for seq_id, prompt in prompts().items():
        generated = driver.tokens[seq_id]
        assert len(generated) == NEW_TOKENS
        with torch.inference_mode():
            out = model(torch.tensor([prompt + generated[:-1]]), use_cache=False)
        expected = out.logits[0, len(prompt) - 1 :]
        ours = torch.stack(driver.logits[seq_id])
        assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()
        assert generated == expected.argmax(dim=-1).tolist()


@pytest.mark.smoke
@pytest.mark.parametrize("name", tiny_moe.VARIANTS)
def test_logits_and_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    model = tiny_moe.VARIANTS[name]()
    assert_agrees(model, drive(tiny_models.save(model, tmp_path)))


@pytest.mark.parametrize("make", [tiny_moe.mixtral, tiny_moe.qwen2_moe])
def test_experts_stored_stacked_and_one_by_one_are_the_same(make: Any, tmp_path: Path) -> None:
    model = make()
    one_by_one = load_model(str(tiny_models.save(model, tmp_path / "a")), "float32")
    stacked = load_model(str(tiny_models.save(model, tmp_path / "b", save_original_format=False)), "float32")
    assert one_by_one.digest != stacked.digest
    assert set(one_by_one.weights) == set(stacked.weights)
    for name, weight in stacked.weights.items():
        assert torch.equal(weight, one_by_one.weights[name]), name


@pytest.mark.parametrize("name", GGUF)
def test_gguf_weights_and_configuration_are_the_directory_s(name: str, tmp_path: Path) -> None:
    model = GGUF[name]()
    plain = load_model(str(tiny_models.save(model, tmp_path / "dir")), "float32")
    loaded = load_model(str(tiny_models.save_gguf(model, tmp_path / "tiny.gguf")), "float32")
    assert set(loaded.weights) == set(plain.weights)
    for weight, values in loaded.weights.items():
        assert torch.equal(values, plain.weights[weight]), weight
    assert loaded.config.experts == plain.config.experts
    assert loaded.config.architecture == plain.config.architecture
    assert loaded.config.clip_qkv == pytest.approx(plain.config.clip_qkv)
    for field in ("qk_norm", "qk_norm_whole", "qkv_bias", "head_dim", "num_kv_heads", "tied_embeddings"):
        assert getattr(loaded.config, field) == getattr(plain.config, field), field


@pytest.mark.parametrize("name", ["deepseek2-lite", "deepseek2-groups-yarn", "deepseek3"])
@pytest.mark.parametrize("split", [False, True])
def test_deepseek_gguf_is_the_directory(name: str, split: bool, tmp_path: Path) -> None:
    model = tiny_moe.VARIANTS[name]()
    plain = load_model(str(tiny_models.save(model, tmp_path / "dir")), "float32")
    loaded = load_model(str(deepseek_gguf.save(model, tmp_path / "tiny.gguf", split=split)), "float32")
    assert set(loaded.weights) == set(plain.weights)
    for weight, values in loaded.weights.items():
        assert torch.equal(values, plain.weights[weight]), weight
    ours, theirs = loaded.config, plain.config
    assert ours.experts == theirs.experts
    assert ours.latent is not None
    assert theirs.latent is not None
    assert ours.latent.scale == pytest.approx(theirs.latent.scale)
    assert dataclasses.replace(ours.latent, scale=0) == dataclasses.replace(theirs.latent, scale=0)
    for field in ("architecture", "head_dim", "num_kv_heads", "o_bias", "tied_embeddings"):
        assert getattr(ours, field) == getattr(theirs, field), field
    positions = torch.tensor([0, 1, 77, 400])
    for a, b in zip(
        RopeTable(ours.rope).rows(positions), RopeTable(theirs.rope).rows(positions), strict=True
    ):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_older_gguf_files_with_one_tensor_per_expert(tmp_path: Path) -> None:
    model = tiny_moe.mixtral()
    plain = load_model(str(tiny_models.save(model, tmp_path / "dir")), "float32")
    path = tiny_models.save_gguf(model, tmp_path / "old.gguf", one_by_one=True)
    loaded = load_model(str(path), "float32")
    for weight, values in loaded.weights.items():
        assert torch.equal(values, plain.weights[weight]), weight


@pytest.mark.parametrize("make", [tiny_moe.qwen2_moe, tiny_moe.deepseek_v3])
def test_a_request_s_logits_do_not_depend_on_its_neighbours(make: Any, tmp_path: Path) -> None:
    """Token choice drops nothing: alone, or beside others in other chunks, the bits are the same."""
    directory = tiny_models.save(make(), tmp_path)
    for dtype in ("float32", "bfloat16"):
        model = load_model(str(directory), dtype)
        crowd = EngineDriver(model, num_pages=64, chunk_tokens=16, capture_logits=True, deterministic=False)
        for seq_id, token_ids in prompts().items():
            crowd.submit(seq_id, token_ids, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
        crowd.run()
        for seq_id, token_ids in prompts().items():
            alone = EngineDriver(model, num_pages=32, page_size=32, chunk_tokens=64, capture_logits=True)
            alone.submit(seq_id, token_ids, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
            alone.run()
            assert torch.equal(torch.stack(alone.logits[seq_id]), torch.stack(crowd.logits[seq_id]))


def test_deepseek_s_extra_layer_is_left_out_and_its_bias_stays_exact(tmp_path: Path) -> None:
    model = tiny_moe.deepseek_v3()
    tiny_models.save(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {
        name.replace("layers.2.", "layers.3."): w.clone()
        for name, w in tensors.items()
        if "layers.2." in name
    }
    save_file(tensors | extra, tmp_path / "model.safetensors")
    loaded = load_model(str(tmp_path), "bfloat16")
    assert not [name for name in loaded.weights if "layers.3." in name]
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(loaded.weights[name], dict(model.named_buffers())[name])


def test_tokens_are_counted_by_layer_and_expert(tmp_path: Path) -> None:
    driver = drive(tiny_models.save(tiny_moe.qwen3_moe(decoder_sparse_step=2), tmp_path))
    load = driver.runner.expert_load
    assert load is not None
    rows = sum(len(p) for p in prompts().values()) + 3 * (NEW_TOKENS - 1)
    assert load.counts_LX.sum(dim=1).tolist() == [0, 2 * rows, 0]
    load.reset()
    assert not load.counts_LX.any()
