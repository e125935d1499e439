"""What is wrong with a body, as one sentence that names the field: pydantic's errors to InvalidRequest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from pdserve.errors import InvalidRequest
from router.http.errors import UnsupportedField, WrongBody

_MAX_NAME = 64
_REFUSED = frozenset({"extra_forbidden", "none_required"})
_TAGS = frozenset({"union_tag_invalid", "union_tag_not_found"})


def problem(error: ValidationError, value: Any) -> InvalidRequest:
    """The error that lies deepest in `value`: of a union's alternatives it is the one that was meant."""
    found = error.errors(include_url=False, include_context=True, include_input=False)
    placed = [(_place(one["loc"], value, one["type"]), one) for one in found]
    place, one = max(placed, key=lambda pair: len(pair[0]))
    name = _name(place)
    must_be_empty = one["type"] == "too_long" and one["ctx"].get("max_length") == 0
    if one["type"] in _REFUSED or must_be_empty:
        return UnsupportedField.field(name, "is not supported; leave it out.")
    if one["type"] in _TAGS:
        told = one["ctx"]
        name = f"{name}.{told['discriminator'].strip(chr(39))}"
        return WrongBody.field(name, f"must be one of {told.get('expected_tags', 'the known ones')}.")
    if one["type"] == "literal_error":
        expected = one["ctx"]["expected"]
        return UnsupportedField.field(name, f"can only be {expected}; nothing else is supported.")
    return WrongBody.field(name, "is required." if one["type"] == "missing" else _sentence(one["msg"]))


def _sentence(message: str) -> str:
    text = message.removeprefix("Value error, ").removeprefix("Input should be ")
    if text != message and message.startswith("Input"):
        text = f"must be {text}"
    return text if text.endswith(".") else f"{text}."


def _place(loc: Sequence[Any], value: Any, kind: str) -> list[int | str]:
    """The parts of a location that lie in the value; the others name a union's alternatives."""
    place: list[int | str] = []
    for part in loc:
        inside = isinstance(value, dict) and part in value
        if inside or (isinstance(value, list) and isinstance(part, int) and part < len(value)):
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
