"""What must stay where a mount hides /tmp: the source tree and Python's environment may lie below it."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from tests.support.source_tree import ROOT

TMP = Path("/tmp")


def over_tmp(mount: str) -> list[str]:
    """Shell lines around a mount over /tmp: what lies below it and is needed stays, seen through a descriptor
    that was opened before."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdserve"
    wanted = {path for path in (ROOT, Path(sys.prefix), cache) if TMP in path.parents and path.is_dir()}
    kept = sorted(path for path in wanted if not wanted & set(path.parents))
    opened = [f"exec {number}< {shlex.quote(str(path))}" for number, path in enumerate(kept, 5)]
    bound = [
        # Taken as it stands: what the descriptor's link reads is a path that leads elsewhere by now.
        f"mkdir -p {(at := shlex.quote(str(path)))}; "
        f"mount --no-canonicalize --bind /proc/self/fd/{number} {at}; exec {number}<&-"
        for number, path in enumerate(kept, 5)
    ]
    return [*opened, mount, *bound]
