"""The expert placement as data: which slot holds which expert, and what share of its load. Pure.

What lives here: the shape of a machine, the frozen table with its lookups and its own check, loads of ranks
under it, the weights to copy from one table to another, and the two fixed placements that ignore load. What
does not: choosing a placement (`placement`). A *slot* is room for one expert's weights in one layer: slots of
rank r are r * slots_per_rank and the following ones, the same numbers in every layer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pdserve.errors import ConfigError

SHARES_SUM = 1e-6
"""The shares of an expert may miss 1 by this much: they are floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Ranks are numbered node by node. lost: ranks that hold nothing. Raises ConfigError."""

    num_nodes: int
    ranks_per_node: int
    lost: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.ranks_per_node < 1:
            raise ConfigError("topology: at least one node with one rank is needed")
        if not self.lost <= set(range(self.num_ranks)):
            raise ConfigError("topology: a lost rank is not one of its ranks")
        if len(self.lost) == self.num_ranks:
            raise ConfigError("topology: every rank is lost")

    @property
    def num_ranks(self) -> int:
        """All ranks, lost ones too."""
        return self.num_nodes * self.ranks_per_node

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that can hold experts, ascending."""
        return tuple(rank for rank in range(self.num_ranks) if rank not in self.lost)

    def node_of(self, rank: int) -> int:
        """The node a rank lies on."""
        return rank // self.ranks_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """One copy of an expert. slot: physical slot. share: part of the expert's load it serves, 0 to 1."""

    rank: int
    slot: int
    share: float


Layer = tuple[tuple[Home, ...], ...]
"""By expert, its homes, by rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Weights to bring to a rank. source: a rank that holds them now, on the same node if one does; None:
    from disk.
    """

    layer: int
    expert: int
    source: int | None
    rank: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """layers: by layer and expert, its homes, by rank. Checked when made; raises ConfigError."""

    topology: Topology
    slots_per_rank: int
    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        if len({len(experts) for experts in self.layers}) > 1:
            raise ConfigError("placement: every layer needs the same number of experts")
        for number, experts in enumerate(self.layers):
            self._check_layer(number, experts)

    def _check_layer(self, number: int, experts: Layer) -> None:
        for expert, homes in enumerate(experts):
            self._check(number, expert, homes)
        slots = [home.slot for homes in experts for home in homes]
        if len(set(slots)) < len(slots):
            raise ConfigError(f"placement: layer {number} has two experts in one slot")

    def _check(self, layer: int, expert: int, homes: Sequence[Home]) -> None:
        where = f"placement: layer {layer}, expert {expert}"
        if not homes:
            raise ConfigError(f"{where} has no home")
        if len({home.rank for home in homes}) < len(homes):
            raise ConfigError(f"{where} is twice on one rank")
        live = set(self.topology.ranks)
        if any(home.rank not in live or home.slot // self.slots_per_rank != home.rank for home in homes):
            raise ConfigError(f"{where} has a slot that is not one of its rank's")
        total = sum(home.share for home in homes)
        if not abs(total - 1) <= SHARES_SUM or min(home.share for home in homes) < 0:
            raise ConfigError(f"{where} has shares that do not add up to 1")

    def with_layer(self, number: int, experts: Layer) -> Placement:
        """This table with another layer; only that is checked, and the others stay the same objects: a large
        table takes long to check and to compare. Raises ConfigError."""
        if len(experts) != self.num_experts:
            raise ConfigError("placement: every layer needs the same number of experts")
        self._check_layer(number, experts)
        return self._trusted((*self.layers[:number], experts, *self.layers[number + 1 :]))

    def mixed(self, other: Placement, numbers: Collection[int]) -> Placement:
        """This table with some layers of another for the same machine: both have been checked."""
        return self._trusted(
            tuple(other.layers[n] if n in numbers else old for n, old in enumerate(self.layers))
        )

    def _trusted(self, layers: tuple[Layer, ...]) -> Placement:
        made = object.__new__(Placement)
        object.__setattr__(made, "topology", self.topology)
        object.__setattr__(made, "slots_per_rank", self.slots_per_rank)
        object.__setattr__(made, "layers", layers)
        return made

    @property
    def num_layers(self) -> int:
        """Layers with experts."""
        return len(self.layers)

    @property
    def num_experts(self) -> int:
        """Logical experts of a layer."""
        return len(self.layers[0]) if self.layers else 0

    @property
    def num_slots(self) -> int:
        """Physical slots of a layer, over all ranks."""
        return self.topology.num_ranks * self.slots_per_rank

    def homes(self, layer: int, expert: int) -> tuple[Home, ...]:
        """Where an expert lies."""
        return self.layers[layer][expert]

    def occupants(self, layer: int) -> tuple[int | None, ...]:
        """By physical slot, the expert in it; None: empty."""
        found: list[int | None] = [None] * self.num_slots
        for expert, homes in enumerate(self.layers[layer]):
            for home in homes:
                found[home.slot] = expert
        return tuple(found)

    def slot_for(self, layer: int, expert: int, point: float) -> int:
        """The slot that serves the point of [0, 1): points spread evenly meet the slots by their shares."""
        homes = [home for home in self.layers[layer][expert] if home.share > 0]
        for home in homes[:-1]:
            if point < home.share:
                return home.slot
            point -= home.share
        return homes[-1].slot

    def rank_loads(self, layer: int, loads: Sequence[float]) -> list[float]:
        """By rank, its load in a layer. loads: by expert."""
        total = [0.0] * self.topology.num_ranks
        for load, homes in zip(loads, self.layers[layer], strict=True):
            for home in homes:
                total[home.rank] += load * home.share
        return total

    def largest(self, layer: int, loads: Sequence[float]) -> float:
        """The largest rank load of a layer."""
        return max(self.rank_loads(layer, loads))

    def copies_from(self, old: Placement) -> tuple[Copy, ...]:
        """What has to be copied to come from `old` here. A move within a rank is no copy."""
        return tuple(
            Copy(
                layer=layer,
                expert=expert,
                source=self._source(home.rank, held),
                rank=home.rank,
                slot=home.slot,
            )
            for layer, experts in enumerate(self.layers)
            for expert, homes in enumerate(experts)
            for held in [{h.rank for h in old.homes(layer, expert)}]
            for home in homes
            if home.rank not in held
        )

    def _source(self, rank: int, held: set[int]) -> int | None:
        node = self.topology.node_of(rank)
        alive = sorted(held - self.topology.lost, key=lambda r: (self.topology.node_of(r) != node, r))
        return alive[0] if alive else None


def contiguous(num_layers: int, num_experts: int, topology: Topology, slots_per_rank: int) -> Placement:
    """The usual start: experts in order, equally many on each rank (the first ranks have one more)."""
    size, more = divmod(num_experts, len(topology.ranks))
    order = [i for i in range(len(topology.ranks)) for _ in range(size + (i < more))]
    return _fixed(order, num_layers, topology, slots_per_rank)


def round_robin(num_layers: int, num_experts: int, topology: Topology, slots_per_rank: int) -> Placement:
    """Expert e on rank e mod ranks."""
    order = [expert % len(topology.ranks) for expert in range(num_experts)]
    return _fixed(order, num_layers, topology, slots_per_rank)


def _fixed(order: Sequence[int], num_layers: int, topology: Topology, slots_per_rank: int) -> Placement:
    ranks, taken, homes = topology.ranks, [0] * len(topology.ranks), []
    for at in order:
        if taken[at] == slots_per_rank:
            raise ConfigError(f"slots_per_rank: {slots_per_rank} are too few for {len(order)} experts")
        homes.append((Home(rank=ranks[at], slot=ranks[at] * slots_per_rank + taken[at], share=1.0),))
        taken[at] += 1
    return Placement(topology=topology, slots_per_rank=slots_per_rank, layers=(tuple(homes),) * num_layers)
