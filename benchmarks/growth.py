"""How the cost of a step grows: prefill by prompt length, decode by context and batch, beside their floors.

    python -m benchmarks.growth                       # all forms, under 4 minutes: results/growth*.json, .svg
    python -m benchmarks.growth --forms w8a8          # this one again, about a minute; the others stay
    python -m benchmarks.growth --forms ''            # draws again what results/growth.json has

A form is one of the weights, or with /DTYPE one of the KV pages too. Each is a `pdserve bench engine` of its
own, which is what shows progress. Measure on a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.growth_plot import breakdown, decode, prefill

RESULTS = Path(__file__).resolve().parent / "results"
FORMS = "exact,w8a8,w4a8,w8a8/int8"


def measure(form: str, seconds: float) -> dict[str, Any]:
    """The engine's result document for a form."""
    weights, _, kv = form.partition("/")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "engine.json"
        command = [sys.executable, "-m", "pdserve.cli", "bench", "engine", "--weights", weights]
        command += ["--seconds", str(seconds), "--json", str(target)]
        command += ["--kv-dtype", kv] if kv else []
        subprocess.run(command, check=True)
        document: dict[str, Any] = json.loads(target.read_text())
    return document


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--forms", default=FORMS)
    parser.add_argument("--seconds", type=float, default=0.6, help="of each case; long ones run once")
    given = parser.parse_args()
    kept = RESULTS / "growth.json"
    forms: dict[str, Any] = json.loads(kept.read_text()) if kept.is_file() else {}
    for form in filter(None, given.forms.split(",")):
        print(f"{form}:", flush=True)
        forms[form] = measure(form, given.seconds)
        kept.write_text(json.dumps(forms, indent=1, ensure_ascii=False) + "\n")
    if not forms:
        parser.error("there is nothing to draw yet; name forms to measure")
    prefill(forms, RESULTS / "growth_prefill.svg")
    decode(forms, RESULTS / "growth_decode.svg")
    breakdown(forms, RESULTS / "growth_breakdown.svg")
    print(
        "written: benchmarks/results/growth.json, growth_prefill.svg, growth_decode.svg, growth_breakdown.svg"
    )


if __name__ == "__main__":
    main()
