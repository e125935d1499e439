"""JSON as we read and write it: no duplicate names, no NaN, no lone surrogates, at most 64 levels.

RFC 8259 leaves those to the reader, and readers that differ are how checks are passed by. What does not live
here: what a body means (`schema`).
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from pdserve.errors import InvalidRequest
from pdserve.json_depth import MAX_DEPTH, is_too_deep

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def load(raw: bytes) -> Any:
    """A JSON text's value. Raises InvalidRequest; the message holds nothing of the text."""
    try:
        value = json.loads(
            raw.decode(), object_pairs_hook=_object, parse_constant=_constant, parse_float=_float
        )
        if _SURROGATE.search(raw):
            dump(value)  # raises for half of a pair
    except InvalidRequest:
        raise
    except UnicodeError:
        raise InvalidRequest("The body is not UTF-8 throughout, escapes included.") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError:
        raise InvalidRequest("The body is not JSON.") from None
    if is_too_deep(value):
        raise _too_deep()
    return value


def dump(value: Any) -> bytes:
    """Compact JSON. Raises ValueError for NaN and infinities."""
    return _ENCODE(value).encode()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise InvalidRequest("The body names a field twice in one object.")
    return value


def _constant(name: str) -> NoReturn:
    raise InvalidRequest("The body holds NaN or an infinity, which JSON does not have.")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise InvalidRequest("The body holds a number that is too large.")
    return value


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"The body nests more than {MAX_DEPTH} levels deep.")
