"""Snapshots of experts in files: for `pdserve experts`, and the placement that a worker starts with."""

from __future__ import annotations

import json
from pathlib import Path

from pdserve.errors import ConfigError
from pdserve.parallel.expert_snapshot import ExpertSnapshot, snapshot_from_json, snapshot_to_json
from pdserve.parallel.placement_table import Placement

MAX_BYTES = 256 << 20


def read_snapshot(path: Path, field: str) -> ExpertSnapshot:
    """field: named in errors. Raises ConfigError for a file that is no snapshot."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{field}: the file is too large for a snapshot of experts")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"{field}: the file can not be read") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{field}: the file is not JSON") from None
    return snapshot_from_json(data)


def read_placement(path: str) -> Placement | None:
    """The table of a worker's setting; None for an empty one. Raises ConfigError."""
    return read_snapshot(Path(path), "expert_placement").table if path else None


def write_snapshot(snapshot: ExpertSnapshot, path: Path, field: str) -> None:
    """Raises ConfigError where the file can not be written."""
    try:
        path.write_text(json.dumps(snapshot_to_json(snapshot)) + "\n", encoding="utf-8")
    except OSError:
        raise ConfigError(f"{field}: the file can not be written") from None
