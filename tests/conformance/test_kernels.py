"""Every kernel's implementations against one another, and that a row's bits depend on nothing but the row.

float32 is compared within rounding; bfloat16 within one rounding of its result (2^-8 of the largest value:
both sides sum in float32 and round once). Attention has a suite of its own (`test_kernels_attention`).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from pdserve.errors import ConfigError, InternalError
from pdserve.kernels import native
from pdserve.kernels.activation import silu_mul, silu_mul_reference
from pdserve.kernels.embedding import embed, select_rows
from pdserve.kernels.kv_view import KVView, inner_layout, read_kv
from pdserve.kernels.linear import PackedLinear, linear, linear_reference
from pdserve.kernels.norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from pdserve.kernels.rope import (
    apply_rope,
    apply_rope_reference,
    rope_and_write_kv,
    rope_and_write_kv_reference,
)
from pdserve.kernels.write_kv import write_kv, write_kv_reference
from tests.conformance.kernel_kit import (
    BOUND,
    SHAPES,
    Heads,
    assert_near,
    both_dtypes,
    every_shape,
    make_kv,
    randn,
)

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("seeded_and_threaded")]
OPS: dict[str, dict[str, Callable[..., Any]]] = {
    "rms_norm": {"native": rms_norm, "reference": rms_norm_reference},
    "add_rms_norm": {"native": add_rms_norm, "reference": add_rms_norm_reference},
    "silu_mul": {"native": silu_mul, "reference": silu_mul_reference},
    "linear": {"native": linear, "reference": linear_reference},
    "apply_rope": {"native": apply_rope, "reference": apply_rope_reference},
    "rope_and_write_kv": {"native": rope_and_write_kv, "reference": rope_and_write_kv_reference},
    "write_kv": {"native": write_kv, "reference": write_kv_reference},
}


def implementations(op: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("impl", OPS[op].values(), ids=OPS[op].keys())


class TestElementwise:
    @both_dtypes
    @pytest.mark.parametrize("shape", [(1, 576), (5, 64), (3, 17), (2, 3, 8), (200, 576)])
    @implementations("rms_norm")
    def test_rms_norm(self, impl: Callable[..., Any], dtype: str, shape: tuple[int, ...]) -> None:
        x, weight = randn(dtype, *shape), randn(dtype, shape[-1])
        exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        got = impl(x, weight, 1e-5)
        assert got.shape == x.shape
        # bfloat16 rounds twice here, before and after the weight.
        assert ((got - exact).abs().max() / exact.abs().max()).item() <= 2 * BOUND[dtype]

    @both_dtypes
    @pytest.mark.parametrize("rows", [1, 6, 130])
    @implementations("add_rms_norm")
    def test_add_rms_norm(self, impl: Callable[..., Any], dtype: str, rows: int) -> None:
        x, residual, weight = randn(dtype, rows, 136), randn(dtype, rows, 136), randn(dtype, 136)
        normed, total = impl(x, residual, weight, 1e-6)
        assert torch.equal(total, x + residual)
        assert torch.equal(normed, OPS["rms_norm"]["native"](total, weight, 1e-6)) or dtype == "float32"
        assert_near(normed, rms_norm_reference(total, weight, 1e-6), dtype)

    @both_dtypes
    @pytest.mark.parametrize("shape", [(1, 1536), (3, 18), (100, 96)])
    @implementations("silu_mul")
    def test_silu_mul(self, impl: Callable[..., Any], dtype: str, shape: tuple[int, int]) -> None:
        x = randn(dtype, shape[0], 2 * shape[1]) * 8
        x[0, :6] = torch.tensor([-200.0, -88.0, -87.0, 88.0, 200.0, 0.0])
        gate, up = x.double().chunk(2, dim=-1)
        assert_near(impl(x), gate * torch.sigmoid(gate) * up, dtype)

    def test_lookups(self) -> None:
        table = torch.randn(10, 4)
        assert torch.equal(embed(torch.tensor([3, 3, 9]), table), table[[3, 3, 9]])
        assert torch.equal(select_rows(table, torch.tensor([9, 0])), table[[9, 0]])


class TestLinear:
    @both_dtypes
    @pytest.mark.parametrize(
        ("rows", "num_out", "num_in"),
        [
            (1, 64, 64),
            (1, 7, 9),
            (2, 33, 17),
            (3, 130, 576),
            (5, 96, 64),
            (13, 100, 1536),
            (29, 64, 3000),
            (200, 70, 40),
        ],
    )
    @pytest.mark.parametrize("biased", [False, True])
    @implementations("linear")
    def test_against_float64(
        self, impl: Callable[..., Any], dtype: str, rows: int, num_out: int, num_in: int, biased: bool
    ) -> None:
        x, weight = randn(dtype, rows, num_in), randn(dtype, num_out, num_in)
        bias = randn(dtype, num_out) if biased else None
        packed = PackedLinear.pack(weight, bias)
        exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        assert_near(impl(x, packed), exact, dtype)
        unrounded = impl(x, packed, out_float32=True)
        assert unrounded.dtype == torch.float32
        assert_near(unrounded, exact, "float32")

    @both_dtypes
    def test_packing_loses_nothing(self, dtype: str) -> None:
        weight = randn(dtype, 75, 131)
        assert torch.equal(PackedLinear.pack(weight).unpack(), weight)

    @both_dtypes
    def test_a_row_does_not_depend_on_the_others(self, dtype: str) -> None:
        weight, x = randn(dtype, 160, 1100), randn(dtype, 300, 1100)
        packed = PackedLinear.pack(weight, deterministic=True)
        alone = torch.cat([linear(row[None], packed, out_float32=True) for row in x[:40]])
        for rows in (*range(1, 40), 64, 100, 299, 300):
            got = linear(x[:rows], packed, out_float32=True)[:40]
            assert torch.equal(got, alone[: min(rows, 40)]), rows

    @both_dtypes
    def test_threads_do_not_matter(self, dtype: str) -> None:
        packed, x = PackedLinear.pack(randn(dtype, 200, 96)), randn(dtype, 70, 96)
        native.set_num_threads(1)
        once = linear(x, packed), linear(x[:1], packed)
        native.set_num_threads(3)
        assert torch.equal(linear(x, packed), once[0])
        assert torch.equal(linear(x[:1], packed), once[1])


class TestRopeAndWrite:
    @both_dtypes
    @every_shape
    @implementations("apply_rope")
    def test_apply_rope(self, impl: Callable[..., Any], dtype: str, heads: Heads) -> None:
        q, k = randn(dtype, 5, heads.num_heads, heads.dim), randn(dtype, 5, heads.num_kv_heads, heads.dim)
        angle = torch.randn(5, heads.dim // 2) * 10
        cos, sin = (fn(torch.cat((angle, angle), -1)) for fn in (torch.cos, torch.sin))
        before = q.clone()
        for x, got in zip((q, k), impl(q, k, cos, sin), strict=True):
            pairs = torch.complex(*x.double().chunk(2, dim=-1)) * torch.polar(
                torch.ones(5, 1, heads.dim // 2).double(), angle[:, None].double()
            )
            assert_near(got, torch.cat((pairs.real, pairs.imag), -1), dtype)
        assert torch.equal(q, before)

    @both_dtypes
    @pytest.mark.parametrize("page_size", [16, 32, 48, 128])
    @implementations("write_kv")
    def test_written_rows_read_back(self, impl: Callable[..., Any], dtype: str, page_size: int) -> None:
        heads = Heads(num_heads=4, num_kv_heads=2, dim=24)
        kv = make_kv(dtype, heads, page_size=page_size, num_pages=8)
        kv.storage.zero_()
        slots = torch.randperm(8 * page_size)[:70].int()
        k, v = randn(dtype, 70, 2, 24), randn(dtype, 70, 2, 24)
        impl(k, v, kv, 1, slots)
        got_k, got_v = read_kv(kv, 1, slots)
        assert torch.equal(got_k, k)
        assert torch.equal(got_v, v)
        assert int(kv.storage.count_nonzero()) == int(k.count_nonzero() + v.count_nonzero())

    @both_dtypes
    @every_shape
    @pytest.mark.parametrize("normed", [False, True])
    def test_fused_equals_its_parts(self, dtype: str, heads: Heads, normed: bool) -> None:
        tokens, width = 37, (heads.num_heads + 2 * heads.num_kv_heads) * heads.dim
        qkv, cos, sin = (
            randn(dtype, tokens, width),
            torch.randn(tokens, heads.dim),
            torch.randn(tokens, heads.dim),
        )
        norms = {"q_norm_D": randn(dtype, heads.dim), "k_norm_D": randn(dtype, heads.dim)} if normed else {}
        slots = torch.randperm(64 * 16)[:tokens].int()
        results = []
        for impl in OPS["rope_and_write_kv"].values():
            kv = make_kv(dtype, heads)
            q = impl(qkv, cos, sin, kv, 1, slots, num_heads=heads.num_heads, eps=1e-6, **norms)
            results.append((q, *read_kv(kv, 1, slots)))
        for got, wanted in zip(*results, strict=True):
            assert_near(got, wanted.float(), dtype)
        assert torch.equal(results[0][2], results[1][2])

    @both_dtypes
    def test_slots_outside_the_pool_are_refused(self, dtype: str) -> None:
        heads = SHAPES["tiny"]
        kv = make_kv(dtype, heads, num_pages=4)
        row = randn(dtype, 1, heads.num_kv_heads, heads.dim)
        for slot in (-1, 4 * 16, 2**31 - 1):
            with pytest.raises(InternalError):
                write_kv(row, row, kv, 0, torch.tensor([slot], dtype=torch.int32))


class TestViewAndLibrary:
    @pytest.mark.parametrize(
        "wrong", [{"page_size": 24}, {"page_size": 144}, {"head_dim": 7}, {"head_dim": 258}, {"num_pages": 9}]
    )
    def test_views_that_can_not_be_served_are_refused(self, wrong: dict[str, int]) -> None:
        good = {
            "page_stride": 512,
            "num_pages": 8,
            "num_layers": 1,
            "num_kv_heads": 1,
            "head_dim": 8,
            "page_size": 16,
        }
        storage = torch.zeros(8 * 512)
        KVView(storage=storage, dtype="float32", **good)
        with pytest.raises(ConfigError):
            KVView(storage=storage, dtype="float32", **{**good, **wrong})

    def test_layout_tags_differ_by_dtype(self) -> None:
        assert inner_layout("float32") != inner_layout("bfloat16")
        with pytest.raises(ConfigError):
            inner_layout("float16")

    def test_one_openmp_runtime(self) -> None:
        """The kernels bring threads of their own and no second OpenMP beside torch's."""
        native.library()
        with open("/proc/self/maps") as maps:
            runtimes = {line.split()[-1] for line in maps if "libgomp" in line or "omp5" in line}
        assert len(runtimes) == 1

    def test_callers_on_several_threads(self) -> None:
        """Whoever finds the helpers taken works alone, to the same bits."""
        packed, x = PackedLinear.pack(randn("float32", 256, 128)), randn("float32", 64, 128)
        wanted = linear(x, packed)
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda _: linear(x, packed), range(200)))
        assert all(torch.equal(got, wanted) for got in results)

    def test_numerics_id_tells_dtypes_apart(self) -> None:
        assert native.isa() in native.numerics_id("float32")
        assert native.numerics_id("float32") != native.numerics_id("bfloat16")
