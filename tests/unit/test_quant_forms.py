"""The data type of quantised weights: what it refuses, what it stands for, and the rule of activations."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import ModelError
from pdserve.quant.forms import (
    Activation,
    ActivationKind,
    QuantWeight,
    fake_quantise,
    linear_reference,
    num_groups,
    quantise_rows,
    spread,
    stacked,
)

TOKEN = Activation(kind=ActivationKind.TOKEN)


def weight(
    n: int = 6, k: int = 40, *, bits: int = 8, group_size: int = 0, zeros: bool = False, seed: int = 0
) -> QuantWeight:
    """A random one."""
    random = torch.Generator().manual_seed(seed)
    low, high = (-8, 8) if bits == 4 else (-128, 128)
    shape = (n, num_groups(k, group_size))
    return QuantWeight(
        codes_NK=torch.randint(low, high, (n, k), generator=random, dtype=torch.int8),
        scale_NG=torch.rand(shape, generator=random) + 0.01,
        zero_NG=torch.randint(-8, 8, shape, generator=random, dtype=torch.int8) if zeros else None,
        bits=bits,
        group_size=group_size,
    )


@given(
    k=st.integers(1, 70), group_size=st.sampled_from([0, 1, 16, 32, 64]),
    bits=st.sampled_from([4, 8]), zeros=st.booleans(), seed=st.integers(0, 1000),
)  # fmt: skip
def test_a_weight_is_code_less_zero_times_scale(
    k: int, group_size: int, bits: int, zeros: bool, seed: int
) -> None:
    q = weight(3, k, bits=bits, group_size=group_size, zeros=zeros, seed=seed)
    plain = q.dequantise()
    for n in range(3):
        for i in range(k):
            group = i // group_size if group_size else 0
            zero = 0 if q.zero_NG is None else int(q.zero_NG[n, group])
            expected = np.float32(int(q.codes_NK[n, i]) - zero) * np.float32(q.scale_NG[n, group])
            assert plain[n, i].item() == expected


@given(kind=st.sampled_from(["none", "zeros", "minima"]), group_size=st.sampled_from([0, 16, 32]))
def test_a_weight_is_code_times_scale_plus_shift(kind: str, group_size: int) -> None:
    q = weight(3, 40, bits=4, group_size=group_size, zeros=kind == "zeros")
    if kind == "minima":
        q = replace(q, minimum_NG=torch.randn(q.scale_NG.shape))
    shift = torch.zeros_like(q.scale_NG) if q.shift() is None else q.shift()
    wide = [spread(values, 40, group_size) for values in (q.scale_NG, shift)]
    torch.testing.assert_close(q.dequantise(), q.codes_NK * wide[0] + wide[1])
    assert (q.shift() is None) == (kind == "none")
    torch.testing.assert_close(q.rows(torch.tensor([2, 0])).dequantise(), q.dequantise()[[2, 0]])


@pytest.mark.parametrize(
    "changed",
    [
        {"bits": 3},
        {"group_size": -1},
        {"codes_NK": torch.zeros(6, 40)},
        {"codes_NK": torch.zeros(6, 0, dtype=torch.int8)},
        {"codes_NK": torch.full((6, 40), 8, dtype=torch.int8), "bits": 4},
        {"scale_NG": torch.ones(6, 2)},
        {"scale_NG": torch.ones(6, 1, dtype=torch.float64)},
        {"scale_NG": torch.full((6, 1), math.nan)},
        {"scale_NG": torch.full((6, 1), 1e38)},
        {"zero_NG": torch.zeros(6, 2, dtype=torch.int8)},
        {"zero_NG": torch.zeros(6, 1)},
        {"group_size": 32},
        {"minimum_NG": torch.zeros(6, 2)},
        {"minimum_NG": torch.full((6, 1), math.inf)},
        {"minimum_NG": torch.zeros(6, 1), "zero_NG": torch.zeros(6, 1, dtype=torch.int8)},
    ],
)
def test_what_does_not_fit_together_is_refused(changed: dict[str, object]) -> None:
    q = weight()
    good: dict[str, object] = {"codes_NK": q.codes_NK, "scale_NG": q.scale_NG, "bits": 8}
    with pytest.raises(ModelError):
        QuantWeight(**{**good, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "group_size", "scale"),
    [
        ("none", 32, 0.0), ("token", 0, 1.0), ("token_group", 0, 0.0), ("tensor", 0, 0.0),
        ("tensor", 32, 1.0), ("tensor", 0, math.nan), ("tensor", 0, math.inf), ("tensor", 0, -1.0),
    ],
)  # fmt: skip
def test_activations_have_the_numbers_of_their_form(kind: str, group_size: int, scale: float) -> None:
    with pytest.raises(ModelError):
        Activation(kind=ActivationKind(kind), group_size=group_size, scale=scale)


rows = st.lists(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=11, max_size=11), min_size=1, max_size=4
).map(lambda values: torch.tensor(values, dtype=torch.float32))


@given(x=rows, group_size=st.sampled_from([0, 1, 4, 11, 16]))
def test_codes_of_activations_follow_the_written_rule(x: torch.Tensor, group_size: int) -> None:
    kind = ActivationKind.TOKEN_GROUP if group_size else ActivationKind.TOKEN
    codes, scales = quantise_rows(x, Activation(kind=kind, group_size=group_size))
    size = group_size or 11
    for m, row in enumerate(x.numpy()):
        for a, start in enumerate(range(0, 11, size)):
            part = row[start : start + size]
            amax = np.abs(part).max()
            if amax < np.float32(2.0**-100):
                assert scales[m, a] == 0
                assert not codes[m, start : start + size].any()
                continue
            assert scales[m, a].item() == amax / np.float32(127)
            expected = np.rint(part * (np.float32(127) / amax)).clip(-127, 127)
            assert codes[m, start : start + size].tolist() == expected.tolist()


@given(x=rows)
def test_a_rows_codes_do_not_depend_on_other_rows(x: torch.Tensor) -> None:
    together, _ = quantise_rows(x, TOKEN)
    alone = torch.cat([quantise_rows(row[None], TOKEN)[0] for row in x])
    assert torch.equal(together, alone)


@given(x=rows)
def test_fake_activations_are_within_half_a_step(x: torch.Tensor) -> None:
    step = x.abs().amax(dim=1, keepdim=True) / 127
    assert bool(((fake_quantise(x, TOKEN) - x).abs() <= step * 0.5001 + 1e-30).all())


def test_static_activations_saturate() -> None:
    form = Activation(kind=ActivationKind.TENSOR, scale=0.5)
    codes, scales = quantise_rows(torch.tensor([[0.25, 0.75, 1e9, -1e9]]), form)
    assert codes.tolist() == [[0, 2, 127, -127]]
    assert scales.tolist() == [[0.5]]
    with pytest.raises(ModelError):
        quantise_rows(torch.zeros(1, 4), Activation())


def test_stacked_weights_give_the_outputs_of_their_parts() -> None:
    parts = [weight(n, zeros=True, seed=n, group_size=32).with_activation(TOKEN) for n in (3, 5)]
    x = torch.randn(4, 40)
    whole = stacked(parts)
    assert whole.num_out == 8
    torch.testing.assert_close(
        linear_reference(x, whole), torch.cat([linear_reference(x, p) for p in parts], dim=1)
    )
    torch.testing.assert_close(whole.rows(slice(3, 8)).dequantise(), parts[1].dequantise())
    with pytest.raises(ModelError):
        stacked([parts[0], weight(3, group_size=32)])


def test_the_reference_product_adds_the_bias() -> None:
    q, x, bias = weight(), torch.randn(2, 40), torch.randn(6)
    torch.testing.assert_close(linear_reference(x, q, bias), x @ q.dequantise().T + bias)


def test_packed_size_counts_codes_scales_and_zeros() -> None:
    q = weight(4, 64, bits=4, group_size=32, zeros=True)
    assert q.packed_bytes == 4 * 32 + 4 * 2 * 2 + 4
