"""Planning in a process of its own: `python -m pdserve.parallel.plan_process`, JSON lines in and out.

The planner is Python and takes up to seconds: on a thread of a worker it would hold the interpreter that the
steps need. Even to write and read large tables is cut into layers, with pauses between. What lives here: both
ends of that process. What does not: the planner (`placement`).

    in     {"name", "nodes", …} as in a snapshot, without layers | for each layer [number, loads, homes]
    out    {"gain", "copies": [[layer, expert, source, rank, slot], …]} | for each new layer [n, homes]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pdserve.errors import ConfigError, InternalError
from pdserve.parallel.expert_snapshot import ExpertSnapshot, snapshot_from_json
from pdserve.parallel.placement import plan
from pdserve.parallel.placement_table import Copy, Home, Layer, Placement

LIMIT_S = 120.0
NICE = 10
PAUSE_S = 0.002
Pause = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A table to come to; layers that do not change are the present one's. copies: of weights that it needs.
    gain: part of the fullest ranks' load, over all layers, that it saves, 0 to 1.
    """

    table: Placement
    copies: tuple[Copy, ...]
    gain: float


def propose(snapshot: ExpertSnapshot) -> Proposal:
    """What a rebalance of these loads would come to. Pure, and slow."""
    table = snapshot.table
    planned = plan(snapshot.loads, table.topology, table.slots_per_rank, current=table)
    now = sum(table.largest(n, loads) for n, loads in enumerate(snapshot.loads))
    after = sum(planned.table.largest(n, loads) for n, loads in enumerate(snapshot.loads))
    changed = [n for n, layer in enumerate(planned.table.layers) if layer != table.layers[n]]
    gain = max(0.0, 1 - after / now) if now else 0.0
    return Proposal(table=table.mixed(planned.table, changed), copies=planned.copies, gain=gain)


def propose_elsewhere(snapshot: ExpertSnapshot) -> Proposal:
    """The same in a process of its own; blocks. Raises InternalError if that fails."""
    command = [sys.executable, "-m", "pdserve.parallel.plan_process"]
    asked = "".join(_asked(snapshot, _pause))
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            command, input=asked, capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
        return _proposal(done.stdout.splitlines(), snapshot.table, _pause)
    except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError, ConfigError) as error:
        raise InternalError("the placement of experts could not be planned") from error


def _pause() -> None:
    time.sleep(PAUSE_S)


def _asked(snapshot: ExpertSnapshot, pause: Pause) -> Iterator[str]:
    topology = snapshot.table.topology
    head = {
        "name": snapshot.name, "nodes": topology.num_nodes, "ranks_per_node": topology.ranks_per_node,
        "lost_ranks": sorted(topology.lost), "slots_per_rank": snapshot.table.slots_per_rank,
    }  # fmt: skip
    yield json.dumps(head) + "\n"
    for n, layer in enumerate(snapshot.layers):
        yield json.dumps([layer, snapshot.loads[n], _plain(snapshot.table.layers[n])]) + "\n"
        pause()


def _plain(layer: Layer) -> list[list[tuple[int, float]]]:
    return [[(home.slot, home.share) for home in homes] for homes in layer]


def _snapshot(lines: Iterable[str]) -> ExpertSnapshot:
    data, *rows = (json.loads(line) for line in lines)
    numbers, loads, homes = zip(*rows, strict=True)
    return snapshot_from_json({**data, "layers": numbers, "loads": loads, "homes": homes})


def _told(proposal: Proposal, before: Placement) -> Iterator[str]:
    copies = [(c.layer, c.expert, c.source, c.rank, c.slot) for c in proposal.copies]
    yield json.dumps({"gain": proposal.gain, "copies": copies}) + "\n"
    for n, layer in enumerate(proposal.table.layers):
        if layer is not before.layers[n]:
            yield json.dumps([n, _plain(layer)]) + "\n"


def _proposal(lines: Iterable[str], table: Placement, pause: Pause) -> Proposal:
    told: dict[str, Any]
    told, *layers = (_read(line, pause) for line in lines)
    slots = table.slots_per_rank
    for number, homes in layers:
        layer = tuple(
            tuple(Home(rank=slot // slots, slot=slot, share=share) for slot, share in of_expert)
            for of_expert in homes
        )
        table = table.with_layer(number, layer)
        pause()
    copies = tuple(
        Copy(layer=layer, expert=expert, source=source, rank=rank, slot=slot)
        for layer, expert, source, rank, slot in told["copies"]
    )
    return Proposal(table=table, copies=copies, gain=float(told["gain"]))


def _read(line: str, pause: Pause) -> Any:
    pause()
    return json.loads(line)


def main() -> None:
    """The process."""
    os.nice(NICE)
    snapshot = _snapshot(sys.stdin)
    sys.stdout.writelines(_told(propose(snapshot), snapshot.table))


if __name__ == "__main__":
    main()
