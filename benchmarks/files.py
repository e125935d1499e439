"""Writes what was measured: results/latest.* and a dated copy, or partial.* for an incomplete run."""

from __future__ import annotations

import datetime
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.show import plot

RESULTS = Path(__file__).resolve().parent / "results"


def write(
    lines: list[dict[str, Any]],
    engines: Sequence[str],
    date: datetime.datetime,
    *,
    complete: bool,
    say: Callable[[str], None],
) -> None:
    """JSON and plot; what is published in latest.* is a complete run and nothing less."""
    RESULTS.mkdir(exist_ok=True)
    name = "latest" if complete else "partial"
    target = RESULTS / f"{name}.json"
    target.write_text(json.dumps(lines, indent=1, ensure_ascii=False) + "\n")
    plot(lines, engines, target.with_suffix(".png"))
    if complete:
        for suffix in (".json", ".png"):
            shutil.copy(target.with_suffix(suffix), RESULTS / f"{date:%Y-%m-%d-%H%M}{suffix}")
    say(f"written: benchmarks/results/{name}.json and .png")
