"""Stop strings over pieces of text, against a plain search over the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import InvalidRequest
from pdserve.tokenizer import StopMatcher, checked_stops

letters = st.text(alphabet="ab\n", max_size=12)


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    out, stopped = "", False
    for piece in pieces:
        text, stopped = matcher.feed(piece)
        out += text
    return (out, True) if stopped else (out + matcher.finish(), False)


def reference(stops: list[str], text: str) -> tuple[str, bool]:
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@given(stops=st.lists(letters.filter(bool), max_size=4), pieces=st.lists(letters, max_size=8))
def test_equals_a_search_over_the_whole_text(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == reference(stops, "".join(pieces))


@given(stops=st.lists(letters.filter(bool), min_size=1, max_size=4), text=letters)
def test_pieces_do_not_matter(stops: list[str], text: str) -> None:
    assert run(stops, list(text)) == run(stops, [text])


@given(stops=st.lists(letters.filter(bool), min_size=1, max_size=4), pieces=st.lists(letters, max_size=8))
def test_holds_back_no_more_than_the_start_of_a_stop(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    given_out = seen = ""
    for piece in pieces:
        text, stopped = matcher.feed(piece)
        given_out, seen = given_out + text, seen + piece
        if stopped:
            return
        held = seen[len(given_out) :]
        assert seen.startswith(given_out)
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_nothing_comes_after_a_match_and_the_match_is_named() -> None:
    matcher = StopMatcher(["\n\n", "END"])
    assert matcher.feed("text E") == ("text ", False)
    assert matcher.feed("NDmore END") == ("", True)
    assert matcher.stop == "END"
    assert matcher.feed("more") == ("", True)
    assert matcher.finish() == ""


def test_without_stops_everything_passes_at_once() -> None:
    matcher = StopMatcher([])
    assert matcher.feed("anything") == ("anything", False)


@pytest.mark.parametrize("stops", [[""], ["x"] * 17, ["x" * 257], ["é" * 129]])
def test_limits(stops: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        StopMatcher(stops)
    assert caught.value.violations[0].field == "stop"


def test_limits_are_reached_not_passed() -> None:
    assert len(checked_stops([f"{n:02}" + "x" * 254 for n in range(16)])) == 16
    assert checked_stops(["a", "b", "a"]) == ("a", "b")
