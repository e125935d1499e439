"""One case, measured in turns: the order of the rounds, the runs, and the case's line of results.

Only one system computes at a time: peers are frozen when it is not their turn, ours waits idle. A pair is one
run of ours and one of a peer in the same round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.progress import Progress, TaskID

from benchmarks.cases import Case, Prompts
from benchmarks.ours import LAYOUTS, Ours, OursError, Proof
from benchmarks.peers.install import PeerError
from benchmarks.report import Line, TokenTimes, latency, too_slow, value_of
from benchmarks.systems import Bench, System


@dataclass(slots=True)
class Trial:
    """The runs of one case. warm_up: each system's value of the round that does not count."""

    bench: Bench
    case: Case
    prompts: Prompts
    progress: Progress
    task: TaskID
    warm_up: dict[str, float] = field(default_factory=dict)
    values: dict[str, list[float]] = field(default_factory=dict)
    times: dict[str, list[TokenTimes]] = field(default_factory=dict)
    out: set[str] = field(default_factory=set)

    def measure(self) -> dict[str, Any]:
        """A warm-up round, then the pairs. Returns the line of the result file."""
        systems = self.bench.able(self.case)
        self.values = {system.name: [] for system in systems}
        self.times = {system.name: [] for system in systems}
        for system in systems:
            self._turn(system, counts=False)
        self._narrow()
        for number in range(self.bench.pairs):
            for system in turned(systems, number):
                self._turn(system, counts=True)
            shown = [f"{name} {found[-1]:.0f}" for name, found in self.values.items() if name not in self.out]
            text = f"  {self.case.name} {number + 1}/{self.bench.pairs}: {'  '.join(shown)}"
            self.progress.console.print(text, highlight=False)
        return self._line()

    def _turn(self, system: System, *, counts: bool) -> None:
        self.progress.update(self.task, description=f"{self.case.name}: {system.name}", refresh=True)
        self.progress.advance(self.task)
        if system.name in self.out:
            return
        try:
            batches = [self._batch(system) for _ in range(self.case.repeats)]
            value = value_of(self.case, batches)
        except (PeerError, OursError, ValueError) as error:
            self.bench.fail(f"{system.name} in {self.case.name}", error)
            self.out.add(system.name)
            self.values[system.name] = []
            return
        if counts:
            self.values[system.name].append(value)
            self.times[system.name] += batches
        else:
            self.warm_up[system.name] = round(value, 1)

    def _batch(self, system: System) -> list[list[float]]:
        return system.run(self.prompts.take(self.case), self.case.output_tokens)

    def _narrow(self) -> None:
        """Leaves out variants that have no chance to be their engine's best, and starts the ledgers anew."""
        family = {name: self.bench.engine_of[name].name for name in self.warm_up if name not in LAYOUTS}
        self.out |= too_slow(self.warm_up, family)
        for system in self.bench.systems.values():
            if isinstance(system, Ours):
                system.proof = Proof(page_size=system.page_size)

    def _line(self) -> dict[str, Any]:
        line = Line(
            case=self.case,
            ours=self.values.get("ours", []),
            ours_aggregated=self.values.get("ours_aggregated", []),
            values={name: found for name, found in self.values.items() if name not in LAYOUTS},
            family={name: engine.name for name, engine in self.bench.engine_of.items()},
        )
        ours = self.bench.systems.get("ours")
        return {
            **line.as_json([engine.name for engine in self.bench.engines]),
            "warm_up": self.warm_up,
            "latency": {name: latency(self.times[name]) for name in LAYOUTS if self.values.get(name)},
            "handover": ours.proof.as_json() if isinstance(ours, Ours) else None,
            "peer_errors": dict(self.bench.errors),
        }


def turned(systems: list[System], number: int) -> Iterator[System]:
    """The order of a round: each starts with another system, every second one runs backwards."""
    cut = number % len(systems)
    order = systems[cut:] + systems[:cut]
    return iter(order[::-1] if number % 2 else order)
