"""JSON checked a character at a time says what Python's reader says of the whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.chat.json_scan import JsonScanner
from pdserve.json_depth import MAX_DEPTH

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def scanned(text: str) -> bool:
    """Whether the text is one JSON array, and nothing else."""
    scan = JsonScanner()
    return all(not scan.done and scan.push(char) for char in text) and scan.done


def read(text: str) -> bool:
    def refuse(name: str) -> float:
        raise ValueError(name)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


@given(value=values, ascii_only=st.booleans(), indent=st.sampled_from([None, 1]))
def test_all_json_is_taken(value: Any, ascii_only: bool, indent: int | None) -> None:
    assert scanned(json.dumps([value], ensure_ascii=ascii_only, indent=indent))


@given(value=values, at=st.integers(0, 200), char=st.sampled_from([*'{}[]",:\\0-1.eE+tfnu \n/x']))
def test_damaged_json_is_told_from_what_is_still_json(value: Any, at: int, char: str) -> None:
    text = json.dumps([value])
    at %= len(text)
    for changed in (
        text[:at] + char + text[at:],
        text[:at] + char + text[at + 1 :],
        text[:at] + text[at + 1 :],
    ):
        if changed[:1] == "[" and changed[-1:] == "]":
            assert scanned(changed) == read(changed), changed


@pytest.mark.parametrize(
    "text",
    ["[01]", "[1.]", "[.5]", "[+1]", "[-]", "[1e]", "[1e+]", "[NaN]", "[tru]", "[True]", "[,]", "[1,]",
     "[1 2]", '["\t"]', '["\\x"]', '["\\u12g4"]', "['a']", '[{"a"}]', "[{a:1}]", '[{"a":1,}]', "[}", "[1}",
     '[{"a":1]'],
)  # fmt: skip
def test_what_is_no_json_is_refused(text: str) -> None:
    assert not scanned(text)


def test_nesting_is_bounded() -> None:
    assert scanned("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert not scanned("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))
