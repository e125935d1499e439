"""Chats at a steady rate, 4,000-token prompts arriving among them, open loop: `python -m benchmarks.mixed`.

Ours in two layouts, OpenVINO GenAI and vLLM, each climbing the same ladder of rates with the same arrivals,
in turns: who is not measured is frozen (peers) or waits idle (ours; what it used is noted). What lives here:
the order of runs, the result file, the verdict. The load and its arithmetic: `mixed_load`; settings:
`mixed_ways`.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from benchmarks.files import RESULTS
from benchmarks.machine import machine, now, us
from benchmarks.mixed_load import (
    CHAT,
    LONG,
    OUTPUT_TOKENS,
    TTFT_LIMIT_S,
    Arrival,
    crossovers,
    equal_load,
    goodput,
    next_rate,
    prompts,
    schedule,
    settings,
    summary,
)  # fmt: skip
from benchmarks.mixed_show import plot, row, table
from benchmarks.mixed_ways import AGGREGATED, OURS, PEERS, SETTINGS, VLLM, Setting, start
from benchmarks.ours import Ours, OursError
from benchmarks.peers.install import PeerError
from benchmarks.peers.process import Peer
from benchmarks.systems import console, say

LADDER = (0.5, 1.0, 1.4, 2.0, 2.8, 4.0)
LEAST_REQUESTS = 10
PILOT_RATE = 1.0
MUST = {"itl_ratio": 0.7, "goodput_ratio": 1.3}
GOAL = {"itl_ratio": 0.4, "goodput_ratio": 2.5}


@dataclass(slots=True)
class Race:
    """The systems that run, and what was measured. curves: by system and rate. until: no run begins later."""

    seconds: float
    seed: int
    until: float
    systems: dict[str, Ours | Peer] = field(default_factory=dict)
    curves: dict[str, dict[float, dict[str, Any]]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    idle_cpu_s: float = 0.0
    idle_s: float = 0.0
    runs: int = 0

    def warm_up(self, name: str) -> None:
        """A few requests that do not count."""
        arrivals = [Arrival(at_s=0.3 * n, kind=LONG if n == 1 else CHAT) for n in range(4)]
        self._load(name, arrivals, limit_s=60.0)

    def measure(self, name: str, rate: float) -> None:
        """One rate of one system. A system that fails is out."""
        arrivals = schedule(rate, max(self.seconds, LEAST_REQUESTS / rate), self.seed)
        limit_s = arrivals[-1].at_s + TTFT_LIMIT_S[LONG] + 2.0
        try:
            times = self._load(name, arrivals, limit_s)
        except (PeerError, OursError) as error:
            self.errors[name] = str(error)
            console.print(f"[red]{name} is out:[/red] {error}", highlight=False)
            return
        self.curves.setdefault(name, {})[rate] = run = summary(arrivals, times)
        console.print(row(name, rate, run), highlight=False, soft_wrap=True)

    def race(self, ladder: Sequence[float], halvings: int) -> None:
        """Rounds: in each, every system that is not done has its next rate; the first one changes."""
        names = list(self.systems)
        for turn in range(100):
            order = names[turn % len(names) :] + names[: turn % len(names)]
            some = False
            for name in order:
                rate = next_rate(self.curves.get(name, {}), ladder, halvings)
                if rate is not None and name not in self.errors and time.monotonic() < self.until:
                    self.measure(name, rate)
                    some = True
            if not some:
                return

    def _load(self, name: str, arrivals: Sequence[Arrival], limit_s: float) -> list[list[float]]:
        self.runs += 1
        asked = prompts(arrivals, seed=self.seed * 1000 + self.runs)
        with self._watching(name):
            return self.systems[name].load(asked, [a.at_s for a in arrivals], OUTPUT_TOKENS, limit_s)

    @contextmanager
    def _watching(self, name: str) -> Iterator[None]:
        """Notes the processor time of ours that are idle meanwhile."""
        idle = [s for n, s in self.systems.items() if n != name and isinstance(s, Ours)]
        began, used = time.monotonic(), sum(s.cpu_s() for s in idle)
        yield
        if idle:
            self.idle_cpu_s += sum(s.cpu_s() for s in idle) - used
            self.idle_s += time.monotonic() - began


def begin(
    race: Race, stack: ExitStack, name: str, label: str, setting: Setting, serve_args: Sequence[str]
) -> None:
    """Starts one system and warms it up; notes why if it can not."""
    loop = asyncio.Runner() if name not in PEERS else None
    began = time.perf_counter()
    try:
        with console.status(f"starting {label}"):
            system = start(name, setting, loop, serve_args)
            if loop is not None:
                stack.callback(loop.close)
            stack.callback(system.stop)
            race.systems[label] = system
            race.warm_up(label)
    except (PeerError, OursError) as error:
        race.errors[label] = str(error)
        race.systems.pop(label, None)
        console.print(f"[red]{label} is out:[/red] {error}", highlight=False)
        return
    say(f"{label}, {setting.name}: started and warm after {time.perf_counter() - began:.0f} s")


def pilot(race: Race, names: Sequence[str], serve_args: Sequence[str]) -> None:
    """Every setting of every system at one rate, one system at a time."""
    for name in names:
        for setting in SETTINGS[name]:
            with ExitStack() as stack:
                label = f"{name} {setting.name}"
                begin(race, stack, name, label, setting, serve_args)
                if label in race.systems:
                    race.measure(label, PILOT_RATE)
                race.systems.clear()


def verdict(curves: dict[str, dict[float, dict[str, Any]]]) -> dict[str, Any]:
    """The lines of the mix: for ours as disaggregated, and for our aggregated mode beside the same peers."""
    out: dict[str, Any] = {}
    for name in (OURS, AGGREGATED):
        equal = equal_load(curves, name, PEERS)
        out[name] = {"itl_at_equal_throughput": equal, "goodput": goodput(curves, name, PEERS)}
    a, b = curves.get(OURS, {}), curves.get(AGGREGATED, {})
    fields = ("share", "itl_chat_p99_ms", "ttft_chat_p99_ms", "output_tokens_per_s")
    out["crossovers"] = {name: crossovers(a, b, name) for name in fields}
    out["must"], out["goal"] = MUST, GOAL
    return out


def facts_of(race: Race, seconds: float, began: float) -> dict[str, Any]:
    """Where, when and with what."""
    return {
        "machine": machine(), "versions": {"ours": us()}, "date": now().isoformat(),
        "command": " ".join(["python -m benchmarks.mixed", *sys.argv[1:]]),
        "seconds_a_run": seconds, "seed": race.seed, "mix": settings(),
        "duration_s": round(time.perf_counter() - began), "errors": race.errors,
        "idle_cpu_share": round(race.idle_cpu_s / race.idle_s, 4) if race.idle_s else None,
    }  # fmt: skip


def write(name: str, race: Race, facts: dict[str, Any], hello: dict[str, Any]) -> None:
    """The result file and its plot; the curves as lists of runs."""
    curves = {
        label: [{"rate": rate, **run} for rate, run in sorted(curve.items())]
        for label, curve in race.curves.items()
    }
    found = {**facts, "systems": hello, "curves": curves, "lines": verdict(race.curves)}
    RESULTS.mkdir(exist_ok=True)
    target = RESULTS / f"{name}.json"
    target.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    plot(race.curves, found, target.with_suffix(".png"))
    say(f"written: benchmarks/results/{name}.json and .png")


def main(
    systems: Annotated[str, typer.Option(help="Names with commas, or all.")] = "all",
    rates: Annotated[str, typer.Option(help="The ladder, requests a second, with commas.")] = "",
    seconds: Annotated[float, typer.Option(min=2, help="Of arrivals in a run.")] = 24.0,
    halvings: Annotated[int, typer.Option(min=0, help="Runs between the last good rate and the next.")] = 2,
    minutes: Annotated[float, typer.Option(min=0.5, help="No run begins after so long.")] = 14.0,
    seed: Annotated[int, typer.Option(help="Of arrivals and prompts.")] = 7,
    quick: Annotated[bool, typer.Option(help="Two short runs each, without vllm: does it work?")] = False,
    try_settings: Annotated[bool, typer.Option("--pilot", help="Each setting of each system, once.")] = False,
    serve_args: Annotated[str, typer.Option(help="More flags for both `pdserve up`.")] = "",
) -> None:
    """Some 15 minutes (--quick 3, --pilot 6). Only a run without flags becomes `results/mixed.*`."""
    began, usual = time.perf_counter(), len(sys.argv) == 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # everything started is stopped
    names = [n for n in SETTINGS if not (quick and n == VLLM)] if systems == "all" else systems.split(",")
    if unknown := [n for n in names if n not in SETTINGS]:
        raise typer.BadParameter(f"there is no {unknown[0]}; choose from {', '.join(SETTINGS)}")
    ladder = tuple(float(rate) for rate in rates.split(",")) if rates else (1.0, 2.0) if quick else LADDER
    seconds = min(seconds, 5.0) if quick else seconds
    race = Race(seconds=seconds, seed=seed, until=time.monotonic() + 60 * minutes)
    with ExitStack() as stack:
        if try_settings:
            pilot(race, names, serve_args.split())
        else:
            for name in names:
                begin(race, stack, name, name, SETTINGS[name][0], serve_args.split())
            race.race(ladder, 0 if quick else halvings)
        hello = {n: {**s.hello, "setting": SETTINGS[n][0].name} for n, s in race.systems.items()}
    facts = facts_of(race, seconds, began)
    console.print(table(race.curves, verdict(race.curves)))
    file = "mixed" if usual else "mixed-pilot" if try_settings else "partial-mixed"
    write(file, race, facts, hello)
    sys.exit(1 if OURS in race.errors or AGGREGATED in race.errors else 0)


if __name__ == "__main__":
    typer.run(main)
