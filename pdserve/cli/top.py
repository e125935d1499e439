"""`pdserve top`: the fleet as it works, drawn anew every second; or one look, also as JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pdserve.cli.connection import Router
from pdserve.client import Client, FleetStatus, WorkerStatus
from pdserve.errors import PdserveError
from pdserve.obs.rates import History, sparkline

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

SPARKS = 40
_PAGES = (
    ("free", "free_pages", "green"),
    ("evictable", "evictable_pages", "cyan"),
    ("reserved", "reserved_pages", "yellow"),
    ("filling", "filling_pages", "blue"),
    ("sealed", "sealed_pages", "magenta"),
    ("retiring", "retiring_pages", "white"),
    ("quarantined", "quarantined_pages", "red"),
)
_FIGURES = (
    ("tokens/s", "completion_tokens", 1.0, "{:,.0f}"),
    ("TTFT p50", "ttft_p50", 1e3, "{:,.0f} ms"),
    ("TTFT p99", "ttft_p99", 1e3, "{:,.0f} ms"),
    ("ITL p50", "itl_p50", 1e3, "{:,.1f} ms"),
    ("ITL p99", "itl_p99", 1e3, "{:,.1f} ms"),
)


def run(router: Router, *, once: bool, as_json: bool, interval: float) -> None:
    """Looks until Ctrl-C; with `once`, as JSON, or where nobody watches (the output is no terminal), at two
    moments `interval` seconds apart, then ends.

    Raises PdserveError if the router can not be reached at first; later it waits until it is back.
    """
    history = History()
    with router.client() as client:
        status = look(client, history)
        if once or as_json or not sys.stdout.isatty():
            time.sleep(interval)
            _show_once(look(client, history), history, as_json)
            return
        _watch(lambda: look(client, history), status, history, interval)


def look(client: Client, history: History) -> FleetStatus:
    """Asks once and remembers. Raises PdserveError."""
    status = client.get_status()
    history.push(status, time.monotonic())
    return status


def _show_once(status: FleetStatus, history: History, as_json: bool) -> None:
    if as_json:
        plain: dict[str, Any] = {"rates": dataclasses.asdict(history.now), **dataclasses.asdict(status)}
        print(json.dumps(plain, indent=2))
        return
    from rich.console import Console

    console = Console()
    Console(width=console.width if console.is_terminal else 120).print(screen(status, history))


def _watch(ask: Callable[[], FleetStatus], status: FleetStatus, history: History, interval: float) -> None:
    from rich.live import Live
    from rich.text import Text

    with Live(screen(status, history), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            try:
                live.update(screen(ask(), history), refresh=True)
            except PdserveError as error:
                live.update(Text(f"{error.message}\nStill trying; Ctrl-C ends."), refresh=True)


def screen(status: FleetStatus, history: History) -> Group:
    """The whole page."""
    from rich.console import Group
    from rich.text import Text

    now = history.now
    state = "draining" if status.draining else "serving"
    cached = "-" if now.cached_share is None else f"{now.cached_share:.0%}"
    head = Text(
        f"router {status.router_id}  {state} for {_age(status.uptime_s)}   {status.running} running, "
        f"{status.queued} queued   {now.requests:.1f} requests/s, {now.failures:.1f} failed/s   "
        f"prompts {now.prompt_tokens:,.0f} tokens/s ({cached} cached)"
    )
    problems = [Text(f"problem: {problem}", style="red") for problem in status.pairing_problems]
    return Group(head, Text(), _figures(history), Text(), _workers(status), _legend(), *problems)


def _figures(history: History) -> Table:
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for title, name, factor, form in _FIGURES:
        values = history.of(name)
        last = next((value for value in reversed(values) if value is not None), None)
        shown = "-" if last is None else form.format(last * factor)
        table.add_row(title, shown.rjust(10), sparkline(values, SPARKS))
    return table


def _workers(status: FleetStatus) -> Table:
    from rich.table import Table

    table = Table("worker", "role", "state", "running", "waiting", "pages by state", "used", box=None)
    for worker in status.workers:
        load = worker.load
        used = 1 - (load.free_pages + load.evictable_pages) / load.num_pages if load.num_pages else 0.0
        table.add_row(
            worker.record.peer.worker_id,
            str(worker.record.role),
            worker.state,
            str(load.num_running),
            f"{load.num_waiting} ({load.waiting_tokens:,} tok)",
            _bar(worker),
            f"{used:.0%} of {load.num_pages:,}",
        )
    return table


def _bar(worker: WorkerStatus, width: int = 32) -> str:
    """A worker's pool as a bar; a state that has pages has a cell, however few they are."""
    counts = [getattr(worker.load, name) for _, name, _ in _PAGES]
    total = sum(counts) or 1
    cells = [max(1, round(count / total * width)) if count else 0 for count in counts]
    cells[cells.index(max(cells))] += width - sum(cells)
    return "".join(f"[{colour}]{'█' * n}[/]" for (_, _, colour), n in zip(_PAGES, cells, strict=True) if n)


def _legend() -> str:
    return "\npages: " + "  ".join(f"[{colour}]█[/] {title}" for title, _, colour in _PAGES)


def _age(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
