"""A progress bar on stderr; where that is no terminal, a line now and then."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(total: int) -> Iterator[Callable[[bool], None]]:
    """Gives a function to call when a request has ended; its argument says whether it failed."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(total)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task, failed = progress.add_task("", total=total), 0

        def advance(error: bool) -> None:
            nonlocal failed
            failed += error
            progress.update(task, advance=1, description=f"{failed} failed" if failed else "")

        yield advance


def _lines(total: int) -> Callable[[bool], None]:
    done = failed = 0

    def advance(error: bool) -> None:
        nonlocal done, failed
        done, failed = done + 1, failed + error
        if done == total or done % max(1, total // 10) == 0:
            print(f"{done}/{total} done, {failed} failed", file=sys.stderr, flush=True)

    return advance
