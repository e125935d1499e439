"""The Helm chart rendered, as tests read it. Nothing here needs a cluster."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

from tests.support.manifests import Manifest, load
from tests.support.source_tree import ROOT
from tests.support.tools import tool

CHART = ROOT / "deploy" / "helm" / "pdserve"
EXAMPLES = tuple(sorted(path.stem for path in (CHART / "examples").glob("*.yaml")))
RELEASE, NAMESPACE = "demo", "serving"
EVERYTHING = (
    *("autoscaling.kind=keda", "monitoring.enabled=true", "monitoring.rules=true"),
    *("monitoring.dashboards=true", "prefill.autoscaling.minReplicas=2"),
)
"""Values that switch all of the chart's parts on."""


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs helm to its end; the caller looks at the exit code."""
    command = [tool("helm"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def template(
    example: str = "", *settings: str, release: str = RELEASE, part: str = ""
) -> subprocess.CompletedProcess[str]:
    """`helm template` of an example's values (empty: the defaults) and these `--set` settings on top.

    part: the one template to render; else all but what `helm test` runs.
    """
    values = ["--values", CHART / "examples" / f"{example}.yaml"] if example else []
    sets = [part for setting in settings for part in ("--set", setting)]
    which = ["--show-only", f"templates/{part}.yaml"] if part else ["--skip-tests"]
    return helm("template", release, CHART, "--namespace", NAMESPACE, *values, *sets, *which)


@cache
def _text(example: str, settings: tuple[str, ...], release: str) -> str:
    done = template(example, *settings, release=release)
    assert done.returncode == 0, done.stderr
    return done.stdout


def render(example: str = "", *settings: str, release: str = RELEASE) -> list[Manifest]:
    """The manifests of `template`, which must succeed."""
    return load(_text(example, settings, release))


def text(example: str = "", *settings: str) -> str:
    """The same as helm writes it."""
    return _text(example, settings, RELEASE)


def refused(*settings: str, example: str = "") -> str:
    """What helm says about settings that it must refuse."""
    done = template(example, *settings)
    assert done.returncode != 0, "rendered"
    return done.stderr
