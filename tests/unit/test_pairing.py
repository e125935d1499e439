"""Capability pairing: equal records fit; each difference is refused in words that name it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from kvtransfer.plan import ReplicaLayout, common_transport, layout_text, pairing_problem
from pdserve.kvcache.layout import PageLayout
from pdserve.parallel.shards import split
from pdserve.types import CapabilityRecord

RECORD = CapabilityRecord(
    layout="aa" * 16,
    numerics="float32-cpu-t2",
    model="bb" * 32,
    tokenizer="cc" * 32,
    dtype="float32",
    page_size=16,
    page_bytes=737280,
    transports=("shm", "tcp"),
    protocol=(1, 2),
)


def test_equal_records_fit() -> None:
    assert pairing_problem(RECORD, RECORD, "strict") is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"protocol": (3, 4)}, "protocol 1 to 2 and decode 3 to 4"),
        ({"model": "dd" * 32}, "model differs: bbbbbbbbbbbb at prefill, dddddddddddd"),
        ({"tokenizer": "dd" * 32}, "tokenizer differs"),
        ({"page_size": 32}, "page size in tokens differs: 16 at prefill, 32 at decode"),
        ({"dtype": "bfloat16"}, "KV dtype differs: float32 at prefill, bfloat16 at decode"),
        ({"layout": "dd" * 16}, "page layout differs"),
        ({"page_bytes": 4096}, "page size in bytes differs"),
        ({"numerics": "float32-cpu-t8"}, "relaxed"),
        ({"transports": ("nixl",)}, "transports shm, tcp and decode nixl"),
        ({"transports": ()}, "decode none"),
    ],
)
def test_each_difference_is_named(change: dict[str, object], words: str) -> None:
    problem = pairing_problem(RECORD, dataclasses.replace(RECORD, **change), "strict")
    assert problem is not None
    assert words in problem


def test_relaxed_mixing_lets_numerics_differ_and_nothing_else() -> None:
    other = dataclasses.replace(RECORD, numerics="bfloat16-w8a8")
    assert pairing_problem(RECORD, other, "relaxed") is None
    assert pairing_problem(RECORD, dataclasses.replace(other, layout="x"), "relaxed") is not None


def test_protocol_ranges_that_touch_fit() -> None:
    assert pairing_problem(RECORD, dataclasses.replace(RECORD, protocol=(2, 5)), "strict") is None


def test_the_transport_is_decodes_first_choice_that_can_reach() -> None:
    tcp_first = dataclasses.replace(RECORD, transports=("tcp", "shm"))
    assert common_transport(RECORD, RECORD, same_host=True) == "shm"
    assert common_transport(RECORD, RECORD, same_host=False) == "tcp"
    assert common_transport(RECORD, tcp_first, same_host=True) == "tcp"
    assert common_transport(dataclasses.replace(RECORD, transports=("shm",)), RECORD, same_host=False) is None


def test_a_router_gets_it_without_torch() -> None:
    imports = "import sys, kvtransfer.plan, kvtransfer.ticket"
    code = f"{imports}; sys.exit(bool({{'torch', 'socket'}} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def cut(page_size: int, ranks: int, **changes: object) -> CapabilityRecord:
    """A worker with pages of that size over so many ranks."""
    pages = PageLayout(
        num_layers=2, num_kv_heads=4, head_dim=8, page_size=page_size, dtype="float32",
        inner="k[s,h,d] v[s,h,d]",
    )  # fmt: skip
    layout = ReplicaLayout.of(pages, split(4, ranks))
    record = dataclasses.replace(
        RECORD, layout=layout.rank_pages(0).fingerprint(), page_size=page_size, pages=layout_text(layout),
        page_bytes=sum(layout.page_bytes(rank) for rank in range(ranks)),
    )  # fmt: skip
    return dataclasses.replace(record, **changes)


@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (16, 48), (16, 16)])
@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (2, 1), (3, 2), (4, 4)])
def test_pages_that_are_cut_differently_fit(sizes: tuple[int, int], ranks: tuple[int, int]) -> None:
    assert pairing_problem(cut(sizes[0], ranks[0]), cut(sizes[1], ranks[1]), "strict") is None


def test_what_can_not_be_bridged_is_refused_in_words() -> None:
    narrow = cut(16, 1).pages.replace('"head_dim":8', '"head_dim":4')
    other = dataclasses.replace(RECORD, layout="dd" * 16, pages=narrow)
    problem = pairing_problem(cut(16, 1), other, "strict")
    assert problem == "the head dim differs: 8 at the source, 4 at the target."
    assert "can not be read" in (pairing_problem(cut(16, 1), cut(32, 1, pages="{"), "strict") or "")
    assert "page size in tokens differs" in (
        pairing_problem(cut(16, 1), cut(32, 1, pages=""), "strict") or ""
    )


def test_other_pages_do_not_come_by_nixl() -> None:
    ways = {"transports": ("nixl", "tcp")}
    assert common_transport(cut(16, 1, **ways), cut(32, 1, **ways), same_host=True) == "tcp"
    assert common_transport(cut(16, 1, **ways), cut(16, 1, **ways), same_host=True) == "nixl"
    alone = {"transports": ("nixl",)}
    assert "shm or tcp only" in (pairing_problem(cut(16, 1, **alone), cut(32, 1, **alone), "strict") or "")
