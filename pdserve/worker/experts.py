"""A worker's experts: the decayed window of their loads, and where they lie.

What lives here: what GetWorkerExperts tells. What does not: counting (`pdserve.layers.moe`), planning
(`pdserve.parallel.placement`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pdserve.api import ExpertReport
from pdserve.parallel.expert_loads import LoadWindow
from pdserve.parallel.expert_snapshot import ExpertSnapshot
from pdserve.parallel.placement_table import Placement, Topology, contiguous

HALF_LIFE_S = 60.0
"""A token counts half after a minute: long against a request, short against a day's drift."""
EVERY_S = 1.0
"""Counts enter the window so often at most."""


class Counts(Protocol):
    """Tokens by layer and expert since the start, such as `ExpertLoad.counts_LX`."""

    def tolist(self) -> list[list[int]]:
        """A row for each layer of the model."""
        ...


class ExpertWatch:
    """Belongs to the control thread; counts may be a moment old. layers: the model's with experts. ranks: of
    the worker. table: where its experts lie; None: in order (`pdserve.models.sharded_experts`).
    """

    def __init__(
        self,
        name: str,
        counts: Counts | None,
        layers: Sequence[int],
        ranks: int = 1,
        table: Placement | None = None,
    ) -> None:
        """counts: None for a model without experts."""
        self._name, self._counts = name, counts
        self._layers = tuple(layers) if counts is not None else ()
        self._seen = self._read()
        self._noted_at = float("-inf")
        width = len(self._seen[0]) if self._seen else 0
        self._window = LoadWindow(len(self._layers), width, HALF_LIFE_S) if width else None
        topology = Topology(num_nodes=1, ranks_per_node=ranks)
        self._table = table or contiguous(len(self._layers), width, topology, max(1, -(-width // ranks)))

    def note(self, now: float) -> None:
        """Takes what has been counted since the last time into the window. now: monotonic seconds."""
        if self._window is None or now < self._noted_at + EVERY_S:
            return
        self._noted_at = now
        counts = self._read()
        for number, (row, seen) in enumerate(zip(counts, self._seen, strict=True)):
            self._window.add(number, [max(0, c - s) for c, s in zip(row, seen, strict=True)], now)
        self._seen = counts

    def moved(self, table: Placement) -> None:
        """Its experts lie there from now on."""
        self._table = table

    def snapshot(self, now: float) -> ExpertSnapshot:
        """Loads of the window, none of them left out, and the table. Raises ConfigError without experts."""
        self._noted_at = float("-inf")
        self.note(now)
        loads = () if self._window is None else self._window.loads(now)
        return ExpertSnapshot(name=self._name, layers=self._layers, loads=loads, table=self._table)

    def mean_tokens(self, now: float) -> float:
        """Choices in the window, of a layer on average."""
        self.note(now)
        if self._window is None:
            return 0.0
        return sum(map(sum, self._window.loads(now))) / len(self._layers)

    def imbalance(self, now: float) -> float:
        """The fullest ranks' load over the mean, of all layers together; 0 without load."""
        self.note(now)
        if self._window is None:
            return 0.0
        loads = self._window.loads(now)
        total = sum(map(sum, loads)) / len(self._table.topology.ranks)
        return sum(self._table.largest(n, row) for n, row in enumerate(loads)) / total if total else 0.0

    def report(self, now: float) -> ExpertReport:
        """Loads of the window, at most EVERY_S old."""
        self.note(now)
        if self._window is None:
            return ExpertReport(name=self._name)
        table = self._table
        return ExpertReport(
            name=self._name,
            layers=self._layers,
            loads=self._window.loads(now),
            nodes=table.topology.num_nodes,
            ranks_per_node=table.topology.ranks_per_node,
            lost_ranks=tuple(sorted(table.topology.lost)),
            slots_per_rank=table.slots_per_rank,
            homes=tuple(
                tuple(tuple((home.slot, home.share) for home in homes) for homes in experts)
                for experts in table.layers
            ),
        )

    def _read(self) -> list[list[int]]:
        if self._counts is None:
            return []
        rows = self._counts.tolist()
        return [rows[layer] for layer in self._layers]
