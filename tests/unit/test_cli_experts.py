"""`pdserve experts`: what it reads, what it refuses, what it says and draws."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from pdserve.cli.heatmap import COLOURS, Panel, heat_map, level_of
from pdserve.cli.main import app
from pdserve.errors import ConfigError
from pdserve.parallel.expert_files import read_placement
from pdserve.parallel.expert_snapshot import ExpertSnapshot, snapshot_from_json, snapshot_to_json
from pdserve.parallel.placement import plan
from pdserve.parallel.placement_table import Topology

SVG = "{http://www.w3.org/2000/svg}"


def skewed(num_layers: int = 3, num_experts: int = 16) -> dict[str, Any]:
    loads = [1e4 / (rank + 1) for rank in range(num_experts)]
    rows = [random.Random(layer).sample(loads, num_experts) for layer in range(num_layers)]
    return {
        "name": "decode-0",
        "loads": rows,
        "ranks_per_node": 4,
        "slots_per_rank": 5,
        "layers": [1, 2, 5],
        "balance_losses": [1.0, 1.25, 0.0],
    }


def run(tmp_path: Path, data: object, *options: str) -> tuple[int, str]:
    file = tmp_path / "loads.json"
    file.write_text(json.dumps(data))
    result = CliRunner().invoke(app, ["experts", "--from", str(file), *options])
    if isinstance(result.exception, ConfigError):
        return 2, result.exception.message
    return result.exit_code, result.output


def test_the_table_says_what_is_and_what_a_rebalance_gains(tmp_path: Path) -> None:
    code, said = run(tmp_path, skewed(), "--layer", "5")
    assert code == 0, said
    assert "decode-0: 16 experts, 1 x 4 ranks, 5 slots each" in said
    rows = [line.split() for line in said.splitlines() if line.split()[:1] in (["1"], ["2"], ["5"])]
    assert len(rows) == 3
    assert all(float(row[-2].rstrip("x")) <= 1.05 < float(row[-3].rstrip("x")) for row in rows)
    assert "balance loss" in said
    assert [row[-4] for row in rows] == ["1.000", "1.250", "mean)"], "none where nobody counted"
    assert "after a rebalance" in said
    assert "% less" in said
    assert sum(line.startswith("rank ") for line in said.splitlines()) == 4


def test_json_has_both_tables_and_they_read_back(tmp_path: Path) -> None:
    code, said = run(tmp_path, skewed(), "--json")
    assert code == 0
    told = json.loads(said)[0]
    now, after = snapshot_from_json(told["now"]), snapshot_from_json(told["after"])
    for number, layer in enumerate(told["largest_rank_load"]):
        assert now.table.largest(number, now.loads[number]) == pytest.approx(layer["now"])
        assert after.table.largest(number, after.loads[number]) == pytest.approx(layer["after"])
        assert layer["bound"] <= layer["after"] < layer["now"]
    assert told["copies"] == len(after.table.copies_from(now.table)) > 0


def test_the_picture_is_svg_and_covers_every_cell(tmp_path: Path) -> None:
    drawn = tmp_path / "map.svg"
    code, _ = run(tmp_path, skewed(), "--plot", str(drawn))
    assert code == 0
    tree = ElementTree.fromstring(drawn.read_text())
    words = {text.text for text in tree.iter(f"{SVG}text")}
    assert {"tokens by expert", "load of ranks now", "load of ranks after a rebalance"} <= words
    covered = [
        sum(
            int(run.partition("h")[2])
            for path in grid.iter(f"{SVG}path")
            for run in path.get("d", "").split("M")[1:]
        )
        for grid in tree.iter(f"{SVG}g")
    ]
    assert covered == [3 * 16, 3 * 4, 3 * 4]


def test_the_new_placement_can_be_saved_and_is_what_was_planned(tmp_path: Path) -> None:
    saved = tmp_path / "placement.json"
    code, said = run(tmp_path, skewed(), "--json", "--save", str(saved))
    assert code == 0, said
    after = snapshot_from_json(json.loads(said)[0]["after"])
    assert read_placement(str(saved)) == after.table
    assert read_placement("") is None
    code, said = run(tmp_path, skewed(), "--save", str(tmp_path / "absent" / "x"))
    assert (code, said) == (2, "save: the file can not be written")


def test_another_machine_may_be_asked_for(tmp_path: Path) -> None:
    code, said = run(
        tmp_path,
        skewed(),
        "--nodes",
        "2",
        "--ranks-per-node",
        "2",
        "--slots",
        "6",
        "--by-node",
        "--groups",
        "4",
    )
    assert code == 0, said
    assert "2 x 2 ranks, 6 slots each" in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loads": []}, "loads"),
        ({"loads": [[1.0], [1.0, 2.0], [1.0]]}, "experts"),
        ({"loads": [["x"] * 16] * 3}, "wrong kind"),
        ({"loads": [[-1.0] * 16] * 3}, "from 0"),
        ({"layers": [1]}, "lengths"),
        ({"balance_losses": [1.0]}, "lengths"),
        ({"slots_per_rank": 3}, "too few"),
        ({"slots_per_rank": 0}, "slots_per_rank"),
        ({"ranks_per_node": 0}, "rank"),
        ({"homes": [[[[0, 1.0]]] * 16] * 3}, "one slot"),
        ({"homes": 3}, "wrong kind"),
    ],
)
def test_what_is_no_snapshot_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    code, said = run(tmp_path, skewed() | change)
    assert (code, words in said) == (2, True), said


@pytest.mark.parametrize(("text", "words"), [("[", "not JSON"), ("[1]", "object"), ("\udcff", "read")])
def test_what_is_no_file_of_ours_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    result = CliRunner().invoke(app, ["experts", "--from", str(file)])
    assert isinstance(result.exception, ConfigError)
    assert words in result.exception.message


def test_a_window_without_tokens_says_so(tmp_path: Path) -> None:
    code, said = run(tmp_path, skewed() | {"loads": [[0.0] * 16] * 3})
    assert code == 0
    assert "no expert has had a token" in said


@given(st.lists(st.floats(0, 1e6), min_size=6, max_size=6), st.integers(6, 8))
def test_a_snapshot_reads_back_as_it_was(loads: list[float], slots: int) -> None:
    topology = Topology(num_nodes=1, ranks_per_node=2, lost=frozenset({1}))
    table = plan([loads], topology, slots).table
    snapshot = ExpertSnapshot(
        name="a", layers=(3,), loads=(tuple(loads),), table=table, balance_losses=(1.5,)
    )
    assert snapshot_from_json(json.loads(json.dumps(snapshot_to_json(snapshot)))) == snapshot


def test_colours_change_at_the_mean_and_words_are_escaped() -> None:
    half = len(COLOURS) // 2
    assert level_of(0.999) < half <= level_of(1.0)
    assert (level_of(0.0), level_of(1e9), level_of(1e-9)) == (0, len(COLOURS) - 1, 0)
    text = heat_map("a < b", [Panel(title="t", columns="c", rows="r", labels=["0"], values=[[1.0]])])
    assert "a &lt; b" in text
