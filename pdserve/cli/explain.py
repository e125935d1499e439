"""`pdserve explain`: one request's timeline as text, or as JSON."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence

from pdserve.api import Explanation
from pdserve.cli.answers import ledger_of
from pdserve.cli.connection import Router
from pdserve.types import Ledger, Phase, Span

BAR = 48
_HTTP_PREFIX = re.compile(r"^(chatcmpl-|cmpl-|msg_|resp_)")
"""What answers over HTTP have before the id of their request."""
MAX_CHUNK_ROWS = 12
"""More chunks share one row."""


def run(request_id: str, router: Router, as_json: bool) -> None:
    """Asks the router and prints. Raises PdserveError; UnknownRequest for an id it does not know."""
    with router.client() as client:
        found = client.explain(_HTTP_PREFIX.sub("", request_id))
    if as_json:
        plain = dataclasses.asdict(found)
        print(json.dumps({**plain, "ledger": ledger_of(found.ledger)}, ensure_ascii=False))
    else:
        print(render(found))


def render(found: Explanation) -> str:
    """The whole page."""
    return "\n".join([*_head(found), *_figures(found.ledger), *_timeline(found.ledger)])


def _head(found: Explanation) -> list[str]:
    label = f" ({found.client_request_id})" if found.client_request_id else ""
    end = f"{found.outcome} after {_ms(found.total_s)}" if found.outcome else f"for {_ms(found.age_s)}"
    usage = found.usage
    lines = [
        f"request {found.request_id}{label}: {found.state}, {end}",
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), "
        f"{usage.completion_tokens} of at most {found.max_tokens} made, "
        f"{found.epochs} {'try' if found.epochs == 1 else 'tries'}",
    ]
    if found.message:
        lines.append(f"error: {found.message}")
    if found.waiting_for:
        lines.append(f"waits for {found.waiting_for}")
    if found.choice_ids:
        lines.append(f"choice 0; the others: {', '.join(found.choice_ids)}")
    return [*lines, *_workers(found)]


def _workers(found: Explanation) -> list[str]:
    moved = found.ledger.transfer
    if not found.decode_worker:
        return []
    if not moved.path:
        via = f"{found.prefill_worker} -> " if found.prefill_worker else ""
        return [f"{via}{found.decode_worker}: no page has moved, {moved.hit_pages} were there"]
    return [
        f"{found.prefill_worker} -> {found.decode_worker} over {moved.path}: {moved.pages} pages, "
        f"{moved.bytes / 1e6:.1f} MB; {moved.hit_pages} were there, {moved.resent_pages} came twice"
    ]


def _figures(ledger: Ledger) -> list[str]:
    out = []
    if ledger.clocks:
        each = [f"{c.worker} {_offset(c.offset_s)} +- {_ms(c.uncertainty_s)}" for c in ledger.clocks]
        out.append("clocks, to the router's: " + ", ".join(each))
    if ledger.ttft_s is not None and ledger.residual_s is not None:
        known = ledger.ttft_s - ledger.residual_s
        text = f"first token after {_ms(ledger.ttft_s)}: phases {_ms(known)}, rest {_ms(ledger.residual_s)}"
        if ledger.handover_s is not None:
            text += f"; last chunk to first decode step {_ms(ledger.handover_s)}"
        out.append(text)
    if ledger.wire_hidden is not None:
        out.append(f"{ledger.wire_hidden:.0%} of the wire time is hidden behind compute")
    return out


def _timeline(ledger: Ledger) -> list[str]:
    if not ledger.spans:
        return []
    total = max((s.end_s for s in ledger.spans), default=0.0) or 1e-9
    rows = _rows(ledger.spans)
    head = f"{'phase':<18}{'begin ms':>10}{'ms':>10}  {'where':<24}|0{_ms(total):>{BAR - 1}}|"
    lines = ["", head, *(_row(spans, total) for spans in rows)]
    return [*lines, "# on the way to the first token   - beside it (ms: summed over its pages)"]


def _rows(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans by row: each chunk its own while they are few, else one row for each phase and place."""
    chunks = sum(s.phase is Phase.COMPUTE for s in spans)
    rows: dict[tuple[object, ...], list[Span]] = {}
    for number, span in enumerate(spans):
        alone = span.phase is Phase.COMPUTE and chunks <= MAX_CHUNK_ROWS
        name = (span.phase, span.on_path, span.begin_clock, span.end_clock, number if alone else -1)
        rows.setdefault(name, []).append(span)
    return list(rows.values())


def _row(spans: list[Span], total: float) -> str:
    first = spans[0]
    seconds = sum(s.end_s - s.begin_s if s.on_path or not s.count else s.sum_s for s in spans)
    count = sum(s.count for s in spans)
    name = first.phase + (f" x{len(spans)}" if len(spans) > 1 else "")
    where = first.end_clock or "router"
    if first.begin_clock != first.end_clock:
        where = f"{first.begin_clock or 'router'} > {where}"
    what = {Phase.COMPUTE: "tokens", Phase.PREFILL_QUEUE: ""}.get(first.phase, "pages")
    note = f" {count} {what}" if count and what else ""
    bar = [" "] * BAR
    for span in spans:
        _draw(bar, span, total)
    return f"{name:<18}{1e3 * first.begin_s:>10.1f}{1e3 * seconds:>10.1f}  {where:<24}|{''.join(bar)}|{note}"


def _draw(bar: list[str], span: Span, total: float) -> None:
    """At least one mark; what ends before it begins (clocks differ a little) is a mark, too."""
    begin = min(BAR - 1, max(0, int(BAR * span.begin_s / total)))
    end = min(BAR, max(begin + 1, round(BAR * span.end_s / total)))
    for at in range(begin, end):
        bar[at] = "#" if span.on_path else "-"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _offset(seconds: float) -> str:
    return f"{seconds:+.4f} s"
