"""A placement while ranks are lost: who serves what is left, and what nobody serves. Pure.

What lives here: the view that routing takes of a table. What does not: how tables change (`rebalance`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pdserve.parallel.placement_table import Home, Placement

MAX_NAMED = 4
"""Experts that are named at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """table: as it was installed. lost: ranks that are gone since; they are never sent anything."""

    table: Placement
    lost: frozenset[int] = frozenset()

    def without(self, rank: int) -> Coverage:
        """The same with one rank more lost."""
        return replace(self, lost=self.lost | {rank})

    def homes(self, layer: int, expert: int) -> tuple[Home, ...]:
        """Homes that are left; the shares of lost ones go to them in proportion. Empty: uncovered."""
        every = self.table.homes(layer, expert)
        left = [home for home in every if home.rank not in self.lost]
        if len(left) == len(every):
            return every
        total = sum(home.share for home in left)
        return tuple(replace(home, share=home.share / total if total > 0 else 1 / len(left)) for home in left)

    @property
    def masked(self) -> Placement:
        """The table as it serves. Raises ConfigError where an expert is uncovered."""
        here = self.table
        layers = tuple(
            tuple(self.homes(layer, expert) for expert in range(here.num_experts))
            for layer in range(here.num_layers)
        )
        return replace(here, topology=replace(here.topology, lost=self.lost), layers=layers)

    @property
    def uncovered(self) -> tuple[tuple[int, int], ...]:
        """(layer, expert) of every expert that nobody has."""
        if not self.lost:
            return ()
        return tuple(
            (layer, expert)
            for layer, experts in enumerate(self.table.layers)
            for expert, homes in enumerate(experts)
            if all(home.rank in self.lost for home in homes)
        )

    @property
    def missing(self) -> str:
        """Those that nobody has, in words; empty if there are none."""
        found = self.uncovered
        named = ", ".join(f"{expert} of layer {layer}" for layer, expert in found[:MAX_NAMED])
        return named + (f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else "")
