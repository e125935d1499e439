"""The file that `pdserve bench --json` writes: what was measured, on what, with which settings."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pdserve.bench.machine import now
from pdserve.errors import ConfigError

FORMAT = "pdserve.bench/1"


def document(
    kind: str,
    settings: Mapping[str, Any],
    cases: Sequence[Mapping[str, Any]],
    about: Mapping[str, Any],
    **more: Any,
) -> dict[str, Any]:
    """format, kind, date (UTC), version, machine, settings, cases; and what a kind has more. about: of the
    machine (`machine`), as it was before.
    """
    return {
        "format": FORMAT,
        "kind": kind,
        "date": now().isoformat(),
        "version": version("pdserve"),
        "machine": dict(about),
        "settings": dict(settings),
        "cases": list(cases),
        **{name: _plain(value) for name, value in more.items()},
    }


def _plain(value: Any) -> Any:
    is_data = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return dataclasses.asdict(value) if is_data else value


def check_target(target: Path | None) -> None:
    """Raises ConfigError, before anything is measured, where the file could not be written."""
    if target is None:
        return
    try:
        folder, taken = target.parent.is_dir(), target.is_dir()
    except OSError:
        raise ConfigError("json: no file can have that name there") from None
    if not folder:
        raise ConfigError("json: there is no such folder")
    if taken:
        raise ConfigError("json: that is a folder; name a file")


def write(target: Path, result: Mapping[str, Any]) -> None:
    """Raises ConfigError where the file can not be written."""
    try:
        target.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    except OSError:
        raise ConfigError("json: the file can not be written") from None
