"""`pdserve status`: the router's view of its fleet, as tables or as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from pdserve.cli.connection import Router
from pdserve.client import FleetStatus, WorkerStatus
from pdserve.types import AGE_LIMITS_S

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = (
    "worker", "role", "incarnation", "pid", "state", "running", "waiting", "outstanding", "pages",
    "free", "evictable", "used", "quarantined", "transfers (peak)", "age",
)  # fmt: skip


def run(router: Router, as_json: bool) -> None:
    """Asks the router and prints. Raises PdserveError."""
    with router.client() as client:
        status = client.get_status()
    if as_json:
        print(json.dumps(dataclasses.asdict(status), indent=2))
        return
    _table(status)


def _table(status: FleetStatus) -> None:
    from rich.console import Console
    from rich.table import Table

    state = "draining" if status.draining else "serving"
    print(
        f"router {status.router_id}: {state} for {status.uptime_s:.0f} s, {status.queued} queued, "
        f"{status.running} running"
    )
    table = Table(*COLUMNS, box=None)
    for worker in status.workers:
        table.add_row(*_row(worker))
    console = Console()
    console = Console(width=console.width if console.is_terminal else 200)
    console.print(table)
    if any(sum(used.counts) for worker in status.workers for used in worker.load.page_ages):
        console.print(_used(status))
    for problem in status.pairing_problems:
        print(f"problem: {problem}")


def _used(status: FleetStatus) -> Table:
    """Pages in use by what for and how long: memory that is stranded shows as old."""
    from rich.table import Table

    ages = [f"< {limit:g} s" for limit in AGE_LIMITS_S]
    table = Table("worker", "pages in use", "pages", "MB", *ages, "older", box=None)
    for worker in status.workers:
        size = worker.record.capability.page_bytes / 1e6
        for used in worker.load.page_ages:
            if total := sum(used.counts):
                counts = [str(count) for count in used.counts]
                name = worker.record.peer.worker_id
                table.add_row(name, used.state, str(total), f"{total * size:.1f}", *counts)
    return table


def _row(worker: WorkerStatus) -> tuple[str, ...]:
    record, load = worker.record, worker.load
    held = load.num_pages - load.free_pages - load.evictable_pages - load.quarantined_pages
    return (
        record.peer.worker_id,
        str(record.role),
        f"{record.peer.incarnation:016x}",
        str(record.pid),
        worker.state,
        str(load.num_running),
        f"{load.num_waiting} ({load.waiting_tokens} tok)",
        f"{worker.outstanding_requests} ({worker.outstanding_tokens} tok)",
        f"{load.num_pages} x {record.page_size} tok",
        str(load.free_pages),
        str(load.evictable_pages),
        str(held),
        str(load.quarantined_pages),
        f"{load.transfer_pages} ({load.peak_transfer_pages})",
        f"{worker.heartbeat_age_s:.1f} s",
    )
