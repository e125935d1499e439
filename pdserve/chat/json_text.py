"""JSON objects that users send as texts, read once, within limits. Not here: JSON that a model writes
(`json_scan`)."""

from __future__ import annotations

import json
from typing import Any

from pdserve.errors import InvalidRequest

MAX_OBJECT_BYTES = 64 << 10
MAX_DEPTH = 64


def json_object(field: str, text: str) -> dict[str, Any]:
    """The object that a text spells. Raises InvalidRequest naming the field."""
    if len(text.encode("utf-8", "replace")) > MAX_OBJECT_BYTES:
        raise InvalidRequest.field(field, f"may have {MAX_OBJECT_BYTES} bytes at most.")
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or _depth(value) > MAX_DEPTH:
        raise InvalidRequest.field(field, f"must be a JSON object, of {MAX_DEPTH} levels at most.")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(name)


def _depth(value: Any) -> int:
    level, depth = [value], 0
    while level:
        depth += 1
        inner = (part.values() if isinstance(part, dict) else part for part in level)
        level = [each for parts in inner for each in parts if isinstance(each, (dict, list))]
    return depth
