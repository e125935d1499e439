"""Expert placement: which ranks hold which experts, so that the fullest rank of every layer is least full.
Pure.

What lives here: the planner over layers, nodes and a table there already is, and what it says about its
result. What does not: packing one set of ranks (`placement_pack`), what no placement can beat
(`placement_bound`), the table (`placement_table`), counting loads (`expert_loads`), carrying a table out. The
model, the algorithm and figures are in docs/placement.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite

from pdserve.errors import ConfigError
from pdserve.parallel.placement_bound import Bound, lower_bound, node_bound
from pdserve.parallel.placement_pack import Draft, fill, improve, settle, supply, use_free_slots
from pdserve.parallel.placement_table import Copy, Home, Placement, Topology

Loads = Sequence[Sequence[float]]
"""By layer and expert, in any unit: tokens of a window, usually."""
GOOD = 1.05
"""A layer within this factor of its bound is left as it is, and needs no reason."""
AIM = 1.01
"""A placement made anew is improved until within this factor."""
WORTH = 0.98
"""One with more to copy replaces one with less only if its largest load is below this part of it."""
MORE_SLOTS = (1, 2, 4)
"""Slots more on each rank that are tried to see whether slots are what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How to place. by_node: groups of experts stay on one node, so that a token's experts are on few nodes.

    num_groups: equal groups of consecutive experts (those of a model's grouped routing); 0: each expert for
    itself. even_shares: an expert's replicas share its load equally; else in the shares that level ranks
    best.
    """

    by_node: bool = False
    num_groups: int = 0
    even_shares: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerResult:
    """largest: the fullest rank's load. reason: why it is over GOOD times the bound, or empty."""

    largest: float
    bound: Bound
    reason: str

    @property
    def ratio(self) -> float:
        """Largest load over the bound; 1 for a layer without load."""
        return self.largest / self.bound.value if self.bound.value > 0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The table, what it reaches in each layer, and what is to be copied if there was a table before."""

    table: Placement
    layers: tuple[LayerResult, ...]
    copies: tuple[Copy, ...]

    @property
    def worst(self) -> LayerResult:
        """The layer that is farthest over its bound."""
        return max(self.layers, key=lambda layer: layer.ratio)

    @property
    def ratio(self) -> float:
        """Sum of the layers' largest loads over that of their bounds: layers run one after the other."""
        bound = sum(layer.bound.value for layer in self.layers)
        return sum(layer.largest for layer in self.layers) / bound if bound > 0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """One layer. current: by expert, the ranks that hold it now and their shares; None: nothing to keep."""

    loads: Sequence[float]
    topology: Topology
    slots: int
    policy: Policy
    current: Sequence[dict[int, float]] | None


Held = dict[int, dict[int, float]]
"""By rank, the experts it holds and the load each brings there."""


def plan(
    loads: Loads,
    topology: Topology,
    slots_per_rank: int,
    *,
    policy: Policy | None = None,
    current: Placement | None = None,
) -> Plan:
    """Places every layer. With `current`, weights are only copied where a layer is not near its bound (GOOD).

    The same input gives the same table. Raises ConfigError for a problem that has no placement.
    """
    policy = policy or Policy()
    _check(loads, topology, slots_per_rank, policy, current)
    results, layers = [], []
    for number, layer_loads in enumerate(loads):
        homes = current.layers[number] if current else None
        hosts = (
            [{h.rank: h.share for h in e if h.rank not in topology.lost} for e in homes] if homes else None
        )
        task = _Task(loads=layer_loads, topology=topology, slots=slots_per_rank, policy=policy, current=hosts)
        held = _place(task)
        results.append(_result(task, held))
        layers.append(_homes(task, held, homes))
    table = Placement(topology=topology, slots_per_rank=slots_per_rank, layers=tuple(layers))
    return Plan(table=table, layers=tuple(results), copies=table.copies_from(current) if current else ())


def _place(task: _Task) -> Held:
    if not task.policy.by_node:
        return _pack(task, range(len(task.loads)), task.topology.ranks)
    held: Held = {}
    for node, experts in enumerate(_experts_by_node(task)):
        first = node * task.topology.ranks_per_node
        held |= _pack(task, experts, range(first, first + task.topology.ranks_per_node))
    return held


def _pack(task: _Task, experts: Sequence[int], ranks: Sequence[int]) -> Held:
    """Some experts on some ranks: the first way, of those with ever more to copy, that is near the bound."""
    loads = [task.loads[e] for e in experts]
    bound = lower_bound(loads, len(ranks), task.slots).value
    best: Draft | None = None
    for draft in _ways(loads, len(ranks), task, _hosts(task, experts, ranks), bound):
        if best is None or draft.largest < WORTH * best.largest:
            best = draft
        if best.largest <= GOOD * bound:
            break
    assert best is not None
    return {
        rank: {experts[i]: amount for i, amount in held.items()}
        for rank, held in zip(ranks, best.amount, strict=True)
    }


def _hosts(task: _Task, experts: Sequence[int], ranks: Sequence[int]) -> list[dict[int, float]] | None:
    """By expert, where it is now, as indices of these ranks, and the shares."""
    if task.current is None:
        return None
    at = {rank: i for i, rank in enumerate(ranks)}
    return [{at[r]: share for r, share in task.current[e].items() if r in at} for e in experts]


def _ways(
    loads: Sequence[float], num_ranks: int, task: _Task, hosts: list[dict[int, float]] | None, bound: float
) -> Iterator[Draft]:
    if hosts is None:
        yield _anew(loads, num_ranks, task, bound)
        return
    for sparing, spread in ((True, False), (False, False), (False, True)):
        draft = Draft(loads, num_ranks, task.slots, even=task.policy.even_shares)
        _restore(draft, hosts)
        settle(draft)
        supply(draft, GOOD * bound)
        if spread:
            use_free_slots(draft)
        improve(draft, GOOD * bound, sparing=sparing)
        yield draft
    yield _renamed(_anew(loads, num_ranks, task, bound), hosts)


def _anew(loads: Sequence[float], num_ranks: int, task: _Task, bound: float) -> Draft:
    """The first start that leads near the bound; the best of all where none does."""
    found: list[Draft] = []
    for start in (fill, partial(fill, hottest=True), partial(_lean, goal=AIM * bound)):
        draft = Draft(loads, num_ranks, task.slots, even=task.policy.even_shares)
        start(draft)
        improve(draft, AIM * bound)
        use_free_slots(draft)
        found.append(draft)
        if draft.largest <= GOOD * bound:
            break
    return min(found, key=lambda d: d.largest)


def _lean(draft: Draft, goal: float) -> None:
    """Homes alone, and the replicas that can not be done without."""
    settle(draft)
    supply(draft, goal)


def _restore(draft: Draft, hosts: Sequence[dict[int, float]]) -> None:
    """What was there, as far as there is room. Shares of what is gone go to what is left."""
    for expert, shares in enumerate(hosts):
        total = sum(shares.values())
        for rank, share in shares.items():
            if draft.room(rank):
                part = share / total if total > 0 else 1 / len(shares)
                draft.add(expert, rank, draft.loads[expert] * part)


def _renamed(draft: Draft, hosts: Sequence[dict[int, float]]) -> Draft:
    """The same placement with its ranks renamed, greedily, so that much of what they hold is there."""
    there: list[set[int]] = [set() for _ in range(draft.num_ranks)]
    for expert, shares in enumerate(hosts):
        for rank in shares:
            there[rank].add(expert)
    ranks = range(draft.num_ranks)
    pairs = sorted((-len(there[new] & draft.amount[old].keys()), new, old) for new in ranks for old in ranks)
    name: dict[int, int] = {}
    for _, new, old in pairs:
        if old not in name and new not in name.values():
            name[old] = new
    renamed = Draft(draft.loads, draft.num_ranks, draft.slots, even=draft.even)
    for old, held in enumerate(draft.amount):
        for expert, amount in held.items():
            renamed.add(expert, name[old], amount)
    return renamed


def _experts_by_node(task: _Task) -> list[list[int]]:
    """Whole groups to nodes, as equally as loads allow; no node gets more than its share, rounded up."""
    size, nodes = _group_size(task), task.topology.num_nodes
    groups = [sum(task.loads[first : first + size]) for first in range(0, len(task.loads), size)]
    draft = Draft(groups, nodes, min(-(-len(groups) // nodes), _node_slots(task) // size))
    if task.current is not None:
        _restore(draft, [_node_of(task, range(g * size, (g + 1) * size)) for g in range(len(groups))])
    settle(draft)
    bound = task.topology.ranks_per_node * _bound(task).value
    improve(draft, (AIM if task.current is None else GOOD) * bound, replicas=0)
    return [sorted(g * size + i for g in held for i in range(size)) for held in draft.amount]


def _node_of(task: _Task, experts: Sequence[int]) -> dict[int, float]:
    """The one node that holds every copy of these experts now, with all their load; or nothing."""
    assert task.current is not None
    nodes = {task.topology.node_of(rank) for e in experts for rank in task.current[e]}
    return dict.fromkeys(nodes, 1.0) if len(nodes) == 1 else {}


def _group_size(task: _Task) -> int:
    return len(task.loads) // (task.policy.num_groups or len(task.loads))


def _node_slots(task: _Task) -> int:
    return task.topology.ranks_per_node * task.slots


def _bound(task: _Task) -> Bound:
    bound = lower_bound(task.loads, len(task.topology.ranks), task.slots)
    if not task.policy.by_node:
        return bound
    size, nodes = _group_size(task), task.topology.num_nodes
    groups = [sum(task.loads[first : first + size]) for first in range(0, len(task.loads), size)]
    other = node_bound(groups, task.loads, nodes, task.topology.ranks_per_node)
    return max(bound, other, key=lambda b: b.value)


def _homes(task: _Task, held: Held, old: Sequence[Sequence[Home]] | None) -> tuple[tuple[Home, ...], ...]:
    """Slots and shares. An expert that stays on a rank stays in its slot."""
    homes: list[list[Home]] = [[] for _ in task.loads]
    for rank in sorted(held):
        stays = {e: h.slot for e in held[rank] for h in (old[e] if old else ()) if h.rank == rank}
        taken = set(stays.values())
        free = (s for s in range(rank * task.slots, (rank + 1) * task.slots) if s not in taken)
        for expert in sorted(held[rank]):
            slot = stays[expert] if expert in stays else next(free)
            homes[expert].append(Home(rank=rank, slot=slot, share=held[rank][expert]))
    return tuple(_shares(of_expert) for of_expert in homes)


def _shares(homes: Sequence[Home]) -> tuple[Home, ...]:
    """Loads into shares; equal ones where there is no load."""
    total = sum(home.share for home in homes)
    return tuple(
        Home(rank=h.rank, slot=h.slot, share=h.share / total if total > 0 else 1 / len(homes)) for h in homes
    )


def _result(task: _Task, held: Held) -> LayerResult:
    largest, bound = max(sum(amounts.values()) for amounts in held.values()), _bound(task)
    reason = _reason(task, bound) if largest > GOOD * bound.value else ""
    return LayerResult(largest=largest, bound=bound, reason=reason)


def _reason(task: _Task, bound: Bound) -> str:
    """What keeps a layer from its bound: each limit is lifted in turn, and the one that matters is named."""
    num_ranks = len(task.topology.ranks)

    def largest(slots: int, even: bool) -> float:
        lifted = Policy(even_shares=even)
        other = _Task(loads=task.loads, topology=task.topology, slots=slots, policy=lifted, current=None)
        draft = _anew(task.loads, num_ranks, other, bound.value)
        return draft.largest / bound.value

    extra = num_ranks * task.slots - len(task.loads)
    even = task.policy.even_shares
    if task.policy.by_node and (found := largest(task.slots, even)) <= GOOD:
        return f"experts stay on one node each; placed on any node the largest load would be {found:.2f}x"
    if even and (found := largest(task.slots, False)) <= GOOD:
        return f"replicas share equally; with fitted shares the largest load would be {found:.2f}x"
    few = f"too few slots: {extra} beyond one for each of {len(task.loads)} experts, on {num_ranks} ranks"
    where = "placed on any node with" if task.policy.by_node else "with"
    for more in MORE_SLOTS:
        if (found := largest(task.slots + more, even)) <= GOOD:
            return f"{few}; {where} {more} more a rank the largest load would be {found:.2f}x"
    return f"experts are too coarse: {len(task.loads)} on {num_ranks} ranks; {more} slots more do not help"


def _check(loads: Loads, topology: Topology, slots: int, policy: Policy, current: Placement | None) -> None:
    """Raises ConfigError with what to change."""
    if not loads or not loads[0] or len({len(layer) for layer in loads}) > 1:
        raise ConfigError("loads: at least one layer, and the same number of experts in each, is needed")
    if not all(isfinite(load) and load >= 0 for layer in loads for load in layer):
        raise ConfigError("loads: every load must be a number from 0")
    num_experts = len(loads[0])
    if slots * len(topology.ranks) < num_experts:
        least = -(-num_experts // len(topology.ranks))
        raise ConfigError(
            f"slots_per_rank: {num_experts} experts on {len(topology.ranks)} ranks need {least}"
        )
    if policy.by_node:
        _check_groups(num_experts, topology, slots, policy)
    if current is not None:
        _check_current(loads, topology, slots, current)


def _check_groups(num_experts: int, topology: Topology, slots: int, policy: Policy) -> None:
    groups = policy.num_groups or num_experts
    if num_experts % groups:
        raise ConfigError(f"num_groups: {num_experts} experts do not make {groups} equal groups")
    if topology.lost:
        raise ConfigError(
            "by_node: with lost ranks nodes are unequal; place experts on any node until they are back"
        )
    if topology.ranks_per_node * slots // (num_experts // groups) * topology.num_nodes < groups:
        raise ConfigError("slots_per_rank: a node's slots do not hold its share of whole groups; raise them")


def _check_current(loads: Loads, topology: Topology, slots: int, current: Placement) -> None:
    there = current.topology
    same = (there.num_nodes, there.ranks_per_node) == (topology.num_nodes, topology.ranks_per_node)
    if not same or current.slots_per_rank != slots:
        raise ConfigError("current: it is for another topology or number of slots; plan without it")
    if (current.num_layers, current.num_experts) != (len(loads), len(loads[0])):
        raise ConfigError("current: it has other layers or experts than the loads")
