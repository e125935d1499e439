"""What is wrong with a body, as one sentence that names the field: from pydantic's errors to InvalidRequest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from pdserve.errors import InvalidRequest, UnsupportedFeature

_MAX_NAME = 64
_WORDS = {
    "missing": "is required.",
    "union_tag_not_found": "has no type.",
    "union_tag_invalid": "has a type that is not supported; only text goes in and out.",
}
_NAMES_INPUT = frozenset({"missing", "union_tag_not_found"})


def problem(error: ValidationError, value: Any) -> InvalidRequest:
    """The error that lies deepest in `value`: of a union's alternatives it is the one that was meant."""
    found = error.errors(include_url=False, include_context=True, include_input=False)
    placed = [(_place(one["loc"], value, one["type"]), one) for one in found]
    place, one = max(placed, key=lambda pair: len(pair[0]))
    name = _name(place)
    if one["type"] == "extra_forbidden":
        return UnsupportedFeature.field(name, "is not supported; leave it out.")
    return InvalidRequest.field(name, _WORDS.get(one["type"]) or _sentence(one["msg"]))


def _sentence(message: str) -> str:
    text = message.removeprefix("Value error, ").removeprefix("Input should be ")
    if text != message and message.startswith("Input"):
        text = f"must be {text}"
    return text if text.endswith(".") else f"{text}."


def _place(loc: Sequence[int | str], value: Any, kind: str) -> list[int | str]:
    """The parts of a location that lie in the value; the others name a union's alternatives."""
    place: list[int | str] = []
    for part in loc:
        if isinstance(value, dict) and part in value:
            place.append(part)
            value = value[part]
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            place.append(part)
            value = value[part]
    if kind == "missing" and loc and not (place and place[-1] == loc[-1]):
        place.append(loc[-1])
    return place


def _name(place: Sequence[int | str]) -> str:
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    shown = "".join(c if c.isprintable() else "?" for c in text[:_MAX_NAME])
    return shown or "body"
