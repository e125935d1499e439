"""`pdserve config show`."""

from __future__ import annotations

import dataclasses
import json

from pdserve.config import Resolved, ServeConfig
from pdserve.config.fields import info_of, show


def run(resolved: Resolved[ServeConfig], as_json: bool) -> None:
    """Prints name, value and origin of each setting; "auto" as what it becomes here. Raises ConfigError."""
    config = resolved.config.resolved()
    rows = []
    for field in dataclasses.fields(config):
        asked, value = getattr(resolved.config, field.name), getattr(config, field.name)
        note = " (auto)" if asked is None else ""
        rows.append((field.name, show(value, info_of(field)) + note, resolved.origins[field.name]))
    if as_json:
        print(
            json.dumps({name: {"value": value, "origin": origin} for name, value, origin in rows}, indent=2)
        )
        return
    names, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, value, origin in rows:
        print(f"{name:<{names}}  {value:<{values}}  {origin}")
