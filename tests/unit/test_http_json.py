"""JSON as the HTTP API reads it, held against JSONTestSuite (tests/data/README.md)."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path

import pytest

from pdserve.errors import InvalidRequest
from pdserve.json_depth import MAX_DEPTH
from router.http.strict_json import dump, load
from tests.support.leaks import leak_in

SUITE = Path(__file__).parents[1] / "data" / "json_parsing.jsonl.gz"
STRICTER = {"y_object_duplicated_key.json", "y_object_duplicated_key_and_value.json"}
"""Valid by the grammar; what they mean is each reader's own choice, so we refuse them."""


def cases(expect: str) -> list[tuple[str, bytes]]:
    with gzip.open(SUITE, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    return [(row["name"], base64.b64decode(row["bytes_b64"])) for row in rows if row["expect"] == expect]


def test_what_is_json_is_read() -> None:
    found = cases("accept")
    assert len(found) == 95
    for name, raw in found:
        if name in STRICTER:
            with pytest.raises(InvalidRequest, match="twice"):
                load(raw)
        else:
            assert json.loads(raw) == load(raw), name


@pytest.mark.parametrize("expect", ["reject", "either"])
def test_what_is_none_is_refused_in_a_sentence(expect: str) -> None:
    found = cases(expect)
    assert len(found) == {"reject": 188, "either": 35}[expect]
    read, leaks = [], []
    for name, raw in found:
        try:
            load(raw)
            read.append(name)
        except InvalidRequest as error:
            leaks.append(leak_in(error.message))
    assert expect == "either" or read == []
    assert not any(leaks)


@pytest.mark.parametrize("text", ['{"a":NaN}', "[Infinity]", "[-Infinity]", "[1e999]", "[-1e400]"])
def test_numbers_are_finite(text: str) -> None:
    with pytest.raises(InvalidRequest):
        load(text.encode())


@pytest.mark.parametrize("text", ['"\\ud800"', '{"\\udc00": 1}', '["\\ud83d\\u0041"]'])
def test_half_a_character_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="UTF-8"):
        load(text.encode())


def test_a_whole_pair_is_one_character() -> None:
    assert load(b'"\\ud83d\\ude00"') == "\U0001f600"


@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_depth_is_bounded(begin: str, end: str) -> None:
    levels = 2 if begin.startswith("[{") else 1
    fits = MAX_DEPTH // levels
    load((begin * fits + "1" + end * fits).encode())
    for times in (fits + 1, 3_000, 100_000):
        with pytest.raises(InvalidRequest):
            load((begin * times + "1" + end * times).encode())


def test_what_is_written_is_compact_and_finite() -> None:
    assert dump({"a": ["ü", 1.5, None]}) == '{"a":["ü",1.5,null]}'.encode()
    with pytest.raises(ValueError, match="Out of range"):
        dump([float("nan")])
