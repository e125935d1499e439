"""`pdserve config show`."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from pdserve.config import Resolved, ServeConfig
from pdserve.config.fields import info_of, show
from pdserve.config.precision import EXACT
from pdserve.errors import ModelError


def run(resolved: Resolved[ServeConfig], as_json: bool) -> None:
    """Prints name, value and origin of each setting; "auto" as what it becomes here. Raises ConfigError."""
    config = resolved.config.resolved()
    config, reasons = _with_weights(config)
    rows = []
    for field in dataclasses.fields(config):
        asked, value = getattr(resolved.config, field.name), getattr(config, field.name)
        note = " (auto)" if asked is None and value is not None else ""
        rows.append((field.name, show(value, info_of(field)) + note, resolved.origins[field.name]))
    if as_json:
        shown = {name: {"value": value, "origin": origin} for name, value, origin in rows}
        for name, why in reasons.items():
            shown[name]["why"] = why
        print(json.dumps(shown, indent=2))
        return
    names, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, value, origin in rows:
        print(f"{name:<{names}}  {value:<{values}}  {origin}")
    for name, why in reasons.items():
        print(f"{name}: {why}")


def _with_weights(config: ServeConfig) -> tuple[ServeConfig, dict[str, str]]:
    """What workers would choose on this machine, and why, by setting. Others may have another CPU."""
    if config.precision == EXACT:
        return config, {}
    from pdserve.worker.precision import chosen, settled

    found: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for role in config.wanted():
        name = f"{role}_weights"
        try:
            choice = chosen(config.wish(role), config.model)
        except ModelError as error:
            reasons[name] = f"the worker chooses; here {error.message}"
        else:
            found[name], reasons[name] = choice.weights, choice.why
            pages = settled(config.worker(role, secret="", routers=(), run_dir=""), lambda _: None).page_dtype
            found["kv_dtype"] = pages
    return dataclasses.replace(config, **found), reasons
