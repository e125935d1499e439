"""Loads of experts and where they lie, at one moment, as data and as JSON. Pure.

What lives here: what `pdserve experts` reads from a file or from workers, parsed once into a checked type.
What does not: the window that counts (`expert_loads`), planning (`placement`), showing it
(`pdserve.cli.experts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from pdserve.errors import ConfigError
from pdserve.parallel.placement_table import Home, Placement, Topology, contiguous


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSnapshot:
    """name: whose. layers: the model's numbers of the layers that have experts. loads: by such layer and
    expert, tokens. table: where the experts are. balance_losses: by such layer, of its router; none where
    nobody counted. Raises ConfigError if these do not fit each other.
    """

    name: str
    layers: tuple[int, ...]
    loads: tuple[tuple[float, ...], ...]
    table: Placement
    balance_losses: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        lengths = {len(self.layers), len(self.loads), len(self.balance_losses) or len(self.loads)}
        if lengths != {self.table.num_layers}:
            raise ConfigError("snapshot: layers, loads and homes are of different lengths")
        if any(len(row) != self.table.num_experts for row in self.loads):
            raise ConfigError("snapshot: loads and homes are for different numbers of experts")
        if not all(isfinite(load) and load >= 0 for row in self.loads for load in row):
            raise ConfigError("snapshot: every load must be a number from 0")

    def moved_to(self, topology: Topology, slots_per_rank: int) -> ExpertSnapshot:
        """The same loads on another machine, experts in order on its ranks."""
        table = contiguous(len(self.loads), self.table.num_experts, topology, slots_per_rank)
        return replace(self, table=table)


def snapshot_to_json(snapshot: ExpertSnapshot) -> dict[str, Any]:
    """As plain data; shares and loads as they are."""
    table = snapshot.table
    return {
        "name": snapshot.name,
        "layers": list(snapshot.layers),
        "loads": [list(row) for row in snapshot.loads],
        "nodes": table.topology.num_nodes,
        "ranks_per_node": table.topology.ranks_per_node,
        "lost_ranks": sorted(table.topology.lost),
        "slots_per_rank": table.slots_per_rank,
        "homes": [[[[h.slot, h.share] for h in homes] for homes in layer] for layer in table.layers],
        "balance_losses": list(snapshot.balance_losses),
    }


def snapshot_from_json(data: object) -> ExpertSnapshot:
    """Raises ConfigError for anything that is not a snapshot. Without homes experts are in order on the
    ranks; without ranks and slots they are all on one; without layers these are numbered from 0.
    """
    if not isinstance(data, Mapping):
        raise ConfigError("snapshot: a JSON object is expected")
    try:
        loads = tuple(tuple(float(load) for load in row) for row in _list(data["loads"]))
        nodes, ranks = int(data.get("nodes", 1)), int(data.get("ranks_per_node", 1))
        lost = frozenset(int(rank) for rank in data.get("lost_ranks", ()))
        topology = Topology(num_nodes=nodes, ranks_per_node=ranks, lost=lost)
        width = len(loads[0]) if loads else 0
        slots = int(data.get("slots_per_rank", -(-width // len(topology.ranks))))
        return ExpertSnapshot(
            name=str(data.get("name", "")),
            layers=tuple(int(layer) for layer in data.get("layers", range(len(loads)))),
            loads=loads,
            table=_table(data.get("homes"), len(loads), width, topology, slots),
            balance_losses=tuple(float(loss) for loss in data.get("balance_losses", ())),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ConfigError(
            "snapshot: a field is missing or of the wrong kind; see docs/placement.md"
        ) from None


def _list(value: object) -> Sequence[Sequence[Any]]:
    if not isinstance(value, list | tuple) or not value:
        raise ConfigError("snapshot: loads: a list with a list of numbers for each layer is expected")
    return value


def _table(homes: Any, num_layers: int, width: int, topology: Topology, slots: int) -> Placement:
    if slots < 1:
        raise ConfigError("snapshot: slots_per_rank: must be 1 or more")
    if homes is None:
        return contiguous(num_layers, width, topology, slots)
    layers = tuple(
        tuple(
            tuple(
                Home(rank=int(slot) // slots, slot=int(slot), share=float(share)) for slot, share in of_expert
            )
            for of_expert in layer
        )
        for layer in homes
    )
    return Placement(topology=topology, slots_per_rank=slots, layers=layers)
