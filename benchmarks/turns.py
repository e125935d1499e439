"""Systems measured in turns: starting them, the order of a round, a case's runs and its line of results.

Only one system computes at a time: peers are frozen when it is not their turn, ours waits idle. A pair is one
run of ours and one of a peer in the same round.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from rich.console import Console
from rich.progress import Progress

from benchmarks.cases import Case, Prompts
from benchmarks.ours import LAYOUTS, Ours, OursError, Proof
from benchmarks.peers.install import PeerError, install
from benchmarks.peers.process import Peer
from benchmarks.peers.specs import Engine
from benchmarks.peers.weights import prepare
from benchmarks.report import Line, TokenTimes, latency, value_of

console = Console(width=None if sys.stdout.isatty() else 120)


class System(Protocol):
    """Anything that can be measured."""

    name: str
    hello: dict[str, Any]

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[list[float]]:
        """Sends all prompts at once; per request, when each token arrived, in seconds from the start."""
        ...

    def stop(self) -> None:
        """Ends it and all its processes."""
        ...


@dataclass(slots=True)
class Bench:
    """What is being measured and what was found so far. errors: by system or engine, one sentence each."""

    pairs: int
    engines: list[Engine]
    systems: dict[str, System] = field(default_factory=dict)
    engine_of: dict[str, Engine] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def fail(self, name: str, error: Exception) -> None:
        """Notes why a system is out; the rest goes on without it."""
        self.errors[name] = str(error)
        console.print(f"[red]{name} is out:[/red] {error}", highlight=False)

    def able(self, case: Case) -> list[System]:
        """The systems that can do this case."""
        return [
            system
            for name, system in self.systems.items()
            if name in LAYOUTS or case.metric in self.engine_of[name].metrics
        ]


def start(bench: Bench, stack: ExitStack, serve_args: list[str]) -> None:
    for engine in bench.engines:
        try:
            install(engine, say)
            for variant in engine.variants:
                prepare(variant.model, say)
        except PeerError as error:
            bench.fail(engine.name, error)
            continue
        for variant in engine.variants:
            name = f"{engine.name} {variant.name}"
            with _timed(f"starting {name}"):
                try:
                    peer = Peer(engine, variant)
                except PeerError as error:
                    bench.fail(name, error)
                    continue
            _add(bench, stack, peer)
            bench.engine_of[name] = engine
    loop = stack.enter_context(asyncio.Runner())
    for layout in LAYOUTS:
        with _timed(f"starting {layout}: {' '.join(LAYOUTS[layout])}"):
            try:
                _add(bench, stack, Ours(layout, loop, serve_args))
            except OursError as error:
                bench.fail(layout, error)


def _add(bench: Bench, stack: ExitStack, system: Peer | Ours) -> None:
    stack.callback(system.stop)
    bench.systems[system.name] = system
    facts = ", ".join(f"{key} {value}" for key, value in system.hello.items() if key != "system")
    console.print(f"  [bold]{system.name}[/bold]: {facts}", highlight=False)


def say(text: str) -> None:
    console.print(f"[cyan]·[/cyan] {text}", highlight=False)


@contextmanager
def _timed(text: str) -> Iterator[None]:
    with console.status(text):
        started = time.perf_counter()
        yield
    say(f"{text}: {time.perf_counter() - started:.1f} s")


def _rounds(systems: list[System], pairs: int) -> Iterator[list[System]]:
    """A warm-up, then the pairs: each round starts with another system, every second runs backwards."""
    yield systems
    for number in range(pairs):
        cut = number % len(systems)
        turned = systems[cut:] + systems[:cut]
        yield turned[::-1] if number % 2 else turned


def measure(bench: Bench, case: Case, prompts: Prompts, progress: Progress, task: Any) -> dict[str, Any]:
    values: dict[str, list[float]] = {system.name: [] for system in bench.able(case)}
    times: dict[str, list[TokenTimes]] = {name: [] for name in values}
    out: set[str] = set()
    for number, order in enumerate(_rounds(bench.able(case), bench.pairs)):
        if number == 1:
            _reset_proofs(bench)
        for system in order:
            progress.update(task, description=f"{case.name}: {system.name}")
            if system.name not in out:
                try:
                    batches = [
                        system.run(prompts.take(case), case.output_tokens) for _ in range(case.repeats)
                    ]
                    value = value_of(case, batches)
                except (PeerError, OursError, ValueError) as error:
                    bench.fail(f"{system.name} in {case.name}", error)
                    out.add(system.name)
                    continue
                if number:
                    values[system.name].append(value)
                    times[system.name] += batches
            progress.advance(task)
        if number:
            shown = "  ".join(f"{name} {found[-1]:.0f}" for name, found in values.items() if name not in out)
            progress.console.print(f"  {case.name} {number}/{bench.pairs}: {shown}", highlight=False)
    return _line(bench, case, {n: [] if n in out else v for n, v in values.items()}, times)


def _reset_proofs(bench: Bench) -> None:
    for system in bench.systems.values():
        if isinstance(system, Ours):
            system.proof = Proof(page_size=system.page_size)


def _line(
    bench: Bench, case: Case, values: dict[str, list[float]], times: dict[str, list[TokenTimes]]
) -> dict[str, Any]:
    line = Line(
        case=case,
        ours=values.get("ours", []),
        ours_aggregated=values.get("ours_aggregated", []),
        values={name: found for name, found in values.items() if name not in LAYOUTS},
        family={name: engine.name for name, engine in bench.engine_of.items()},
    )
    result = line.as_json([engine.name for engine in bench.engines])
    result["latency"] = {name: latency(times[name]) for name in LAYOUTS if values.get(name)}
    ours = bench.systems.get("ours")
    result["peer_errors"] = dict(bench.errors)
    result["handover"] = ours.proof.as_json() if isinstance(ours, Ours) else None
    return result
