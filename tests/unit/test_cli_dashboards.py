"""Recordings of dashboards and the pictures drawn from them, without a Prometheus."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from pdserve.cli.dashboards import dashboards_app
from pdserve.cli.main import app
from pdserve.cli.panels import draw
from pdserve.cli.prometheus import Prometheus, Series
from pdserve.cli.recording import Line, Recorded, Recording, Span, legend, record, recording_from
from pdserve.errors import ConfigError, Unavailable
from pdserve.obs.dashboards import DASHBOARDS, Kind

PNG = b"\x89PNG\r\n\x1a\n"
BEGIN_S = 1.8e9


class Told(Prometheus):
    """Answers every query with the same series, and keeps what was asked."""

    def __init__(self, *series: Series) -> None:
        super().__init__("http://nowhere")
        self.series, self.asked = list(series), []  # type: list[Series], list[str]

    def query_range(self, promql: str, begin_s: float, end_s: float, step_s: float) -> list[Series]:
        self.asked.append(promql)
        return self.series


def series(*values: float, **labels: str) -> Series:
    return Series(labels, tuple((BEGIN_S + 10 * i, value) for i, value in enumerate(values)))


def span(**changes: float) -> Span:
    return Span(**{"begin_s": BEGIN_S, "end_s": BEGIN_S + 100, "step_s": 10.0, **changes})


def test_a_recording_asks_what_the_panels_ask_with_its_own_window() -> None:
    told = Told(series(1.0, math.nan, math.inf, le="0.5", role="decode"))
    found = record(told, DASHBOARDS, span(), "a run")
    queries = [
        query.promql("60s") for board in DASHBOARDS for panel in board.panels for query in panel.queries
    ]
    assert told.asked == queries
    assert not [promql for promql in told.asked if "$" in promql]
    (line, *_) = found.lines("pdserve-overview", "Workers ready")
    assert line == Line(legend="decode", points=((BEGIN_S, 1.0), (BEGIN_S + 10, None), (BEGIN_S + 20, None)))
    assert record(told, DASHBOARDS[:1], span(window_s=30.0)).window_s == 30


def test_a_line_has_the_labels_its_panel_names() -> None:
    assert legend("{{role}} of {{ worker }}", series(1.0, role="decode")) == "decode of"


@given(st.lists(st.tuples(st.floats(0, 1e10), st.none() | st.floats(-1e300, 1e300))), st.text(), st.text())
def test_what_is_written_is_read(points: list[tuple[float, float | None]], name: str, about: str) -> None:
    panel = Recorded(dashboard="d", title="t", lines=(Line(legend=name, points=tuple(points)),))
    made = Recording(begin_s=1, end_s=2, step_s=3, window_s=4, panels=(panel,), about=about[:200])
    file = Path("/dev/shm") / f"pdserve-recording-{id(made)}"
    try:
        file.write_text(made.to_json())
        assert recording_from(file) == made
    finally:
        file.unlink(missing_ok=True)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "null", "{}", "[" * 100_000, '{"format": 1}', '{"format": 2}',
        '{"format": 1, "begin_s": NaN, "end_s": 1, "step_s": 1, "window_s": 1, "about": "", "panels": []}',
        '{"format": 1, "begin_s": true, "end_s": 1, "step_s": 1, "window_s": 1, "about": "", "panels": []}',
        '{"format": 1, "begin_s": 0, "end_s": 1, "step_s": 1, "window_s": 1, "about": "", "panels": [3]}',
    ],
)  # fmt: skip
def test_a_file_that_is_no_recording_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="recording"):
        recording_from(file)


def full() -> Recording:
    """Lines for every panel: two of them, with a gap, or the buckets of a heat map."""
    panels = []
    for board in DASHBOARDS:
        for panel in board.panels:
            names = ("0.1", "0.5", "+Inf") if panel.kind is Kind.HEATMAP else ("one", "two")
            values: tuple[float | None, ...] = (1.0, None, 3.0, 2.0)
            points = tuple((BEGIN_S + 10 * i, value) for i, value in enumerate(values))
            lines = tuple(Line(legend=name, points=points) for name in names)
            panels.append(Recorded(dashboard=board.uid, title=panel.title, lines=lines))
    return Recording(
        begin_s=BEGIN_S, end_s=BEGIN_S + 40, step_s=10, window_s=60, panels=tuple(panels), about="a run"
    )


def test_every_panel_can_be_drawn_with_and_without_data(tmp_path: Path) -> None:
    board = max(DASHBOARDS, key=lambda each: len({panel.kind for panel in each.panels}))
    draw(board, full(), tmp_path / "full.svg")
    svg = (tmp_path / "full.svg").read_text()
    assert "no data" not in svg.replace("<!-- no data -->", "")
    empty = Recording(begin_s=BEGIN_S, end_s=BEGIN_S + 40, step_s=10, window_s=60, panels=())
    draw(board, empty, tmp_path / "empty.svg")
    drawn = (tmp_path / "empty.svg").read_text()
    assert drawn.count("<!-- no data -->") == len(board.panels)
    for panel in board.panels:
        assert f"<!-- {panel.title} -->" in svg


def test_the_command_draws_a_recording(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(full().to_json())
    pictures = tmp_path / "pictures"
    chosen = ["--dashboard", "overview", "--dashboard", "pdserve-transfer"]
    arguments = ["dashboards", "preview", "--recording", str(file), "--output", str(pictures), *chosen]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    names = sorted(each.name for each in pictures.iterdir())
    assert names == ["pdserve-overview.png", "pdserve-transfer.png"]
    assert all(each.read_bytes().startswith(PNG) for each in pictures.iterdir())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("preview", "--dashboard", "nothing"), "nothing"),
        (("preview", "--format", "exe"), "format"),
        (("preview", "--prometheus", "file:///etc/passwd"), "http"),
        (("preview", "--recording", "missing.json"), "recording"),
        (("preview", "--step", "0.001"), "step"),
        (("record", "--prometheus", "ftp://here", "--output", "x"), "http"),
    ],
)
def test_what_is_wrong_is_named(arguments: tuple[str, ...], named: str) -> None:
    done = CliRunner().invoke(dashboards_app, list(arguments))
    assert isinstance(done.exception, ConfigError)
    assert named in done.exception.message


def test_what_answers_must_be_a_prometheus(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable):
        Prometheus("http://127.0.0.1:1").query("up")
    for data in (
        {},
        {"resultType": "vector", "result": [{}]},
        {"resultType": "vector", "result": [{"metric": 1}]},
    ):
        monkeypatch.setattr(Prometheus, "ask", lambda self, path, fields=None, data=data: data)
        with pytest.raises(Unavailable):
            Prometheus("http://127.0.0.1:1").query("up")
    answer: dict[str, Any] = json.loads('{"resultType": "scalar", "result": [1.5, "2"]}')
    monkeypatch.setattr(Prometheus, "ask", lambda self, path, fields=None: answer)
    assert Prometheus("http://127.0.0.1:1").query("2") == [Series({}, ((1.5, 2.0),))]
