"""Ranks as real processes for tests: spawns n of them once, each calls a function and leaves its answer.

What lives here: spawning and collecting. What does not: what the ranks do (`rank_cases`), checks.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import traceback
from pathlib import Path
from typing import Any

LIMIT_S = 100.0


def run_ranks(size: int, function: str, folder: Path, **arguments: Any) -> list[Any]:
    """Calls `module:function(rank, size, folder, **arguments)` in `size` processes; answers by rank, as JSON.

    A rank that ends without an answer has None; one that raises fails the test with its traceback.
    """
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=_child, args=(function, rank, size, folder, arguments), daemon=True)
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(LIMIT_S)
    late = [process for process in ranks if process.is_alive()]
    for process in late:
        process.kill()
        process.join()
    errors = [path.read_text() for path in sorted(folder.glob("error-*"))]
    assert not errors, "\n".join(errors)
    assert not late, "ranks did not end"
    return [_answer(folder / f"answer-{rank}") for rank in range(size)]


def _answer(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def _child(function: str, rank: int, size: int, folder: Path, arguments: dict[str, Any]) -> None:
    module, _, name = function.partition(":")
    try:
        answer = getattr(importlib.import_module(module), name)(rank, size, folder, **arguments)
    except BaseException:
        (folder / f"error-{rank}").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise
    (folder / f"answer-{rank}").write_text(json.dumps(answer))
