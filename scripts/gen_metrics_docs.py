"""Writes docs/metrics.md from the declared metrics; `--check` only says whether it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

from pdserve.obs.catalogue.document import page

TARGET = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"


def main(argv: list[str]) -> int:
    """Exit code 1 when --check finds a difference; it says so."""
    text = page()
    if "--check" in argv:
        if TARGET.exists() and TARGET.read_text("utf-8") == text:
            return 0
        print("docs/metrics.md is not current: python scripts/gen_metrics_docs.py")
        return 1
    TARGET.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
