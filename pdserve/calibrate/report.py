"""What a quantised model lost and what it needs: lines for people, JSON, and a plot of errors by layer.

What lives here: the report's forms. What does not: measuring (`quality`).
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdserve.calibrate.quality import Quality
from pdserve.calibrate.quantise import QuantisedModel
from pdserve.models.hf_write import write_json


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FormReport:
    """One form of a model. file_bytes: of its weights on disk. alphas: what the search chose, by layer."""

    scheme: str
    quality: Quality
    file_bytes: int
    memory_bytes: int
    alphas: list[dict[str, float | None]]


def memory_bytes(form: QuantisedModel) -> int:
    """Bytes of weights in a worker whose kernels take the form: quantised ones packed, others of 16 bits."""
    packed = sum(weight.packed_bytes for weight in form.low.values())
    return packed + sum(2 * weight.numel() for weight in form.plain.values())


def as_json(reports: Mapping[str, FormReport], about: Mapping[str, Any]) -> dict[str, Any]:
    """The whole report."""
    return {**about, "forms": {role: dataclasses.asdict(report) for role, report in reports.items()}}


def write_report(directory: Path, reports: Mapping[str, FormReport], about: Mapping[str, Any]) -> None:
    """quality.json, and layers.svg where matplotlib is installed."""
    write_json(directory / "quality.json", as_json(reports, about))
    if importlib.util.find_spec("matplotlib") is not None:
        curves = {f"{role}: {r.scheme}": r.quality.layer_errors for role, r in reports.items()}
        plot_layers(directory / "layers.svg", curves)


def plot_layers(path: Path, curves: Mapping[str, tuple[float, ...]]) -> None:
    """Relative error of the residual after each layer, a line for each name."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, errors in curves.items():
        axes.plot(range(1, len(errors) + 1), errors, marker="o", markersize=3, label=name)
    axes.set_xlabel("layer")
    axes.set_ylabel("relative error of the residual")
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path)


def lines(reports: Mapping[str, FormReport], plain_bytes: int) -> list[str]:
    """The report for a terminal. plain_bytes: of the model's weights in 16 bits."""
    rows = [("form", "scheme", "perplexity", "x float32", "top-1", "KL", "file MB", "memory MB")]
    for role, r in reports.items():
        q = r.quality
        rows.append(
            (
                role, r.scheme, f"{q.perplexity:.3f}", f"{q.ratio:.4f}", f"{q.top1:.1%}", f"{q.kl:.4f}",
                f"{r.file_bytes / 1e6:.0f}", f"{r.memory_bytes / 1e6:.0f}",
            )
        )  # fmt: skip
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [*table, f"unquantised, in 16 bits: {plain_bytes / 1e6:.0f} MB"]
