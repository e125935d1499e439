"""What `pdserve bench` prints, made of its result documents. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

Document = Mapping[str, Any]
PRODUCTS = ("qkv", "out", "gate_up", "down")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.4f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def peaks_table(document: Document) -> Table:
    """Bandwidth by size, operations by data type."""
    table = _table(f"this machine ({document['machine']['cpu']})", "peak", "measured")
    for kind, speed in document["peaks"]["products"].items():
        shown = f"{speed / 1e9:,.0f} G operations/s" if speed else "no such products"
        table.add_row(f"{kind} products", shown)
    for size, speed in document["peaks"]["bandwidth"]:
        table.add_row(f"reading {size >> 20} MiB again and again", f"{speed / 1e9:.1f} GB/s")
    return table


def micro_tables(document: Document) -> Sequence[Table]:
    """Peaks; linear layers by rows and form; attention by context."""
    linears = _table("linear layers: ms of one (share of the floor)", "layer, rows")
    rows = [row for row in document["cases"] if row["group"] == "linear"]
    forms = list(dict.fromkeys(row["form"] for row in rows))
    for form in forms:
        linears.add_column(form, justify="right")
    found = {(row["name"], row["rows"], row["form"]): row for row in rows}
    for name, count in dict.fromkeys((row["name"], row["rows"]) for row in rows):
        cells = [found[name, count, form] for form in forms]
        linears.add_row(
            f"{name}, {count}", *(f"{cell['ms']:.4f} ({_share(cell['share'])})" for cell in cells)
        )
    attention = _table(
        "attention of one layer", "case", "pages", "ms", "G operations/s", "GB/s", "share of floor"
    )
    for row in document["cases"]:
        if row["group"] == "attention":
            name = f"{row['name']}, {row['rows']} rows, context {row['context']}"
            speeds = (f"{row['gops_per_s']:,.0f}", f"{row['gbytes_per_s']:.1f}")
            attention.add_row(name, row["form"], _ms(row["ms"]), *speeds, _share(row["share"]))
    return peaks_table(document), linears, attention


def engine_tables(document: Document) -> Sequence[Any]:
    """Peaks; steps beside floors; where a prefill and a decode step went; what was left out."""
    settings = document["settings"]
    steps = _table(
        f"{settings['model']} {settings['dtype']}, weights {settings['weights']}, "
        f"pages {settings['kv_dtype']}, {settings['isa']}",
        "step", "best ms", "median ms", "runs", "tokens/s", "floor ms", "share",
    )  # fmt: skip
    for row in document["cases"]:
        if row["phase"] == "prefill":
            name = f"prefill, {row['context']} tokens"
        else:
            name = f"decode, {row['batch']} at context {row['context']}"
        steps.add_row(
            name, _ms(row["best_ms"]), _ms(row["median_ms"]), str(row["runs"]),
            f"{row['tokens_per_s']:,.0f}", _ms(row["floor_ms"]), _share(row["share"]),
        )  # fmt: skip
    tables: list[Any] = [peaks_table(document), steps]
    if parts := typical(document["cases"]):
        tables.append(breakdown_table(parts))
    if document["skipped"]:
        tables.append(f"left out for want of pages (--pool-gib): {', '.join(document['skipped'])}")
    return tables


def typical(cases: Sequence[Document]) -> list[Document]:
    """A prefill and a decode step to break down: those nearest to 1,024 tokens and to 8 sequences at 512."""
    timed = [row for row in cases if row["by_phase_ms"]]
    prefills = [row for row in timed if row["phase"] == "prefill"]
    steps = [row for row in timed if row["phase"] == "decode"]
    picked = []
    if prefills:
        picked.append(min(prefills, key=lambda row: abs(row["context"] - 1024)))
    if steps:
        picked.append(min(steps, key=lambda row: (abs(row["batch"] - 8), abs(row["context"] - 512))))
    return picked


def breakdown_table(cases: Sequence[Document]) -> Table:
    """Operations as lines; ms, share of the step and of the floor for each case."""
    table = _table("where the time goes, best run", "operation")
    for case in cases:
        for column in (f"{case['name']} ms", "of step", "of floor"):
            table.add_column(column, justify="right")
    for name in cases[0]["by_phase_ms"]:
        cells: list[str] = []
        for case in cases:
            took = case["by_phase_ms"][name]
            floor = (case["floor_by_phase_ms"] or {}).get(name)
            share = None if floor is None or took <= 0 else floor / took
            cells += [_ms(took), _share(took / case["best_ms"]), _share(share)]
        table.add_row(_NAMES.get(name, name), *cells)
    return table


_NAMES = {
    "rows": "norms, gates, quantising",
    "qkv": "product: q, k, v",
    "out": "product: attention's output",
    "gate_up": "product: gate, up",
    "down": "product: down",
    "head": "product: head",
    "write": "positions, writing pages",
    "attention": "attention",
    "other": "all that is not the layers' call",
}


def serving_tables(document: Document) -> Sequence[Table]:
    """One table: throughput, latencies, failures."""
    (row,) = document["cases"]
    load = document["settings"]
    how = f"{load['rate']:g} requests/s" if load["rate"] else f"{load['concurrency']} at a time"
    size = f"{load['prompt_tokens']} tokens in, {load['output_tokens']} out"
    table = _table(f"{load['model']}: {row['requests']} requests, {how}, {size}", "figure", "value")
    table.add_row("output tokens/s", f"{row['tokens_per_s']:,.1f}")
    table.add_row("prompt tokens/s", f"{row['prompt_tokens_per_s']:,.1f}")
    table.add_row("requests/s", f"{row['requests_per_s']:,.2f}")
    for name, title in (("ttft", "time to first token"), ("itl", "inter-token latency")):
        found = [_ms(row[f"{name}_p{percent}_ms"]) for percent in (50, 90, 99)]
        table.add_row(f"{title}, p50 / p90 / p99, ms", " / ".join(found))
    for label, count in row["errors"].items():
        table.add_row(f"failed: {label}", str(count))
    return (table,)
