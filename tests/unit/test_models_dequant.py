"""Every GGUF tensor type, bit for bit against `gguf.quants.dequantize`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from pdserve.errors import ModelError
from pdserve.models import dequant
from pdserve.models.dequant import SUPPORTED, dequantise, with_torch

Kind = GGMLQuantizationType
ROWS, COLUMNS = 6, 1024


def dequantisable(kind: GGMLQuantizationType) -> bool:
    """Whether the gguf package can read the type."""
    block, size = GGML_QUANT_SIZES[kind]
    try:
        quants.dequantize(np.zeros((1, max(size, 4 * size // block)), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def stored(kind: GGMLQuantizationType) -> np.ndarray:
    """Bytes [ROWS, …] of the type: quantised normal numbers, or random valid blocks where gguf can not."""
    generator = np.random.default_rng(kind.value)
    values = generator.standard_normal((ROWS, COLUMNS), dtype=np.float32)
    try:
        return quants.quantize(values, kind).view(np.uint8).reshape(ROWS, -1)
    except NotImplementedError:
        block, size = GGML_QUANT_SIZES[kind]
        raw = generator.integers(0, 256, (ROWS * COLUMNS // block, size), dtype=np.uint8)
        raw[:, 1::2] &= 0x7B  # no half-precision exponent of all ones anywhere: scales stay finite
        return raw.reshape(ROWS, -1)


def test_every_type_that_gguf_can_read_is_supported() -> None:
    assert {k for k in Kind if dequantisable(k)} == SUPPORTED


@pytest.mark.parametrize("kind", sorted(SUPPORTED), ids=lambda k: k.name)
def test_values_are_those_of_the_gguf_package(kind: GGMLQuantizationType) -> None:
    raw = stored(kind)
    expected = quants.dequantize(raw, kind)
    assert np.isfinite(expected).all()
    assert np.abs(expected).max() > 0
    ours = dequantise(raw.reshape(-1), kind, (ROWS, COLUMNS), torch.float32)
    assert np.array_equal(ours.numpy().view(np.uint32), np.ascontiguousarray(expected).view(np.uint32))


def test_long_tensors_are_read_in_pieces_without_seams() -> None:
    values = np.random.default_rng(1).standard_normal((700, 1056), dtype=np.float32)
    for kind in (Kind.Q4_1, Kind.IQ4_NL, Kind.Q8_0):
        raw = stored(kind) if kind is Kind.IQ4_NL else quants.quantize(values, kind)
        raw = np.concatenate([raw.reshape(-1)] * (200 if kind is Kind.IQ4_NL else 1))
        expected = quants.dequantize(raw.reshape(1, -1), kind).reshape(-1)
        assert np.array_equal(dequantise(raw, kind, expected.shape, torch.float32).numpy(), expected)


@pytest.mark.parametrize("kind", sorted(SUPPORTED), ids=lambda k: k.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shorter_numbers_are_the_rounded_float32(kind: GGMLQuantizationType, dtype: torch.dtype) -> None:
    raw = stored(kind).reshape(-1)
    exact = dequantise(raw, kind, (ROWS, COLUMNS), torch.float32)
    assert torch.equal(dequantise(raw, kind, (ROWS, COLUMNS), dtype), exact.to(dtype))


@pytest.mark.parametrize(
    "kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0], ids=lambda k: k.name
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_bytes_are_what_the_gguf_package_makes_of_them(
    kind: GGMLQuantizationType, dtype: torch.dtype
) -> None:
    """Scales that are infinite or no numbers, too."""
    block, size = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(5).integers(0, 256, (4096, size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(quants.dequantize(raw.reshape(1, -1), kind).reshape(-1).copy()).to(dtype)
    for ours in (dequantise, with_torch):
        made = ours(raw.reshape(-1), kind, (4096 * block,), dtype)
        assert torch.equal(made.isnan(), expected.isnan())
        assert torch.equal(made.nan_to_num(0.0), expected.nan_to_num(0.0))


def test_where_nothing_compiles_torch_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = stored(Kind.Q4_1).reshape(-1)
    native = dequantise(raw, Kind.Q4_1, (ROWS, COLUMNS), torch.bfloat16)
    monkeypatch.setenv("CXX", "no-such-compiler")
    dequant._library.cache_clear()
    try:
        assert dequant._library() is None
        assert torch.equal(dequantise(raw, Kind.Q4_1, (ROWS, COLUMNS), torch.bfloat16), native)
    finally:
        dequant._library.cache_clear()


def test_other_types_are_refused() -> None:
    with pytest.raises(ModelError, match="type I32, which is not supported"):
        dequantise(np.zeros(16, np.uint8), Kind.I32, (4,), torch.float32)
