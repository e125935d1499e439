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
    """By layer and expert since the start, such as `ExpertLoad.counts_LX`."""

    def tolist(self) -> list[list[float]]:
        """A row for each layer of the model."""
        ...


class _Tally:
    """Counts of some layers, and the decayed window that they enter as they grow."""

    def __init__(self, counts: Counts, layers: Sequence[int]) -> None:
        self._counts, self._layers = counts, layers
        self._seen = self._read()
        self.width = len(self._seen[0]) if self._seen else 0
        self._window = LoadWindow(len(layers), self.width, HALF_LIFE_S)
        self._noted_at = float("-inf")

    def note(self, now: float, every_s: float) -> None:
        """Takes what has been counted since the last time; not before every_s have passed."""
        if now < self._noted_at + every_s:
            return
        self._noted_at = now
        counts = self._read()
        for number, (row, seen) in enumerate(zip(counts, self._seen, strict=True)):
            self._window.add(number, [max(0, c - s) for c, s in zip(row, seen, strict=True)], now)
        self._seen = counts

    def loads(self, now: float, every_s: float = 0.0) -> tuple[tuple[float, ...], ...]:
        """Of the window, at most every_s old."""
        self.note(now, every_s)
        return self._window.loads(now)

    def _read(self) -> list[list[float]]:
        rows = self._counts.tolist()
        return [rows[layer] for layer in self._layers]


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
        spread: tuple[Counts, Counts] | None = None,
    ) -> None:
        """counts: None for a model without experts. spread: what balance losses are made of, choices and
        probabilities; None: nobody counts."""
        self._name = name
        self._layers = tuple(layers) if counts is not None else ()
        self._tally = _Tally(counts, self._layers) if counts is not None and self._layers else None
        width = 0 if self._tally is None else self._tally.width
        self._spread = tuple(_Tally(part, self._layers) for part in spread or ()) if self._layers else ()
        topology = Topology(num_nodes=1, ranks_per_node=ranks)
        self._table = table or contiguous(len(self._layers), width, topology, max(1, -(-width // ranks)))

    def note(self, now: float) -> None:
        """Takes what has been counted since the last time into the window. now: monotonic seconds."""
        if self._tally is not None:
            self._tally.note(now, EVERY_S)

    def moved(self, table: Placement) -> None:
        """Its experts lie there from now on."""
        self._table = table

    def snapshot(self, now: float) -> ExpertSnapshot:
        """Loads of the window, none of them left out, and the table. Raises ConfigError without experts."""
        loads = () if self._tally is None else self._tally.loads(now)
        return ExpertSnapshot(name=self._name, layers=self._layers, loads=loads, table=self._table)

    def mean_tokens(self, now: float) -> float:
        """Choices in the window, of a layer on average."""
        if self._tally is None:
            return 0.0
        return sum(map(sum, self._tally.loads(now, EVERY_S))) / len(self._layers)

    def imbalance(self, now: float) -> float:
        """The fullest ranks' load over the mean, of all layers together; 0 without load."""
        if self._tally is None:
            return 0.0
        loads = self._tally.loads(now, EVERY_S)
        total = sum(map(sum, loads)) / len(self._table.topology.ranks)
        return sum(self._table.largest(n, row) for n, row in enumerate(loads)) / total if total else 0.0

    def balance_losses(self, now: float) -> tuple[float, ...]:
        """By layer, the auxiliary loss of the tokens of the window (1: even); 0 without any."""
        if not self._spread:
            return ()
        chosen, probs = (tally.loads(now) for tally in self._spread)
        return tuple(_loss(*rows) for rows in zip(chosen, probs, strict=True))

    def balance_loss(self, now: float) -> float:
        """The mean of those layers that have had tokens; 0 without any."""
        found = [loss for loss in self.balance_losses(now) if loss]
        return sum(found) / len(found) if found else 0.0

    def report(self, now: float) -> ExpertReport:
        """Loads of the window, at most EVERY_S old."""
        if self._tally is None:
            return ExpertReport(name=self._name)
        table = self._table
        return ExpertReport(
            name=self._name,
            layers=self._layers,
            loads=self._tally.loads(now, EVERY_S),
            nodes=table.topology.num_nodes,
            ranks_per_node=table.topology.ranks_per_node,
            lost_ranks=tuple(sorted(table.topology.lost)),
            slots_per_rank=table.slots_per_rank,
            homes=tuple(
                tuple(tuple((home.slot, home.share) for home in homes) for homes in experts)
                for experts in table.layers
            ),
            balance_losses=self.balance_losses(now),
        )


def _loss(chosen: Sequence[float], probs: Sequence[float]) -> float:
    """The formula of `pdserve.layers.router_loss`, of a window."""
    total = sum(chosen) * sum(probs)
    return len(chosen) * sum(c * p for c, p in zip(chosen, probs, strict=True)) / total if total else 0.0
