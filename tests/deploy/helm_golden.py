"""The examples as they were rendered last, so that a review sees what a change of the chart does to them.

`python -m tests.deploy.helm_golden` writes tests/data/helm anew. Dashboards and rules are left out (they are
compared elsewhere), and so is what chart-made secrets hold.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.chart import EXAMPLES, text
from tests.support.source_tree import ROOT

FOLDER = ROOT / "tests" / "data" / "helm"
_SECRET = re.compile(r"^(  (?:secret|auth_token): ).*$", re.MULTILINE)


def golden(example: str) -> str:
    """What should be in the example's file."""
    rendered = text(example, "monitoring.dashboards=false", "monitoring.rules=false")
    return _SECRET.sub(r"\1(made by helm)", rendered)


def path(example: str) -> Path:
    """The example's file."""
    return FOLDER / f"{example}.yaml"


def main() -> None:
    """Writes all of them."""
    for example in EXAMPLES:
        path(example).write_text(golden(example), "utf-8")


if __name__ == "__main__":
    main()
