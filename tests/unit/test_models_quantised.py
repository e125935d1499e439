"""Quantised checkpoints of others: read as they stand, dequantised, or refused with a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.errors import ModelError
from pdserve.models.loader import load_model
from pdserve.quant.forms import ActivationKind
from tests.support import quantised_files as qf

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
E4M3 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "symmetric": True}

KEPT: dict[str, tuple[Callable[..., qf.Parts], dict[str, Any], int, str]] = {
    "awq": (qf.awq, AWQ, 4, "none"),
    "gptq-4": (qf.gptq(4), GPTQ, 4, "none"),
    "gptq-8": (qf.gptq(8), GPTQ | {"bits": 8}, 8, "none"),
    "gptq-v2": (qf.gptq(4, version=2), GPTQ | {"checkpoint_format": "gptq_v2"}, 4, "none"),
    "packed": (qf.packed(symmetric=False), qf.compressed("pack-quantized", INT4), 4, "none"),
    "packed-sym": (qf.packed(symmetric=True), qf.compressed("pack-quantized", INT4), 4, "none"),
    "int8": (qf.int8(static=False), qf.compressed("int-quantized", INT8), 8, "none"),
    "w8a8": (qf.int8(static=False), qf.compressed("int-quantized", INT8, TOKEN), 8, "token"),
    "w8a8-static": (qf.int8(static=True), qf.compressed("int-quantized", INT8, STATIC), 8, "tensor"),
}
DEQUANTISED: dict[str, tuple[Callable[..., qf.Parts], dict[str, Any]]] = {
    "gptq-shuffled": (qf.gptq(4, shuffled=True), GPTQ | {"desc_act": True}),
    "fp8-ct": (qf.float8("output"), qf.compressed("float-quantized", E4M3, TOKEN | {"type": "float"})),
    "fp8-tensor": (qf.float8("tensor"), FP8),
    "fp8-block": (qf.float8("block"), FP8 | {"weight_block_size": [32, 32]}),
}


@pytest.mark.parametrize("name", KEPT)
def test_integers_stay_as_they_are(name: str, tmp_path: Path) -> None:
    make, described, bits, inputs = KEPT[name]
    written = qf.write(tmp_path, make, described)
    kept = load_model(str(tmp_path), "float32", keep_quantised=True)
    plain = load_model(str(tmp_path), "float32")
    assert not plain.quantised
    for weight, values in written.plain.items():
        low = kept.quantised[weight]
        assert (low.bits, low.activation.kind) == (bits, ActivationKind(inputs))
        torch.testing.assert_close(low.dequantise(), values, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(plain.weights[weight], values, rtol=1e-6, atol=1e-6)
    assert set(kept.quantised) - set(written.plain) == {"lm_head.weight"}
    assert (
        kept.quantised["lm_head.weight"].dequantise() - plain.weights["lm_head.weight"]
    ).abs().max() < 0.01


@pytest.mark.parametrize("name", DEQUANTISED)
def test_what_has_no_form_here_is_dequantised(name: str, tmp_path: Path) -> None:
    make, described = DEQUANTISED[name]
    written = qf.write(tmp_path, make, described)
    loaded = load_model(str(tmp_path), "float32", keep_quantised=True)
    assert not set(loaded.quantised) & set(written.plain)
    for weight, values in written.plain.items():
        torch.testing.assert_close(loaded.weights[weight], values, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("awq", {"version": "gemv"}, "gemm"),
        ("awq", {"zero_point": False}, "zero points"),
        ("awq", {"bits": 3}, "4 bits"),
        ("awq", {"group_size": 64}, "shape or type"),
        ("awq", {"quant_method": "bitsandbytes"}, "not supported"),
        ("gptq-4", {"bits": 3}, "4 and 8 bits"),
        ("gptq-4", {"checkpoint_format": "marlin"}, "formats"),
        ("int8", {"config_groups": {}}, "some groups"),
        ("int8", {"config_groups": {"a": {"targets": ["re:(a+)+$"], "weights": INT8}}}, "pattern"),
        ("int8", {"config_groups": {"a": {"targets": ["other"], "weights": INT8}}}, "says nothing"),
        ("int8", {"config_groups": {"a": {
            "targets": ["Linear"], "weights": INT8 | {"num_bits": 3},
        }}}, "width"),
        ("int8", {"config_groups": {"a": {"targets": ["Linear"], "weights": "int8"}}}, "malformed"),
        ("w8a8", {"config_groups": {"a": {
            "targets": ["Linear"], "weights": INT8, "input_activations": TOKEN | {"symmetric": False},
        }}}, "zero points"),
        ("packed", {"config_groups": {"a": {
            "targets": ["Linear"], "weights": INT4 | {"actorder": "group"},
        }}}, "order"),
    ],
)  # fmt: skip
def test_settings_that_are_not_followed_are_refused(
    name: str, changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    make, described, _, _ = KEPT[name]
    qf.write(tmp_path, make, described | changed)
    with pytest.raises(ModelError, match=said):
        load_model(str(tmp_path), "float32")


def test_groups_may_name_linears_by_pattern(tmp_path: Path) -> None:
    groups = {
        "all": {"targets": ["Linear"], "weights": INT8 | {"num_bits": 4}},
        "mlp": {"targets": [r"re:.*\.mlp\..*_proj$"], "weights": INT8, "input_activations": TOKEN},
        "attention": {"targets": ["re:.*self_attn.*"], "weights": INT8},
    }
    qf.write(
        tmp_path, qf.int8(static=False), qf.compressed("int-quantized", INT8) | {"config_groups": groups}
    )
    kept = load_model(str(tmp_path), "float32", keep_quantised=True).quantised
    kinds = {name: low.activation.kind for name, low in kept.items()}
    assert kinds["model.layers.0.mlp.up_proj.weight"] is ActivationKind.TOKEN
    assert kinds["model.layers.0.self_attn.q_proj.weight"] is ActivationKind.NONE


@pytest.mark.parametrize(
    ("part", "tensor"),
    [
        ("qweight", torch.zeros(1, 1, dtype=torch.int32)), ("qzeros", torch.zeros(2, 8)),
        ("scales", torch.full((2, 64), torch.nan)), ("qzeros", None), ("qweight", None),
    ],
)  # fmt: skip
def test_damaged_parts_are_refused(part: str, tensor: torch.Tensor | None, tmp_path: Path) -> None:
    qf.write(tmp_path, qf.awq, AWQ)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors[f"model.layers.1.self_attn.q_proj.{part}"]
    if tensor is not None:
        tensors[f"model.layers.1.self_attn.q_proj.{part}"] = tensor
    save_file(tensors, path)
    with pytest.raises(ModelError):
        load_model(str(tmp_path), "float32")


def test_integers_without_a_description_are_refused(tmp_path: Path) -> None:
    qf.write(tmp_path, qf.awq, AWQ)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="type other than"):
        load_model(str(tmp_path), "float32")
