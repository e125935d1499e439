"""The arithmetic of docs/parallelism-sizes.md against published counts, and its tables against the script."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.paper import CONTEXT, DEEPSEEK, H200, LLAMA, SECTIONS, Plan, plans, step

DOC = Path(__file__).parents[2] / "docs" / "parallelism-sizes.md"


@pytest.mark.parametrize("name", SECTIONS)
def test_the_document_has_what_the_script_prints(name: str) -> None:
    assert f"<!-- paper: {name} -->\n\n" + "\n".join(SECTIONS[name]()) + "\n" in DOC.read_text()


def test_shapes_have_their_published_sizes() -> None:
    # Model cards: 70.6 billion; 671 billion, of which a token uses 37.
    assert LLAMA.parameters == pytest.approx(70.6e9, rel=0.002)
    assert DEEPSEEK.parameters == pytest.approx(671e9, rel=0.002)
    idle = DEEPSEEK.moe_layers * (DEEPSEEK.num_experts - DEEPSEEK.top_k) * DEEPSEEK.expert
    assert DEEPSEEK.parameters - idle == pytest.approx(37e9, rel=0.03)
    # A token's cache: 320 KiB in Llama (80 layers x K and V x 8 heads x 128 x 2 bytes), 70,272 bytes latent.
    assert LLAMA.layers * LLAMA.attention.cache_bytes == 320 * 1024
    assert DEEPSEEK.layers * DEEPSEEK.attention.cache_bytes == 70272


def test_speeds_are_below_what_the_vendor_rates() -> None:
    assert 0.7 * 989e12 < H200.flops < 989e12
    assert 0.7 * 4.8e12 < H200.memory < 4.8e12
    assert H200.reduce < 2 * 450e9
    assert H200.exchange < 450e9
    assert 0.6 * 50e9 < H200.cross < 50e9


def test_bytes_are_those_of_ring_algorithms() -> None:
    one = step(LLAMA, Plan(name="TP 8", ranks=8, tp=True), 8, 8, CONTEXT, decode=True)
    assert one.inside == pytest.approx(2 * 80 * 2 * 7 / 8 * 8 * 8192 * 2)
    assert one.outside == 0
    wide = step(DEEPSEEK, Plan(name="EP 64", ranks=64, tp=False), 64, 64, CONTEXT, decode=True)
    each = 2 * 58 * 8 * 7168 * 2  # dispatch and combine, of the one token a rank has
    assert (wide.inside, wide.outside) == (pytest.approx(each * 7 / 64), pytest.approx(each * 56 / 64))


def test_more_tokens_take_longer_and_no_plan_beats_its_compute() -> None:
    for shape in (LLAMA, DEEPSEEK):
        for gpus in (8, 64):
            for plan in plans(shape, gpus):
                times = [step(shape, plan, gpus, n, CONTEXT, decode=True) for n in (64, 512, 4096)]
                assert [t.total for t in times] == sorted(t.total for t in times)
                assert all(t.total > t.compute > 0 for t in times)
