"""Small JSON files of a model directory, read with limits.

What lives here: bytes to a dict, refusing what is too large, too deep, duplicated or not an object. What
does not: what the fields mean.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pdserve.errors import ModelError

MAX_CONFIG_BYTES = 1 << 20
MAX_INDEX_BYTES = 64 << 20


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("duplicate name")
    return values


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `data`. Raises ModelError naming `what` if it is anything else."""
    try:
        value = json.loads(data, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{what} is not valid JSON with each name once; fetch the model again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{what} must be a JSON object.")
    return value


def read_object(path: Path, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in a file of at most `limit` bytes. Raises ModelError if it is anything else."""
    try:
        if not path.is_file():
            raise ModelError(f"The model directory has no {path.name}.")
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise ModelError(f"{path.name} can not be read; check its permissions.") from error
    if len(data) > limit:
        raise ModelError(f"{path.name} is larger than {limit >> 20} MiB.")
    return parse_object(data, path.name)
