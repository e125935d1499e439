"""A layout as text: what is written is read again, and whatever else a peer sends is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.plan import LayerKind
from kvtransfer.plan.record import MAX_TEXT, layout_text, parse_layout
from pdserve.errors import Incompatible
from tests.support.relayout_kit import VARIANTS, layout

KINDS = (
    LayerKind(),
    LayerKind(window=8),
    LayerKind(window=8),
    LayerKind(shares=0),
    LayerKind(window=4, shares=1),
)
SAMPLE = layout("bf16", 2, 16, layers=KINDS)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_it_is_read_as_it_was_written(variant: str, tp: int) -> None:
    one = layout(variant, tp, 32, layers=KINDS)
    assert parse_layout(layout_text(one)) == one
    assert layout_text(parse_layout(layout_text(one))) == layout_text(one)


def test_many_equal_layers_are_few_characters() -> None:
    assert len(layout_text(layout("f32", 1, 16, layers=(LayerKind(),) * 500))) < 200


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2},
        {"more": 1},
        {"page_size": 0},
        {"page_size": True},
        {"page_size": 10**9},
        {"page_size": 1025},
        {"head_dim": "4"},
        {"num_kv_heads": 1.0},
        {"dtype": 4},
        {"dtype": "int8"},
        {"inner": "k[h,s,d"},
        {"inner": ["k"]},
        {"layers": [[10**9, 0, None]]},
        {"layers": [[4096, 0, None], [1, 0, None]]},
        {"layers": [[1, 0]]},
        {"layers": 7},
        {"ranks": [[[0, 10**9]]]},
        {"ranks": [[[0, 3]]] * 1025},
        {"ranks": [[[0, 1024]]] * 100, "num_kv_heads": 1024},
        {"ranks": [[[0]]]},
        {"ranks": None},
    ],
)
def test_what_is_wrong_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(Incompatible, match="can not be read"):
        parse_layout(json.dumps({**json.loads(layout_text(SAMPLE)), **change}))


@pytest.mark.parametrize("text", ["", "7", "[]", "{}", "null", "[" * 60_000, " " * MAX_TEXT + "{}"])
def test_what_is_no_record_is_refused(text: str) -> None:
    with pytest.raises(Incompatible):
        parse_layout(text)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(field=st.sampled_from(sorted(json.loads(layout_text(SAMPLE)))), value=JSON_VALUES)
def test_any_value_is_read_or_refused(field: str, value: object) -> None:
    try:
        found = parse_layout(json.dumps({**json.loads(layout_text(SAMPLE)), field: value}))
    except Incompatible:
        return
    assert parse_layout(layout_text(found)) == found
