"""Little quantised checkpoints in the published layouts of others, written value by value with numpy.

What lives here: a writer for each layout, independent of the code that reads them. What does not: checks.

A linear is [N, K]; codes are what the layout's own quantiser would hold, and `Written.plain` what they stand
for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from tests.support import tiny_models

AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which output each four bits of a word hold, from the lowest bits on."""
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Written:
    """A checkpoint on disk. plain: by weight name, what its linears stand for, float32."""

    folder: Path
    plain: dict[str, torch.Tensor]


def _word(codes: list[int], bits: int) -> int:
    value = 0
    for place, code in enumerate(codes):
        value |= int(code) << (bits * place)
    return value - (1 << 32) if value >= 1 << 31 else value


def pack_rows(codes: Array, bits: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """int32, words along the last dimension."""
    each = 32 // bits
    padded = np.zeros((codes.shape[0], -(-codes.shape[1] // each) * each), np.int64)
    padded[:, : codes.shape[1]] = codes
    order = places or tuple(range(each))
    words = [
        [_word([row[start + p] for p in order], bits) for start in range(0, padded.shape[1], each)]
        for row in padded
    ]
    return torch.tensor(words, dtype=torch.int32)


Parts = tuple[dict[str, torch.Tensor], Array]
"""A linear's tensors, and its plain values."""


def random(seed: int, shape: tuple[int, int], group: int, high: int) -> tuple[Array, Array, Array]:
    """Codes [N, K], scales [N, G] that float16 holds, zeros [N, G]."""
    rng = np.random.default_rng(seed)
    groups = shape[1] // group
    scales = rng.uniform(0.01, 0.05, (shape[0], groups)).astype(np.float16).astype(np.float32)
    return rng.integers(0, high, shape), scales, rng.integers(1, high, (shape[0], groups))


def spread(values: Array, group: int) -> Array:
    return np.repeat(values, group, axis=1)


def awq(seed: int, shape: tuple[int, int]) -> Parts:
    """gemm, 4 bits, groups of 32."""
    codes, scales, zeros = random(seed, shape, 32, 16)
    parts = {
        "qweight": pack_rows(codes.T, 4, AWQ_PLACES),
        "qzeros": pack_rows(zeros.T, 4, AWQ_PLACES),
        "scales": torch.tensor(scales.T.copy()).half().contiguous(),
    }
    return parts, (codes - spread(zeros, 32)) * spread(scales, 32)


def gptq(bits: int, *, shuffled: bool = False, version: int = 1) -> Callable[[int, tuple[int, int]], Parts]:
    """Groups of 32; shuffled: inputs belong to groups out of order."""

    def make(seed: int, shape: tuple[int, int]) -> Parts:
        codes, scales, zeros = random(seed, shape, 32, 1 << bits)
        index = np.arange(shape[1]) // 32
        if shuffled:
            index = np.random.default_rng(seed).permutation(index)
        less = 1 if version == 1 else 0
        parts = {
            "qweight": pack_rows(codes, bits).T.contiguous(),
            "qzeros": pack_rows(zeros.T - less, bits),
            "scales": torch.tensor(scales.T.copy()).half().contiguous(),
            "g_idx": torch.tensor(index, dtype=torch.int32),
        }
        return parts, (codes - zeros[:, index]) * scales[:, index]

    return make


def packed(*, symmetric: bool) -> Callable[[int, tuple[int, int]], Parts]:
    """compressed-tensors, 4 bits, groups of 32."""

    def make(seed: int, shape: tuple[int, int]) -> Parts:
        codes, scales, zeros = random(seed, shape, 32, 16)
        parts = {
            "weight_packed": pack_rows(codes, 4),
            "weight_scale": torch.tensor(scales).bfloat16(),
            "weight_shape": torch.tensor(shape),
        }
        scales = parts["weight_scale"].float().numpy()
        if symmetric:
            return parts, (codes - 8) * spread(scales, 32)
        # Zeros are packed over outputs, weights over inputs.
        parts["weight_zero_point"] = pack_rows(zeros.T, 4).T.contiguous()
        return parts, (codes - spread(zeros, 32)) * spread(scales, 32)

    return make


def int8(*, static: bool) -> Callable[[int, tuple[int, int]], Parts]:
    """compressed-tensors, 8 bits by output."""

    def make(seed: int, shape: tuple[int, int]) -> Parts:
        codes, scales, _ = random(seed, shape, shape[1], 255)
        parts = {"weight": torch.tensor(codes - 128).to(torch.int8), "weight_scale": torch.tensor(scales)}
        if static:
            parts["input_scale"] = torch.tensor([0.25])
        return parts, (codes - 128) * scales

    return make


def float8(kind: str) -> Callable[[int, tuple[int, int]], Parts]:
    """E4M3 with a scale by "output", for the whole "tensor", or by "block" of 32."""

    def make(seed: int, shape: tuple[int, int]) -> Parts:
        rng = np.random.default_rng(seed)
        values = torch.tensor(rng.normal(size=shape)).to(torch.float8_e4m3fn)
        sizes = {"output": (shape[0], 1), "tensor": (1, 1), "block": (-(-shape[0] // 32), shape[1] // 32)}
        scales = rng.uniform(0.1, 1, sizes[kind]).astype(np.float32)
        wide = scales
        if kind == "block":
            wide = np.repeat(np.repeat(scales, 32, 0)[: shape[0]], 32, 1)
        stored = torch.tensor(scales)
        name = "weight_scale_inv" if kind == "block" else "weight_scale"
        parts = {"weight": values, name: stored.reshape(-1)[:1] if kind == "tensor" else stored}
        return parts, values.float().numpy() * wide

    return make


def compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }  # fmt: skip


def write(folder: Path, make: Callable[[int, tuple[int, int]], Parts], described: dict[str, Any]) -> Written:
    """A tiny Llama whose layers' linears are quantised."""
    tiny_models.save(tiny_models.llama(), folder)
    tensors = load_file(folder / "model.safetensors")
    plain: dict[str, torch.Tensor] = {}
    for seed, name in enumerate(sorted(n for n in tensors if n.endswith("_proj.weight"))):
        weight = tensors.pop(name)
        parts, values = make(seed, (weight.shape[0], weight.shape[1]))
        stem = name.removesuffix(".weight")
        tensors |= {f"{stem}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        plain[name] = torch.tensor(values, dtype=torch.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": described}))
    return Written(folder=folder, plain=plain)
