"""Writing rows into pages of int8: the plain reference's bytes, one scale a token and head, nothing lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import InternalError
from pdserve.kernels import native
from pdserve.kernels.kv_view import KVView, read_kv
from pdserve.kernels.rope import apply_rope, rope_and_write_kv, rope_and_write_kv_reference
from pdserve.kernels.write_kv import write_kv, write_kv_reference
from tests.conformance.kernel_kit import DTYPES, Heads, assert_near, both_dtypes, randn

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("seeded_and_threaded")]
SHAPES = {
    "smollm2-gqa": Heads(num_heads=9, num_kv_heads=3, dim=64),
    "mqa": Heads(num_heads=8, num_kv_heads=1, dim=128),
    "least": Heads(num_heads=2, num_kv_heads=2, dim=4),
    "uneven": Heads(num_heads=2, num_kv_heads=2, dim=92),
    "greatest": Heads(num_heads=2, num_kv_heads=1, dim=256),
}
every_shape = pytest.mark.parametrize("heads", SHAPES.values(), ids=SHAPES.keys())
NOT_FINITE = (float("nan"), float("inf"), float("-inf"))


def make_kv8(heads: Heads, *, page_size: int = 16, num_pages: int = 8, layers: int = 2) -> KVView:
    """Pages of bytes that nobody has written: 0xA5."""
    page = layers * 2 * heads.num_kv_heads * page_size * (heads.dim + 4)
    stride = page + 64
    storage = torch.full((num_pages * stride,), 0xA5, dtype=torch.uint8)
    return KVView(
        storage=storage, page_stride=stride, num_pages=num_pages, num_layers=layers,
        num_kv_heads=heads.num_kv_heads, head_dim=heads.dim, page_size=page_size, dtype="int8",
    )  # fmt: skip


class TestWrite:
    @both_dtypes
    @every_shape
    @pytest.mark.parametrize("page_size", [16, 48, 128])
    def test_the_bytes_are_the_references(self, dtype: str, heads: Heads, page_size: int) -> None:
        views = make_kv8(heads, page_size=page_size), make_kv8(heads, page_size=page_size)
        slots = torch.randperm(8 * page_size)[:70].int()
        k, v = (randn(dtype, 70, heads.num_kv_heads, heads.dim) * 30 for _ in range(2))
        k[3], v[5, 0, 1] = 0, float("nan")
        for write, kv in zip((write_kv, write_kv_reference), views, strict=True):
            write(k, v, kv, 1, slots)
        assert torch.equal(views[0].storage, views[1].storage)

    @both_dtypes
    def test_a_row_is_within_half_a_step(self, dtype: str) -> None:
        heads = SHAPES["uneven"]
        kv, slots = make_kv8(heads), torch.randperm(128)[:100].int()
        k, v = (randn(dtype, 100, heads.num_kv_heads, heads.dim) for _ in range(2))
        write_kv(k, v, kv, 0, slots)
        for wanted, got in zip((k, v), read_kv(kv, 0, slots), strict=True):
            step = wanted.float().abs().amax(-1, keepdim=True) / 127
            assert ((got - wanted.float()).abs() <= step * 0.5001).all()
            assert torch.equal(got.abs().amax(-1) > 0, wanted.float().abs().amax(-1) > 0)

    @both_dtypes
    @pytest.mark.parametrize("bad", NOT_FINITE)
    def test_what_is_not_finite_is_never_lost(self, dtype: str, bad: float) -> None:
        heads = SHAPES["uneven"]
        for at in (0, 15, 16, heads.dim - 1):
            kv, slots = make_kv8(heads), torch.tensor([3, 40], dtype=torch.int32)
            k, v = (randn(dtype, 2, heads.num_kv_heads, heads.dim) for _ in range(2))
            k[0, 1, at], v[1, 0, at] = bad, bad
            write_kv(k, v, kv, 0, slots)
            got_k, got_v = read_kv(kv, 0, slots)
            assert got_k[0, 1].isnan().all()
            assert got_v[1, 0].isnan().all()
            assert got_k[0, 0].isfinite().all()
            assert got_k[1].isfinite().all()
            assert got_v[0].isfinite().all()

    @both_dtypes
    def test_a_rows_bytes_depend_on_nothing_else(self, dtype: str) -> None:
        heads = SHAPES["smollm2-gqa"]
        k, v = (randn(dtype, 60, heads.num_kv_heads, heads.dim) for _ in range(2))
        slots = torch.randperm(128)[:60].int()
        whole = make_kv8(heads)
        write_kv(k, v, whole, 1, slots)
        for threads, order in ((1, range(60)), (3, reversed(range(60)))):
            native.set_num_threads(threads)
            single = make_kv8(heads)
            for row in order:
                write_kv(k[row : row + 1], v[row : row + 1], single, 1, slots[row : row + 1])
            assert torch.equal(single.storage, whole.storage)

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(
            st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True),
            min_size=8,
            max_size=8,
        ),
        st.sampled_from(sorted(DTYPES)),
    )
    def test_any_values_give_the_references_bytes(self, values: list[float], dtype: str) -> None:
        heads = Heads(num_heads=1, num_kv_heads=1, dim=8)
        row = torch.tensor(values).to(DTYPES[dtype]).view(1, 1, 8)
        slots = torch.tensor([5], dtype=torch.int32)
        views = make_kv8(heads), make_kv8(heads)
        write_kv(row, -row, views[0], 0, slots)
        write_kv_reference(row, -row, views[1], 0, slots)
        assert torch.equal(views[0].storage, views[1].storage)
        assert bool(views[0].k_scales(0)[0, 0, 5].isfinite()) == bool(row.isfinite().all())

    def test_slots_outside_the_pool_are_refused(self) -> None:
        heads = SHAPES["least"]
        kv, row = make_kv8(heads, num_pages=4), randn("float32", 1, heads.num_kv_heads, heads.dim)
        for slot in (-1, 4 * 16, 2**31 - 1):
            with pytest.raises(InternalError):
                write_kv(row, row, kv, 0, torch.tensor([slot], dtype=torch.int32))


class TestFused:
    @both_dtypes
    @every_shape
    @pytest.mark.parametrize("normed", [False, True])
    def test_rope_and_write(self, dtype: str, heads: Heads, normed: bool) -> None:
        tokens, width = 37, (heads.num_heads + 2 * heads.num_kv_heads) * heads.dim
        qkv, slots = randn(dtype, tokens, width), torch.randperm(8 * 16)[:tokens].int()
        cos, sin = torch.randn(tokens, heads.dim), torch.randn(tokens, heads.dim)
        norms = {"q_norm_D": randn(dtype, heads.dim), "k_norm_D": randn(dtype, heads.dim)} if normed else {}
        results = []
        for impl in (rope_and_write_kv, rope_and_write_kv_reference):
            kv = make_kv8(heads)
            q = impl(qkv, cos, sin, kv, 1, slots, num_heads=heads.num_heads, eps=1e-6, **norms)
            results.append((q, *read_kv(kv, 1, slots)))
        assert_near(results[0][0], results[1][0].float(), dtype)
        step = results[1][1].abs().amax(-1, keepdim=True) / 127
        assert ((results[0][1] - results[1][1]).abs() <= 1.01 * step + 1e-6).all()  # a code more or less
        assert torch.equal(results[0][2], results[1][2])

    @both_dtypes
    def test_keys_are_rounded_before_they_are_quantised(self, dtype: str) -> None:
        """So the fused write and a write after RoPE leave the same bytes."""
        heads, tokens = SHAPES["smollm2-gqa"], 20
        qkv, slots = randn(dtype, tokens, 15 * 64), torch.randperm(128)[:tokens].int()
        cos, sin = torch.randn(tokens, 64), torch.randn(tokens, 64)
        fused, apart = make_kv8(heads), make_kv8(heads)
        q = rope_and_write_kv(qkv, cos, sin, fused, 1, slots, num_heads=9)
        rows = qkv.view(tokens, 15, 64)
        turned_q, turned_k = apply_rope(rows[:, :9].contiguous(), rows[:, 9:12].contiguous(), cos, sin)
        write_kv(turned_k, rows[:, 12:].contiguous(), apart, 1, slots)
        assert torch.equal(q, turned_q)
        assert torch.equal(fused.storage, apart.storage)
