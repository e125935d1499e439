"""Writes docs/configuration.md from the declared settings; `--check` only says whether it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

from pdserve.cli.components import COMPONENTS
from pdserve.config.document import page

TARGET = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"


def main(argv: list[str]) -> int:
    """Exit code 1 when --check finds a difference; it says so."""
    text = page(COMPONENTS)
    if "--check" in argv:
        if TARGET.exists() and TARGET.read_text("utf-8") == text:
            return 0
        print("docs/configuration.md is not current: python scripts/gen_config_docs.py")
        return 1
    TARGET.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
