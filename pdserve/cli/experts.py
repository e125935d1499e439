"""`pdserve experts`: load by layer and expert, the present placement, and what a rebalance would gain.

As a table, as JSON, and as a heat map in a file. What lives here shows; planning is
`pdserve.parallel.placement`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.cli.heatmap import Panel, heat_map
from pdserve.errors import ConfigError, UnsupportedFeature
from pdserve.parallel.expert_files import write_snapshot
from pdserve.parallel.expert_snapshot import ExpertSnapshot, snapshot_from_json, snapshot_to_json
from pdserve.parallel.placement import GOOD, LayerResult, Plan, Policy, plan
from pdserve.parallel.placement_table import Home, Topology

if TYPE_CHECKING:
    from rich.table import Table

    from pdserve.cli.connection import Router

COLUMNS = (
    "layer", "tokens", "hottest expert", "its load", "balance loss", "ranks now", "after", "to copy",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the rebalance that is shown may do. num_nodes, ranks_per_node, slots: another machine than the
    present one; 0: as it is. layer: show this layer's placement; None: none.
    """

    policy: Policy
    num_nodes: int = 0
    ranks_per_node: int = 0
    slots: int = 0
    layer: int | None = None
    plot: Path | None = None
    save: Path | None = None


def ask(router: Router, worker: str) -> list[ExpertSnapshot]:
    """Snapshots of live workers; standard error says what became of their rebalances. Raises PdserveError;
    UnsupportedFeature where no worker has experts."""
    with router.client() as client:
        reports = client.get_experts(worker)
    if not reports:
        raise UnsupportedFeature("The model that is served has no experts.")
    for report in reports:
        if report.rebalancing or report.last_rebalance:
            state = "experts move now" if report.rebalancing else f"last rebalance {report.last_rebalance}"
            print(f"{report.name}: {state}", file=sys.stderr)
        if report.lost_ranks:
            lost = ", ".join(str(rank) for rank in report.lost_ranks)
            print(f"{report.name}: goes on without rank {lost}; start it anew to be whole", file=sys.stderr)
    return [snapshot_from_json(dataclasses.asdict(report)) for report in reports]


def rebalance(router: Router, worker: str, as_json: bool) -> None:
    """Has workers place their experts anew; prints what they say. Raises PdserveError."""
    with router.client() as client:
        answers = client.rebalance_experts(worker)
    if as_json:
        print(json.dumps([dataclasses.asdict(answer) for answer in answers]))
        return
    for answer in answers:
        gain = f"{100 * answer.gain:.0f} % less on the fullest ranks, with {answer.copies} copies"
        said = f"experts move: {gain}" if answer.started else f"experts stay: {answer.reason}"
        print(f"{answer.name}: {said}")


def run(snapshots: Sequence[ExpertSnapshot], wish: Wish, as_json: bool) -> None:
    """Prints every snapshot; files get the first one. Raises ConfigError."""
    pairs = [(snapshot, _planned(snapshot, wish)) for snapshot in (_asked(s, wish) for s in snapshots)]
    if wish.plot is not None:
        wish.plot.write_text(picture(*pairs[0]), encoding="utf-8")
    if wish.save is not None:
        write_snapshot(_after(*pairs[0]), wish.save, "save")
    if as_json:
        print(json.dumps([_plain(*pair) for pair in pairs]))
        return
    for snapshot, planned in pairs:
        show(snapshot, planned, wish.layer)


def _after(snapshot: ExpertSnapshot, planned: Plan) -> ExpertSnapshot:
    """The same loads with the table of the plan."""
    return dataclasses.replace(snapshot, table=planned.table)


def _asked(snapshot: ExpertSnapshot, wish: Wish) -> ExpertSnapshot:
    """The snapshot, or its loads on the machine that was asked for."""
    if not (wish.num_nodes or wish.ranks_per_node or wish.slots):
        return snapshot
    there = snapshot.table
    topology = Topology(
        num_nodes=wish.num_nodes or there.topology.num_nodes,
        ranks_per_node=wish.ranks_per_node or there.topology.ranks_per_node,
    )
    return snapshot.moved_to(topology, wish.slots or -(-there.num_experts // topology.num_ranks))


def _planned(snapshot: ExpertSnapshot, wish: Wish) -> Plan:
    table = snapshot.table
    return plan(snapshot.loads, table.topology, table.slots_per_rank, policy=wish.policy, current=table)


def _plain(snapshot: ExpertSnapshot, planned: Plan) -> dict[str, Any]:
    layers = [
        {
            "layer": layer, "now": snapshot.table.largest(n, snapshot.loads[n]), "after": result.largest,
            "bound": result.bound.value, "bound_kind": result.bound.kind, "reason": result.reason,
        }
        for n, (layer, result) in enumerate(zip(snapshot.layers, planned.layers, strict=True))
    ]  # fmt: skip
    return {
        "now": snapshot_to_json(snapshot), "after": snapshot_to_json(_after(snapshot, planned)),
        "copies": len(planned.copies),
        "largest_rank_load": layers,
    }  # fmt: skip


def show(snapshot: ExpertSnapshot, planned: Plan, layer: int | None) -> None:
    """The table and the sentences below it."""
    from rich.console import Console

    console = Console()
    console = Console(width=console.width if console.is_terminal else 160)
    console.print(_table(snapshot, planned))
    for line in [*gain(snapshot, planned), *(_slots(snapshot, layer) if layer is not None else ())]:
        console.print(line, markup=False, highlight=False)


def _table(snapshot: ExpertSnapshot, planned: Plan) -> Table:
    from rich.table import Table

    topology = snapshot.table.topology
    title = (
        f"{snapshot.name or 'experts'}: {snapshot.table.num_experts} experts, {topology.num_nodes} x "
        f"{topology.ranks_per_node} ranks, {snapshot.table.slots_per_rank} slots each"
    )
    table = Table(*COLUMNS, box=None, title=title, title_justify="left")
    for number, (layer, result) in enumerate(zip(snapshot.layers, planned.layers, strict=True)):
        copies = sum(copy.layer == number for copy in planned.copies)
        table.add_row(str(layer), *_row(snapshot, number, result), str(copies))
    return table


def _row(snapshot: ExpertSnapshot, number: int, result: LayerResult) -> tuple[str, ...]:
    loads = snapshot.loads[number]
    total, hottest = sum(loads), max(range(len(loads)), key=lambda e: loads[e])
    if not total:
        return "0", "", "", "", "", ""
    loss = snapshot.balance_losses[number] if snapshot.balance_losses else 0.0
    now = snapshot.table.largest(number, loads)
    return (
        f"{total:.0f}",
        str(hottest),
        f"{100 * loads[hottest] / total:.1f} % ({loads[hottest] * len(loads) / total:.1f}x mean)",
        f"{loss:.3f}" if loss else "",
        f"{now / result.bound.value:.2f}x",
        f"{result.ratio:.2f}x",
    )


def gain(snapshot: ExpertSnapshot, planned: Plan) -> list[str]:
    """What a rebalance would bring, in sentences."""
    now = sum(snapshot.table.largest(n, loads) for n, loads in enumerate(snapshot.loads))
    after = sum(result.largest for result in planned.layers)
    bound = sum(result.bound.value for result in planned.layers)
    if not bound:
        return ["no expert has had a token in this window"]
    lines = [
        f"the fullest ranks of all layers now: {now / bound:.2f}x the lower bound; after a rebalance "
        f"{after / bound:.2f}x ({100 * (1 - after / now):.0f} % less), with {len(planned.copies)} copies"
    ]
    reasons: dict[str, list[str]] = {}
    for layer, result in zip(snapshot.layers, planned.layers, strict=True):
        if result.reason:
            reasons.setdefault(result.reason, []).append(str(layer))
    lines += [f"over {GOOD}x in layer {', '.join(layers)}: {reason}" for reason, layers in reasons.items()]
    return lines


def _slots(snapshot: ExpertSnapshot, layer: int) -> list[str]:
    """The present placement of one layer, a line a rank."""
    if layer not in snapshot.layers:
        raise ConfigError(f"layer: {layer} has no experts here")
    number, table = snapshot.layers.index(layer), snapshot.table
    held: list[list[tuple[int, Home]]] = [[] for _ in range(table.topology.num_ranks)]
    for expert, homes in enumerate(table.layers[number]):
        for home in homes:
            held[home.rank].append((expert, home))
    loads = table.rank_loads(number, snapshot.loads[number])
    mean = sum(loads) / len(table.topology.ranks)
    return [
        f"rank {rank} ({load / mean if mean else 0:.2f}x mean): "
        + " ".join(str(e) if home.share == 1 else f"{e}:{100 * home.share:.0f}%" for e, home in experts)
        for rank, (load, experts) in enumerate(zip(loads, held, strict=True))
    ]


def picture(snapshot: ExpertSnapshot, planned: Plan) -> str:
    """Loads of experts, and of ranks now and after a rebalance, over their layer's mean; an SVG document."""
    labels = [str(layer) for layer in snapshot.layers]
    now = [snapshot.table.rank_loads(n, loads) for n, loads in enumerate(snapshot.loads)]
    after = [planned.table.rank_loads(n, loads) for n, loads in enumerate(snapshot.loads)]
    panels = [
        Panel(
            title=title, columns=columns, rows="layer", labels=labels, values=[_over_mean(r) for r in values]
        )
        for title, columns, values in (
            ("tokens by expert", "expert", snapshot.loads),
            ("load of ranks now", "rank", now),
            ("load of ranks after a rebalance", "rank", after),
        )
    ]
    return heat_map(f"{snapshot.name or 'experts'}: {gain(snapshot, planned)[0]}", panels)


def _over_mean(values: Sequence[float]) -> list[float]:
    mean = sum(values) / len(values)
    return [value / mean if mean else 0.0 for value in values]
