"""Rounding, smoothing, compensation, FP8 and cache numerics, against formulas written out here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import ConfigError, ModelError
from pdserve.quant.float8 import E4M3, E5M2, Float8Weight, fake_float8, largest, to_float8
from pdserve.quant.forms import Activation, ActivationKind, QuantWeight
from pdserve.quant.gptq import round_with_compensation
from pdserve.quant.kv import KVForm
from pdserve.quant.packing import pack_words, unpack_words
from pdserve.quant.rounding import Grid, round_to_nearest, rounded
from pdserve.quant.schemes import SCHEMES, TOKEN, scheme_of
from pdserve.quant.smooth import LayerInput, output_error, search_awq, search_smooth, smooth_scales

GRIDS = [
    Grid(bits=8), Grid(bits=8, symmetric=False), Grid(bits=4, group_size=32),
    Grid(bits=4, group_size=32, symmetric=False), Grid(bits=4, group_size=64, symmetric=False),
]  # fmt: skip


def random_weight(seed: int, n: int = 5, k: int = 80) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("grid", GRIDS)
@given(seed=st.integers(0, 500))
@settings(max_examples=20, deadline=None)
def test_each_weight_becomes_the_nearest_number_of_its_grid(grid: Grid, seed: int) -> None:
    weight = random_weight(seed)
    q = round_to_nearest(weight, grid)
    plain = q.dequantise()
    size = grid.group_size or 80
    for n in range(5):
        for k in range(80):
            scale = float(q.scale_NG[n, k // size])
            zero = 0 if q.zero_NG is None else int(q.zero_NG[n, k // size])
            numbers = (np.arange(grid.low, grid.high + 1) - zero) * scale
            least = np.abs(numbers - float(weight[n, k])).min()
            assert abs(float(plain[n, k] - weight[n, k])) <= least * 1.0001 + 1e-6
    torch.testing.assert_close(rounded(weight, grid), plain)


@given(seed=st.integers(0, 500), group=st.sampled_from([0, 32]))
@settings(max_examples=20, deadline=None)
def test_scales_are_those_of_the_published_formulas(seed: int, group: int) -> None:
    """Asymmetric: (max - min) / 15 over a range with 0, zero = round(-8 - min / scale), as compressed-tensors
    and torchao have it; scales are rounded to bfloat16 here before they are used.
    """
    weight = random_weight(seed, k=64)
    q = round_to_nearest(weight, Grid(bits=4, group_size=group, symmetric=False))
    size = group or 64
    for g in range(64 // size):
        part = weight[:, g * size : (g + 1) * size]
        high, low = part.amax(1).clamp(min=0), part.amin(1).clamp(max=0)
        scale = ((high - low) / 15).to(torch.bfloat16).float()
        assert torch.equal(q.scale_NG[:, g], scale)
        assert q.zero_NG is not None
        assert torch.equal(q.zero_NG[:, g].float(), (-8 - low / scale).round().clamp(-8, 7))


def test_clipping_never_adds_error_and_helps_with_an_outlier() -> None:
    weight = random_weight(1, n=8, k=64) * 0.1
    weight[:, 5] = 1.0
    for moments in (None, torch.diag(torch.ones(64).index_fill(0, torch.tensor([5]), 0.01))[None]):
        grid = Grid(bits=4, group_size=64, symmetric=False)
        plain = round_to_nearest(weight, grid).dequantise() - weight
        clip = round_to_nearest(weight, Grid(bits=4, group_size=64, symmetric=False, clip=True), moments)
        less = clip.dequantise() - weight
        weights = torch.ones(64) if moments is None else moments[0].diagonal()
        errors = [(e.square() * weights).sum() for e in (less, plain)]
        assert errors[0] <= errors[1]
    assert errors[0] < 0.9 * errors[1]


def test_grids_have_four_or_eight_bits() -> None:
    with pytest.raises(ConfigError):
        Grid(bits=3)


def outliers(seed: int = 0) -> torch.Tensor:
    """Rows whose third input is a hundred times the others."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(seed))
    x[:, 3] *= 100
    return x


def seen(x: torch.Tensor, tie: torch.Tensor | None = None) -> LayerInput:
    return LayerInput(x_MK=x, most_K=x.abs().amax(0), mean_K=x.abs().mean(0), tie_K=tie)


def test_smoothing_follows_equation_four_and_helps_outliers() -> None:
    x, weight = outliers(), random_weight(2, n=16, k=32)
    most, columns = x.abs().amax(0), weight.abs().amax(0)
    torch.testing.assert_close(smooth_scales(most, columns, 0.5), (most / columns).sqrt())
    found = search_smooth(seen(x), [weight], Grid(bits=8), TOKEN)
    assert found.alpha is not None
    assert found.error < 0.2 * found.plain
    scaled = output_error(seen(x), [weight], found.scale_P, Grid(bits=8), TOKEN)
    assert scaled == pytest.approx(found.error)


def test_tied_inputs_have_one_scale() -> None:
    """Two query heads of one KV head: inputs k and k + 16 come from the same row of v."""
    tie = torch.arange(16).repeat(2)
    found = search_smooth(seen(outliers(), tie), [random_weight(3, n=16, k=32)], Grid(bits=8), TOKEN)
    assert found.scale_P.shape == (16,)
    assert found.error < found.plain


def test_awq_chooses_no_scaling_for_a_weight_on_its_grid() -> None:
    grid = Grid(bits=4, group_size=32, symmetric=False)
    on_grid = rounded(random_weight(4, n=16, k=32), grid)
    found = search_awq(seen(outliers()), [rounded(on_grid, grid)], grid)
    assert found.plain == pytest.approx(0, abs=1e-3)
    assert found.alpha is None
    assert torch.equal(found.scale_P, torch.ones(32))
    other = search_awq(seen(outliers()), [random_weight(5, n=16, k=32)], grid)
    assert other.alpha is not None
    assert other.error < other.plain


@pytest.mark.parametrize("grid", [Grid(bits=4, group_size=32, symmetric=False), Grid(bits=8)])
def test_gptq_has_less_output_error_than_rounding(grid: Grid) -> None:
    base = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
    mix = torch.randn(8, 96, generator=torch.Generator().manual_seed(2))
    x = base @ mix + 0.1 * torch.randn(256, 96, generator=torch.Generator().manual_seed(3))
    weight = random_weight(6, n=24, k=96)
    made = round_with_compensation(weight, x.T @ x, grid)
    errors = [
        (x @ (q.dequantise() - weight).T).square().sum() for q in (made, round_to_nearest(weight, grid))
    ]
    assert errors[0] < 0.6 * errors[1]
    assert made.zero_NG is None or made.group_size == 32


def test_gptq_rounds_to_nearest_where_inputs_are_independent() -> None:
    weight, grid = random_weight(7, n=6, k=64), Grid(bits=8)
    made = round_with_compensation(weight, torch.eye(64), grid)
    assert torch.equal(made.codes_NK, round_to_nearest(weight, grid).codes_NK)


def test_gptq_refuses_moments_that_are_not_numbers() -> None:
    with pytest.raises(ModelError):
        round_with_compensation(random_weight(8), torch.full((80, 80), torch.nan), Grid(bits=8))


@pytest.mark.parametrize(("dtype", "mantissa", "least"), [(E4M3, 3, -6), (E5M2, 2, -14)])
@given(value=st.floats(-1e5, 1e5, width=32))
def test_fp8_is_the_nearest_value_and_saturates(
    dtype: torch.dtype, mantissa: int, least: int, value: float
) -> None:
    got = float(to_float8(torch.tensor([value]), dtype).float())
    bound = largest(dtype)
    if abs(value) >= bound:
        assert got == np.sign(value) * bound
        return
    exponent = max(int(np.floor(np.log2(abs(value)))) if value else least, least)
    step = 2.0 ** (exponent - mantissa)
    assert got == np.rint(value / step) * step


def test_fp8_weights_scale_each_output() -> None:
    weight = random_weight(9) * torch.tensor([1e-3, 1, 10, 1e3, 0])[:, None]
    q = Float8Weight.rounded(weight, "e4m3", inputs=True)
    relative = (q.dequantise() - weight).abs() / weight.abs().amax(1, keepdim=True).clamp(min=1e-9)
    assert float(relative.max()) < 1 / 24
    x = torch.randn(3, 80)
    torch.testing.assert_close(q.product(x), fake_float8(x, E4M3) @ q.dequantise().T)
    with pytest.raises(ModelError):
        Float8Weight(values_NK=weight, scale_N1=torch.ones(5, 1))


@pytest.mark.parametrize("kind", ["int8", "e4m3", "e5m2"])
@given(tokens=st.integers(1, 40), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_cache_values_are_within_half_a_step_of_their_page(kind: str, tokens: int, seed: int) -> None:
    rows = torch.randn(2, tokens, 3, 8, generator=torch.Generator().manual_seed(seed))
    rows[:, :, 1] *= 1000
    back = KVForm(kind=kind, page_size=16).fake(rows)
    share = {"int8": 0.5 / 127, "e4m3": 2**-4, "e5m2": 2**-3}[kind]
    for start in range(0, tokens, 16):
        page = slice(start, start + 16)
        most = rows[:, page].abs().amax(dim=(1, 3), keepdim=True)
        assert bool(((back[:, page] - rows[:, page]).abs() <= share * most * 1.001).all())


def test_a_cache_has_known_forms() -> None:
    with pytest.raises(ConfigError):
        KVForm(kind="int3")


@given(
    bits=st.sampled_from([4, 8]), count=st.integers(1, 40), seed=st.integers(0, 99),
    order=st.booleans(),
)  # fmt: skip
def test_words_hold_codes_from_the_lowest_bits_on(bits: int, count: int, seed: int, order: bool) -> None:
    codes = torch.randint(0, 1 << bits, (3, count), generator=torch.Generator().manual_seed(seed))
    words = pack_words(codes, bits)
    each = 32 // bits
    for row, packed in zip(codes.tolist(), words.tolist(), strict=True):
        for w, word in enumerate(packed):
            piece = row[w * each : (w + 1) * each]
            assert word % (1 << 32) == sum(code << (bits * i) for i, code in enumerate(piece))
    assert torch.equal(unpack_words(words, bits, count).long(), codes)
    if order and count >= each:
        turned = unpack_words(words, bits, each, tuple(reversed(range(each))))
        assert torch.equal(turned.long(), codes[:, :each].flip(1))


def test_schemes_have_names_that_say_what_they_are() -> None:
    for name, scheme in SCHEMES.items():
        assert scheme_of(name, "x").name == name
        assert scheme.quantises_inputs == ("a8-" in name)
        if scheme.grid is not None:
            assert name.startswith(f"w{scheme.grid.bits}")
    assert scheme_of("w4a16-awq", "x").grid == Grid(bits=4, group_size=32, symmetric=False)
    with pytest.raises(ConfigError, match="prefill"):
        scheme_of("w3", "prefill")


def test_weights_of_all_grids_are_valid_forms() -> None:
    for grid in GRIDS:
        q = round_to_nearest(torch.zeros(4, 70), grid)
        assert isinstance(q, QuantWeight)
        assert not q.dequantise().any()
        q.with_activation(Activation(kind=ActivationKind.TENSOR, scale=0.5))
