"""Quantised linear layers against plain references, and that a row's bits depend on nothing but the row.

8-bit layers sum integers and scale once, so they are equal to the reference bit for bit; 4-bit ones add
groups as floats, in an order of their own.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import ConfigError
from pdserve.kernels import native
from pdserve.kernels.quant_linear import (
    MAX_INPUTS,
    QuantLinear,
    int4_reference,
    int8_grouped_reference,
    int8_reference,
    pack_int4,
    pack_int8,
)
from tests.conformance.kernel_kit import assert_near, both_dtypes, randn

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("seeded_and_threaded")]
ENOUGH = 16
"""Outputs with which a row surely has a large one, to measure errors by. Fewer must have the same bits."""
ROWS = (1, 2, 3, 4, 5, 6, 12, 13, 14, 15, 29, 40)


def int8_parts(num_out: int, num_in: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes with both extremes, scales, zeros."""
    codes = torch.randint(-128, 128, (num_out, num_in), dtype=torch.int8)
    codes[0, :] = -128
    codes[-1, :] = 127
    return codes, torch.rand(num_out) * 0.01, torch.randint(-128, 128, (num_out,), dtype=torch.int8)


def int4_parts(num_out: int, num_in: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales (one group of zeros) and lows."""
    codes = torch.randint(0, 16, (num_out, num_in), dtype=torch.uint8)
    scales = torch.rand(num_out, -(-num_in // group)) * 0.01
    scales[0, 0] = 0
    return codes, scales, -8 * scales * torch.rand_like(scales)


def rows_of(num_rows: int, num_in: int, dtype: str = "bfloat16") -> torch.Tensor:
    """Rows of very different sizes, one of zeros, one of a single large value."""
    x = randn(dtype, num_rows, num_in) * torch.logspace(-3, 3, num_rows)[:, None]
    x[num_rows // 2] = 0
    x[0, 0] = -1e4
    return x.to(getattr(torch, dtype))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 150), st.integers(1, 200), st.booleans(), st.booleans())
def test_int8_equals_the_reference(rows: int, num_out: int, num_in: int, zeros: bool, biased: bool) -> None:
    codes, scale, zero = int8_parts(num_out, num_in)
    x, bias = rows_of(rows, num_in), torch.randn(num_out) if biased else None
    layer = pack_int8(codes, scale, zero if zeros else None, bias)
    wanted = int8_reference(x, codes, scale, zero if zeros else None)
    wanted = wanted if bias is None else wanted + bias
    assert torch.equal(layer(x, out_float32=True), wanted)
    assert torch.equal(layer(x), wanted.bfloat16())


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 150), st.integers(1, 300), st.sampled_from([32, 64, 128]))
def test_int4_is_the_reference_but_for_rounding(rows: int, num_out: int, num_in: int, group: int) -> None:
    codes, scale, low = int4_parts(max(num_out, ENOUGH), num_in, group)
    x = rows_of(rows, num_in)
    wanted = int4_reference(x, codes, scale, low, group_size=group)
    got = pack_int4(codes, scale, low, group_size=group)(x, out_float32=True)
    for row in range(rows):
        assert_near(got[row], wanted[row], "float32")
    few = pack_int4(codes[:num_out], scale[:num_out], low[:num_out], group_size=group)
    assert torch.equal(few(x, out_float32=True), got[:, :num_out])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 150), st.integers(1, 200))
def test_int8_by_group_is_the_reference_but_for_rounding(rows: int, num_out: int, num_in: int) -> None:
    codes, scale, _ = int8_parts(max(num_out, ENOUGH), num_in)
    x = rows_of(rows, num_in)
    wanted = int8_grouped_reference(x, codes, scale)
    got = pack_int8(codes, scale, by_group=True)(x, out_float32=True)
    for row in range(rows):
        assert_near(got[row], wanted[row], "float32")
    few = pack_int8(codes[:num_out], scale[:num_out], by_group=True)
    assert torch.equal(few(x, out_float32=True), got[:, :num_out])


LAYERS = {
    "int8-by-group": lambda: pack_int8(*int8_parts(200, 1100)[:2], by_group=True),
    "int8": lambda: pack_int8(*int8_parts(200, 1100)),
    "int4": lambda: pack_int4(*int4_parts(200, 1100, 64), group_size=64),
}
each_layer = pytest.mark.parametrize("kind", LAYERS)


def built(kind: str) -> QuantLinear:
    return LAYERS[kind]()


@pytest.mark.parametrize("at", [0, 40, 1099])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@each_layer
def test_a_row_that_is_not_finite_gives_no_number(kind: str, value: float, at: int) -> None:
    """As an exact product does: whoever looks at logits must see it. Other rows are as without it."""
    layer, x = built(kind), rows_of(3, 1100)
    before = layer(x, out_float32=True)
    x[1, at] = value
    after = layer(x, out_float32=True)
    assert not after[1].isfinite().any()
    assert torch.equal(after[[0, 2]], before[[0, 2]])


@both_dtypes
@each_layer
def test_a_row_does_not_depend_on_the_others(kind: str, dtype: str) -> None:
    layer, x = built(kind), rows_of(300, 1100, dtype)
    alone = torch.cat([layer(row[None], out_float32=True) for row in x[:40]])
    for rows in (*ROWS, 64, 100, 299, 300):
        assert torch.equal(layer(x[:rows], out_float32=True)[:40], alone[: min(rows, 40)]), rows


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["int8", "int8-by-group", "int4"]),
    st.integers(1, 90), st.integers(1, 150), st.integers(1, 300), st.integers(1, 90),
)  # fmt: skip
def test_every_choice_of_kernel_gives_equal_bits(
    kind: str, rows: int, num_out: int, num_in: int, part: int
) -> None:
    """Kernels are chosen by the number of rows: cut into parts of any size, rows meet other ones."""
    if kind == "int4":
        layer = pack_int4(*int4_parts(num_out, num_in, 32), group_size=32)
    else:
        layer = pack_int8(*int8_parts(num_out, num_in)[:2], by_group=kind == "int8-by-group")
    x = rows_of(rows, num_in)
    parts = torch.cat([layer(x[at : at + part], out_float32=True) for at in range(0, rows, part)])
    assert torch.equal(layer(x, out_float32=True), parts)


@each_layer
def test_threads_do_not_matter(kind: str) -> None:
    layer, x = built(kind), rows_of(70, 1100)
    native.set_num_threads(1)
    once = layer(x), layer(x[:1])
    native.set_num_threads(3)
    assert torch.equal(layer(x), once[0])
    assert torch.equal(layer(x[:1]), once[1])


@both_dtypes
@each_layer
def test_results_have_the_rows_dtype(kind: str, dtype: str) -> None:
    layer = built(kind)
    assert layer(rows_of(3, 1100, dtype)).dtype is getattr(torch, dtype)
    assert layer(torch.empty(0, 1100)).shape == (0, 200)


def test_longest_rows_do_not_overflow() -> None:
    codes = torch.full((2, MAX_INPUTS), -128, dtype=torch.int8)
    codes[1] = 127
    x = torch.ones(2, MAX_INPUTS)
    got = pack_int8(codes, torch.tensor([1.0, 1.0]))(x, out_float32=True)
    assert got[0].tolist() == pytest.approx([-128.0 * MAX_INPUTS, 127.0 * MAX_INPUTS], rel=1e-6)
    with pytest.raises(ConfigError):
        pack_int8(torch.zeros(1, MAX_INPUTS + 1, dtype=torch.int8), torch.ones(1))


def test_zeros_by_group_are_refused() -> None:
    codes, scale, zero = int8_parts(5, 40)
    with pytest.raises(ConfigError, match="zeros"):
        pack_int8(codes, scale, zero | 1, by_group=True)


def test_extreme_scales_survive_their_16_bits() -> None:
    codes = torch.randint(0, 16, (16, 64), dtype=torch.uint8)
    x = randn("float32", 3, 64)
    for size in (1e-12, 1e-5, 1e6):
        scale = torch.full((16, 2), size)
        wanted = int4_reference(x, codes, scale, -7 * scale, group_size=32)
        assert_near(pack_int4(codes, scale, -7 * scale, group_size=32)(x) / size, wanted / size, "float32")


@pytest.mark.parametrize("group", [0, 16, 48])
def test_group_sizes_that_are_not_served_are_refused(group: int) -> None:
    with pytest.raises(ConfigError, match="multiple of 32"):
        pack_int4(torch.zeros(4, 96, dtype=torch.uint8), torch.ones(4, 6), torch.ones(4, 6), group_size=group)
