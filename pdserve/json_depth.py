"""How deep JSON may be nested, wherever clients send it or models write it: one limit, counted in one way."""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 64
"""Arrays and objects within each other, the outermost included."""


def is_too_deep(value: Any) -> bool:
    """Whether a JSON value has more than MAX_DEPTH levels; scalars are none."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for inner in level if isinstance(inner, dict | list)]
        if not level:
            return False
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
    return True
