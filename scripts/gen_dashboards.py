"""Writes deploy/grafana/dashboards from `pdserve.obs.dashboards`; `--check` says whether they are current."""

from __future__ import annotations

import sys
from pathlib import Path

from pdserve.obs.dashboards import DASHBOARDS
from pdserve.obs.dashboards.grafana import file_text

FOLDER = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "dashboards"


def main(argv: list[str]) -> int:
    """Exit code 1 when --check finds a difference; it names the files."""
    wanted = {f"{dashboard.uid}.json": file_text(dashboard) for dashboard in DASHBOARDS}
    found = {path.name: path.read_text("utf-8") for path in FOLDER.glob("*.json")}
    differing = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if "--check" in argv:
        for name in differing:
            print(f"deploy/grafana/dashboards/{name} is not current: python scripts/gen_dashboards.py")
        return 1 if differing else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in differing:
        if name in wanted:
            (FOLDER / name).write_text(wanted[name], "utf-8")
        else:
            (FOLDER / name).unlink()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
