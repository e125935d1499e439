"""JSON objects that users send as texts, read once, within limits. Not here: JSON that a model writes
(`json_scan`)."""

from __future__ import annotations

import json
from typing import Any

from pdserve.errors import InvalidRequest
from pdserve.json_depth import MAX_DEPTH, is_too_deep

MAX_OBJECT_BYTES = 64 << 10


def json_object(field: str, text: str) -> dict[str, Any]:
    """The object that a text spells. Raises InvalidRequest naming the field."""
    if len(text.encode("utf-8", "replace")) > MAX_OBJECT_BYTES:
        raise InvalidRequest.field(field, f"may have {MAX_OBJECT_BYTES} bytes at most.")
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or is_too_deep(value):
        raise InvalidRequest.field(field, f"must be a JSON object, of {MAX_DEPTH} levels at most.")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(name)
