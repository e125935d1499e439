"""Finding the programs that tests run and pip does not install by name; scripts/test_tools.sh gets them."""

from __future__ import annotations

import shutil

from tests.support.source_tree import ROOT

TOOLS = ROOT / ".cache" / "tools"


def tool(name: str) -> str:
    """The path of a program such as "helm": what `make test` put into the tree, else what is on the path.

    Raises AssertionError saying how to get it: a test without its tool fails, it does not pass unseen.
    """
    ours = TOOLS / name
    if ours.exists():
        return str(ours)
    found = shutil.which(name)
    assert found, f"{name} is neither in .cache/tools nor on the path; `make test` gets it"
    return found
