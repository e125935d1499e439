"""Every panel of every dashboard moves by what a test did, in a real Prometheus over a real fleet.

One story in stages (`panels_quiet`, `panels_held`, `panels_broken`): each does something known and looks at
the panels that must show it, by the panels' own queries. What needs another fleet is named in `STILL`, with
where it moves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from pdserve.obs.dashboards import DASHBOARDS
from tests.support import panels_broken as broken
from tests.support import panels_held as held
from tests.support import panels_quiet as quiet
from tests.support.panel_story import Story
from tests.support.panels_seen import PANELS
from tests.support.prometheus import DEPLOYED
from tests.support.watched import Watched, watched

STAGES = (
    quiet.plain_traffic,
    quiet.times_are_those_clients_were_told,
    quiet.ledgers_are_those_clients_were_told,
    quiet.tokens_add_up,
    quiet.steps_add_up,
    quiet.who_is_there,
    held.ends_of_every_group,
    held.ends_add_up,
    held.decode_under_way,
    held.held_steps_are_seen,
    held.prompts_under_way,
    held.stalls_on_the_way,
    held.memory_runs_out,
    broken.strangers_are_sent_away,
    broken.words_for_nobody,
    broken.a_page_changes,
    broken.a_page_changes_on_the_way,
    broken.a_read_does_not_end,
    held.workers_come_and_go,
)
_RAY = "needs Ray; it moves in test_fleet_client, by the same panel's query"
_RANKS = "needs a worker of several ranks; it moves in test_panels_experts, by the same panel's query"
STILL = {
    "workers/Imbalance of experts": _RANKS,
    "workers/Lost ranks": _RANKS,
    "workers/Placements of experts": _RANKS,
    "workers/Ray actors by state": _RAY,
    "workers/Restarts": _RAY,
    "workers/Workers wanted": _RAY,
}
"""Panels that no stage moves."""
RAY = frozenset(name for name, why in STILL.items() if why == _RAY)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with watched(tmp_path_factory.mktemp("watched")) as running:
        running.prometheus.until_all_up(3)
        yield running


def test_every_panel_moves_by_what_was_done(fleet: Watched) -> None:
    story = Story(fleet)
    for stage in STAGES:
        stage(story)
    assert story.seen.moved | STILL.keys() == PANELS.keys()
    assert not story.seen.moved & STILL.keys(), "moves after all: it needs no excuse"


def test_every_query_of_every_panel_has_data(fleet: Watched) -> None:
    empty = [
        f"{board.uid}/{panel.title}: {query.expr}"
        for board in DASHBOARDS
        for panel in board.panels
        for query in panel.queries
        if f"{board.uid.removeprefix('pdserve-')}/{panel.title}" not in RAY
        and not fleet.prometheus.query(query.promql("1h"))
    ]
    assert empty == []
    assert not [
        panel.title for panel in PANELS.values() for query in panel.queries if "vector(0)" in query.expr
    ]


def test_every_rule_is_evaluated_and_what_alerts_compare_has_data(fleet: Watched) -> None:
    groups: list[dict[str, Any]] = fleet.prometheus.ask("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []
    written = [yaml.safe_load(file.read_text()) for file in sorted((DEPLOYED / "rules").glob("*.yml"))]
    asked = [rule for file in written for group in file["groups"] for rule in group["rules"]]
    assert len(asked) == len(rules)
    empty = [
        f"{rule.get('alert') or rule.get('record')}: {part}"
        for rule in asked
        for part in compared(rule["expr"])
        if "pdserve_fleet_" not in part and not fleet.prometheus.query(part)
    ]
    assert empty == []


_BETWEEN = re.compile(r"\s(?:and|or|unless)\s(?:on \([\w, ]+\)\s)?|\s(?:[<>]=?|==|!=)\s")


def compared(expr: str) -> list[str]:
    """The sides of a rule's comparisons, without numbers: what must have data, whether it is true or not."""
    text, begin, sides = f" {' '.join(expr.split())} ", 0, []
    for found in _BETWEEN.finditer(text):
        if text.count("(", 0, found.start()) == text.count(")", 0, found.start()):
            sides.append(text[begin : found.start()].strip())
            begin = found.end()
    rest = text[begin:].strip()
    if not sides:
        return [] if re.fullmatch(r"[\d.*\s]*", rest) else [rest]
    parts = (part[1:-1] if part.startswith("(") and part.endswith(")") else part for part in (*sides, rest))
    return [inner for part in parts for inner in compared(part)]
