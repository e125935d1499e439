"""Planning in a process of its own: `python -m pdserve.parallel.plan_process < snapshot > plan`, JSON both.

The planner is Python and takes up to a second: on a thread of a worker it would hold the interpreter that the
steps need. What lives here: both ends of that process. What does not: the planner (`placement`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

from pdserve.errors import ConfigError, InternalError
from pdserve.parallel.expert_snapshot import ExpertSnapshot, snapshot_from_json, snapshot_to_json
from pdserve.parallel.placement import plan
from pdserve.parallel.placement_table import Placement

LIMIT_S = 120.0
NICE = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A table to come to. copies: of weights that it needs. gain: part of the fullest ranks' load, over all
    layers, that it saves, 0 to 1.
    """

    table: Placement
    copies: int
    gain: float


def propose(snapshot: ExpertSnapshot) -> Proposal:
    """What a rebalance of these loads would come to. Pure, and slow."""
    table = snapshot.table
    planned = plan(snapshot.loads, table.topology, table.slots_per_rank, current=table)
    now = sum(table.largest(n, loads) for n, loads in enumerate(snapshot.loads))
    after = sum(planned.table.largest(n, loads) for n, loads in enumerate(snapshot.loads))
    gain = 1 - after / now if now else 0.0
    return Proposal(table=planned.table, copies=len(planned.copies), gain=max(0.0, gain))


def propose_elsewhere(snapshot: ExpertSnapshot) -> Proposal:
    """The same in a process of its own; blocks. Raises InternalError if that fails."""
    command = [sys.executable, "-m", "pdserve.parallel.plan_process"]
    asked = json.dumps(snapshot_to_json(snapshot))
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            command, input=asked, capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
        told = json.loads(done.stdout)
        table = snapshot_from_json(told["snapshot"]).table
        return Proposal(table=table, copies=int(told["copies"]), gain=float(told["gain"]))
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, ConfigError) as error:
        raise InternalError("the placement of experts could not be planned") from error


def main() -> None:
    """The process."""
    os.nice(NICE)
    snapshot = snapshot_from_json(json.load(sys.stdin))
    proposal = propose(snapshot)
    after = ExpertSnapshot(
        name=snapshot.name, layers=snapshot.layers, loads=snapshot.loads, table=proposal.table
    )
    json.dump(
        {"snapshot": snapshot_to_json(after), "copies": proposal.copies, "gain": proposal.gain}, sys.stdout
    )


if __name__ == "__main__":
    main()
