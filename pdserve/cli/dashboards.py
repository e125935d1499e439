"""`pdserve dashboards`: the dashboards as pictures, from a live Prometheus or a recorded run.

For whoever has no Grafana, for reports, and to look again at a run that is over. What does not live here: the
dashboards (`pdserve.obs.dashboards`).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.cli.recording import Recording
    from pdserve.obs.dashboards import Dashboard

PREFIX = "pdserve-"

dashboards_app = typer.Typer(help="The dashboards, without Grafana.", no_args_is_help=True)

_Url = Annotated[
    str,
    typer.Option("--prometheus", metavar="URL", envvar="PDSERVE_PROMETHEUS", help="The Prometheus to ask."),
]
_Minutes = Annotated[float, typer.Option(min=0.1, max=60 * 24 * 31, help="How far back.")]
_Step = Annotated[float, typer.Option(min=0, help="Seconds between two points. [default: 200 in all]")]
_Window = Annotated[float, typer.Option(min=0, help="Seconds that rates are over. [default: 4 steps, or 60]")]
_HERE = "http://127.0.0.1:9090"


@dashboards_app.command()
def preview(
    prometheus: _Url = _HERE,
    recording: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw what `record` wrote; no Prometheus is asked.")
    ] = None,
    dashboard: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this one, as overview; may be repeated.")
    ] = None,
    minutes: _Minutes = 15.0,
    step: _Step = 0.0,
    window: _Window = 0.0,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where pictures go; made if need be.")] = Path(
        "dashboards"
    ),
    kind: Annotated[str, typer.Option("--format", help="png or svg.")] = "png",
) -> None:
    """Draw the dashboards as pictures, one a file."""
    from pdserve.cli.panels import draw
    from pdserve.cli.recording import recording_from

    if kind not in ("png", "svg"):
        raise ConfigError("format: must be png or svg")
    chosen = _chosen(dashboard)
    found = recording_from(recording) if recording else _look(prometheus, chosen, minutes, step, window)
    _make(output)
    for board in chosen:
        file = output / f"{board.uid}.{kind}"
        draw(board, found, file)
        print(f"{file}  {board.description}")


@dashboards_app.command("record")
def record_run(
    output: Annotated[Path, typer.Option(metavar="FILE", help="Where it goes, as JSON.")],
    prometheus: _Url = _HERE,
    minutes: _Minutes = 15.0,
    step: _Step = 0.0,
    window: _Window = 0.0,
    about: Annotated[str, typer.Option(help="What was run, for the pictures' titles.")] = "",
) -> None:
    """Write down what all dashboards show now, to draw it later."""
    from pdserve.obs.dashboards import DASHBOARDS

    found = _look(prometheus, DASHBOARDS, minutes, step, window, about[:200])
    try:
        output.write_text(found.to_json() + "\n")
    except OSError:
        raise ConfigError("output: can not be written") from None
    empty = sum(not panel.lines for panel in found.panels)
    print(f"{output}: {len(found.panels)} panels, {empty} of them without data")


def _look(
    url: str, boards: tuple[Dashboard, ...], minutes: float, step: float, window: float, about: str = ""
) -> Recording:
    from pdserve.cli.prometheus import Prometheus
    from pdserve.cli.recording import Span, record

    end = time.time()
    begin = end - minutes * 60
    span = Span(begin_s=begin, end_s=end, step_s=step or minutes * 60 / 200, window_s=window)
    return record(Prometheus(url), boards, span, about)


def _chosen(names: list[str] | None) -> tuple[Dashboard, ...]:
    """Raises ConfigError for a name that none has."""
    from pdserve.obs.dashboards import DASHBOARDS

    by_name = {board.uid.removeprefix(PREFIX): board for board in DASHBOARDS}
    wanted = [name.removeprefix(PREFIX) for name in names or by_name]
    if unknown := [name for name in wanted if name not in by_name]:
        raise ConfigError(f"dashboard: there is no {unknown[0]!r}; there are {', '.join(by_name)}")
    return tuple(by_name[name] for name in wanted)


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        raise ConfigError("output: the directory can not be made") from None
