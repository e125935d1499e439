"""`pdserve doctor`: what this machine has, what is wrong with it, and what to do."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator

from pdserve.cli.checks import CHECKS, Check, Verdict

EXIT_OK, EXIT_FAILED = 0, 1
_MARKS = {Verdict.OK: "green", Verdict.NOTE: "cyan", Verdict.WARN: "yellow", Verdict.FAIL: "red"}


def run(as_json: bool) -> int:
    """Looks at everything and prints it; 1 if something keeps pdserve from serving here."""
    checks = list(examine())
    if as_json:
        print(json.dumps([dataclasses.asdict(each) for each in checks], indent=2))
    else:
        _table(checks)
    return EXIT_FAILED if any(each.verdict is Verdict.FAIL for each in checks) else EXIT_OK


def examine(looks: tuple[Callable[[], Check | Iterator[Check]], ...] = CHECKS) -> Iterator[Check]:
    """The result of every look. One that breaks is a warning: the others are told all the same."""
    for one in looks:
        try:
            found = one()
            yield from (found,) if isinstance(found, Check) else found
        except Exception as error:
            subject = one.__name__.replace("_", " ")
            yield Check(subject=subject, verdict=Verdict.WARN, found=f"could not be checked: {error}")


def _table(checks: list[Check]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for each in checks:
        text = Text(each.found)
        if each.advice:
            text.append(f"\n{each.advice}", style="bold")
        table.add_row(Text(each.verdict, style=_MARKS[each.verdict]), each.subject, text)
    Console(width=console.width if console.is_terminal else 120).print(table)
    counts = {verdict: sum(each.verdict is verdict for each in checks) for verdict in Verdict}
    if counts[Verdict.FAIL]:
        console.print(f"{counts[Verdict.FAIL]} to mend before pdserve serves here")
    else:
        console.print(f"pdserve can serve here; {counts[Verdict.WARN]} warnings")
