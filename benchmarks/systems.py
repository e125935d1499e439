"""The systems of a benchmark: starting and ending them, and noting who is out. Their runs: `trial`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from rich.console import Console

from benchmarks.cases import Case
from benchmarks.ours import LAYOUTS, Ours, OursError
from benchmarks.peers.install import PeerError, install
from benchmarks.peers.process import Peer
from benchmarks.peers.specs import Engine
from benchmarks.peers.weights import prepare

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
