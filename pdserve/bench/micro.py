"""The machine's peaks and single kernels: linear layers by rows and form, attention by context.

Sizes are SmolLM2-135M's, weights and pages random: no model is needed. All layers take turns, so that nothing
is warmer than in a model. What does not live here: whole steps (`engine`).

Legend: N outputs, K inputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from pdserve.bench.floors import Peaks, share
from pdserve.bench.machine import machine
from pdserve.bench.peaks import DEFAULT_SIZES, measure_peaks, num_peaks
from pdserve.bench.results import document
from pdserve.engine.threads import apply_thread_count
from pdserve.kernels.attention import paged_attention
from pdserve.kernels.attention_meta import AttentionMeta
from pdserve.kernels.kv_view import KVView
from pdserve.kernels.linear import PackedLinear
from pdserve.kernels.native import isa
from pdserve.kernels.quant_linear import QuantLinear, pack_int4, pack_int8

LAYERS, HIDDEN, INTER = 30, 576, 1536
HEADS, KV_HEADS, DIM, PAGE = 9, 3, 64, 16
LINEARS = {
    "qkv": ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
    "out": (HIDDEN, HIDDEN),
    "gate_up": (2 * INTER, HIDDEN),
    "down": (HIDDEN, INTER),
}
FORMS = {"exact": "bfloat16", "w8a8": "int8", "w4a8": "int8"}
"""Forms of weights, and the data type of their operations."""
PAGES = ("bfloat16", "int8")
"""Data types of pages, and of the operations over them."""
CHUNK = 512
BATCH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroWish:
    """rows: of linear layers. contexts, pages: of attention. seconds: for each case. threads: or None."""

    rows: Sequence[int]
    forms: Sequence[str]
    contexts: Sequence[int]
    pages: Sequence[str]
    seconds: float
    threads: int | None = None
    peak_sizes: Sequence[int] = DEFAULT_SIZES

    @property
    def total(self) -> int:
        """Measurements."""
        linears = len(self.forms) * len(LINEARS) * len(self.rows)
        return 2 * num_peaks(self.peak_sizes) + linears + 2 * len(self.contexts) * len(self.pages)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """call(layer) runs the operator once. kind: data type of operations; they and bytes are of a call."""

    name: str
    group: str
    form: str
    kind: str
    rows: int
    call: Callable[[int], object]
    operations: float
    size_bytes: float
    context: int = 0


def measure_micro(wish: MicroWish, done: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """The result document. done: called after each of `wish.total` measurements."""
    about = machine()
    apply_thread_count(wish.threads)
    peaks = measure_peaks(wish.peak_sizes, seconds=wish.seconds, done=done)
    timed = []
    for case in _cases(wish):
        timed.append((replace(case, call=_nothing), _best(case.call, wish.seconds)))
        done()
    peaks = peaks.best_with(measure_peaks(wish.peak_sizes, seconds=wish.seconds, done=done))
    rows = [_row(case, seconds, peaks) for case, seconds in timed]
    settings = {**asdict(wish), "isa": isa(), "layers": LAYERS}
    return document("micro", settings, rows, about, peaks=peaks)


def _cases(wish: MicroWish) -> Iterator[_Case]:
    for form in wish.forms:
        for name, (num_out, num_in) in LINEARS.items():
            layers = [pack(form, num_out, num_in) for _ in range(LAYERS)]
            for rows in wish.rows:
                yield _linear_case(name, form, layers, rows)
    for pages in wish.pages:
        for context in wish.contexts:
            yield _attention_case("chunk", pages, [min(context, CHUNK)], [context])
            yield _attention_case("decode", pages, [1] * BATCH, [context] * BATCH)


def pack(form: str, num_out: int, num_in: int) -> PackedLinear | QuantLinear:
    """A layer of random weights. form: of FORMS."""
    if form == "exact":
        return PackedLinear.pack(torch.randn(num_out, num_in), dtype=torch.bfloat16)
    scale_N = torch.full((num_out,), 0.01)
    if form == "w8a8":
        return pack_int8(torch.randint(-127, 128, (num_out, num_in), dtype=torch.int8), scale_N)
    groups = scale_N[:, None].expand(num_out, -(-num_in // 32)).contiguous()
    codes = torch.randint(0, 16, (num_out, num_in), dtype=torch.uint8)
    return pack_int4(codes, groups, -8 * groups, group_size=32)


def _linear_case(name: str, form: str, layers: Sequence[PackedLinear | QuantLinear], rows: int) -> _Case:
    first = layers[0]
    x = torch.randn(rows, first.num_in).to(torch.bfloat16)
    return _Case(
        name=name,
        group="linear",
        form=form,
        kind=FORMS[form],
        rows=rows,
        call=lambda layer: layers[layer](x),
        operations=2.0 * rows * first.num_out * first.num_in,
        size_bytes=first.weight.numel() * first.weight.element_size(),
    )


def _attention_case(name: str, dtype: str, queries: Sequence[int], contexts: Sequence[int]) -> _Case:
    """Operations count what is visible, bytes the pages' keys and values."""
    need = [-(-context // PAGE) for context in contexts]
    pages = torch.randperm(sum(need)).tolist()
    kv = _random_pages(sum(need), dtype)
    tables = [[pages.pop() for _ in range(count)] for count in need]
    meta = AttentionMeta.build(queries, contexts, tables, page_size=PAGE)
    q = torch.randn(sum(queries), HEADS, DIM).to(torch.bfloat16)
    seen = sum(n * (2 * context - n + 1) / 2 for n, context in zip(queries, contexts, strict=True))
    return _Case(
        name=name,
        group="attention",
        form=dtype,
        kind=dtype,
        rows=sum(queries),
        call=lambda layer: paged_attention(q, kv, layer, meta, scale=DIM**-0.5),
        operations=4.0 * seen * HEADS * DIM,
        size_bytes=2.0 * sum(contexts) * kv.part_elems * kv.storage.element_size() / PAGE,
        context=contexts[0],
    )


def _random_pages(num_pages: int, dtype: str) -> KVView:
    """A pool of pages with numbers of usual size in them. dtype: of PAGES."""
    scales = 4 * KV_HEADS * PAGE if dtype == "int8" else 0
    page = LAYERS * 2 * (KV_HEADS * DIM * PAGE + scales)
    values = torch.randint(0, 256, (num_pages * page,), dtype=torch.uint8)
    kv = KVView(
        storage=values if dtype == "int8" else torch.randn(num_pages * page).to(torch.bfloat16),
        page_stride=page, num_pages=num_pages, num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=DIM,
        page_size=PAGE, dtype=dtype,
    )  # fmt: skip
    if dtype == "int8":
        for layer in range(LAYERS):
            kv.k_scales(layer).fill_(0.01)
            kv.v_scales(layer).fill_(0.01)
    return kv


def _best(call: Callable[[int], object], seconds: float) -> float:
    """Least seconds of a call, in rounds of all layers; the first round does not count."""
    for layer in range(LAYERS):
        call(layer)
    best, end = float("inf"), time.monotonic() + seconds
    while best == float("inf") or time.monotonic() < end:
        begin = time.perf_counter()
        for layer in range(LAYERS):
            call(layer)
        best = min(best, (time.perf_counter() - begin) / LAYERS)
    return best


def _nothing(layer: int) -> None:
    """In place of a call that has been measured, so that its weights can go."""


def _row(case: _Case, seconds: float, peaks: Peaks) -> dict[str, Any]:
    """As in the file: ms of one layer."""
    moving = case.size_bytes / peaks.bytes_per_s(int(case.size_bytes * LAYERS))
    floor = max(moving, case.operations / peaks.operations(case.kind))
    return {
        "group": case.group,
        "name": case.name,
        "form": case.form,
        "rows": case.rows,
        "context": case.context,
        "ms": seconds * 1e3,
        "gops_per_s": case.operations / seconds / 1e9,
        "gbytes_per_s": case.size_bytes / seconds / 1e9,
        "floor_ms": floor * 1e3,
        "share": share(floor, seconds),
    }
