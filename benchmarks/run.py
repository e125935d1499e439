"""The one runner, `python -m benchmarks.run`: starts ours and the peers, measures, shows, writes results."""

from __future__ import annotations

import random
import signal
import sys
import time
from contextlib import ExitStack
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.cases import CASES, Case, Prompts
from benchmarks.files import write
from benchmarks.machine import machine, now, us
from benchmarks.peers.specs import ENGINES, Engine
from benchmarks.show import table
from benchmarks.systems import Bench, console, say, start
from benchmarks.trial import Trial

SERVE_ARGS = "--precision fast"
"""How ours is served unless told otherwise."""


def _say_who(bench: Bench) -> dict[str, Any]:
    facts = machine()
    console.print(
        f"{facts['cpu']}, {facts['cpus']} CPUs, {facts['memory_gib']} GB; {' '.join(facts['instructions'])}\n"
        f"{us()}; {bench.pairs} pair(s) per line",
        highlight=False,
    )
    if facts["load_before"] > facts["cpus"] / 4:
        console.print(f"[yellow]This machine is busy (load {facts['load_before']}): expect noise.[/yellow]")
    return facts


def _choose(cases: str, peers: str) -> tuple[list[Case], list[Engine]]:
    """Raises typer.BadParameter for a name there is not."""
    by_case, by_engine = {case.name: case for case in CASES}, {engine.name: engine for engine in ENGINES}
    wanted = list(by_case) if cases == "all" else cases.split(",")
    rivals = [] if peers == "none" else list(by_engine) if peers == "all" else peers.split(",")
    for name, known in [(n, by_case) for n in wanted] + [(n, by_engine) for n in rivals]:
        if name not in known:
            raise typer.BadParameter(f"there is no {name}; choose from {', '.join(known)}")
    return [by_case[name] for name in wanted], [by_engine[name] for name in rivals]


def main(
    cases: Annotated[str, typer.Option(help="Names, separated by commas, or all.")] = "all",
    peers: Annotated[str, typer.Option(help="vllm, llama.cpp, openvino (commas), all or none.")] = "all",
    pairs: Annotated[int, typer.Option(min=1, help="Measured rounds per case.")] = 5,
    quick: Annotated[bool, typer.Option(help="One round, to see that everything works.")] = False,
    serve_args: Annotated[str, typer.Option(help="Flags for both `pdserve up`.")] = SERVE_ARGS,
    exact: Annotated[bool, typer.Option("--exact", help="Ours with the model's own numbers.")] = False,
) -> None:
    """Measures ours beside the peers. All cases, all peers, 5 pairs and usual flags become `latest.*`."""
    started = time.perf_counter()
    serve_args = "--precision exact" if exact else serve_args
    chosen, engines = _choose(cases, peers)
    bench = Bench(pairs=1 if quick else pairs, engines=engines)
    date, facts = now(), _say_who(bench)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    prompts, lines = Prompts(random.randrange(2**32)), []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with ExitStack() as stack:
        start(bench, stack, serve_args.split())
        total = sum(len(bench.able(case)) for case in chosen) * (bench.pairs + 1)
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("", total=total)
            for case in chosen:
                lines.append(Trial(bench, case, prompts, progress, task).measure())
                progress.console.print(table(lines[-1:], [engine.name for engine in engines]))
    about = {
        "versions": {"ours": us()},
        "systems": {name: system.hello for name, system in bench.systems.items()},
        "machine": facts,
        "date": date.isoformat(),
        "duration_s": round(time.perf_counter() - started),
        "command": "make bench" if len(sys.argv) == 1 else f"make bench ARGS='{' '.join(sys.argv[1:])}'",
    }
    lines = [{**line, **about} for line in lines]
    console.print(table(lines, [engine.name for engine in engines]))
    complete = chosen == list(CASES) and engines == list(ENGINES) and bench.pairs >= 5
    complete = complete and serve_args == SERVE_ARGS
    write(lines, [engine.name for engine in engines], date, complete=complete, say=say)
    sys.exit(_verdict(lines))


def _verdict(lines: list[dict[str, Any]]) -> int:
    """0 unless a line of ours is missing or a handover is not proven: then the numbers are not to be used."""
    bad = [line["case"] for line in lines if line["ours"] is None or line["ours_aggregated"] is None]
    bad += [line["case"] for line in lines if line["handover"] and not line["handover"]["proven"]]
    if bad:
        console.print(f"[red]Not to be used:[/red] ours or its handover is missing in {', '.join(bad)}")
    return 1 if bad else 0


if __name__ == "__main__":
    typer.run(main)
