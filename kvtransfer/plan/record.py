"""A replica's layout as text, for the record that a worker registers with.

What lives here: the one form of it, and reading it from a peer, which may send anything. What does not: what
a layout is (`layout`), the record (`pdserve.types`).
"""

from __future__ import annotations

import itertools
import json
from typing import Any

from kvtransfer.plan.layout import LayerKind, ReplicaLayout
from pdserve.errors import Incompatible

VERSION = 1
MAX_TEXT = 65_536
MAX_PAGE_SIZE = 1024
MAX_LAYERS, MAX_HEADS, MAX_RANKS, MAX_SIZE = 4096, 1024, 1024, 65_536
MAX_HEADS_OF_ALL_RANKS = 16_384
_FIELDS = ("page_size", "head_dim", "num_kv_heads", "dtype", "inner")


def layout_text(layout: ReplicaLayout) -> str:
    """The layout as JSON; equal texts are equal layouts. Layers in runs: [how many, window, shares]."""
    kinds = ((len(list(run)), kind.window, kind.shares) for kind, run in itertools.groupby(layout.layers))
    ranks = [[[heads.start, heads.stop] for heads in rank] for rank in layout.ranks]
    fields: dict[str, Any] = {name: getattr(layout, name) for name in _FIELDS}
    return json.dumps({"v": VERSION, **fields, "layers": list(kinds), "ranks": ranks}, separators=(",", ":"))


def parse_layout(text: str) -> ReplicaLayout:
    """The layout that a peer described. Raises Incompatible for anything that is not one."""
    try:
        return _parsed(json.loads(text if len(text) <= MAX_TEXT else ""))
    except (ValueError, TypeError, KeyError, RecursionError):
        raise Incompatible("a peer's page layout can not be read; bring both to one release") from None


def _parsed(told: dict[str, Any]) -> ReplicaLayout:
    if told["v"] != VERSION or set(told) != {"v", "layers", "ranks", *_FIELDS}:
        raise ValueError
    layers: list[LayerKind] = []
    for count, window, shares in told["layers"]:
        kind = LayerKind(window=_whole(window), shares=None if shares is None else _whole(shares))
        layers += [kind] * _whole(count, MAX_LAYERS - len(layers))
    ranks = tuple(
        tuple(range(_whole(low), _whole(high, MAX_HEADS)) for low, high in rank) for rank in told["ranks"]
    )
    held = sum(len(heads) for rank in ranks for heads in rank)
    if len(ranks) > MAX_RANKS or held > MAX_HEADS_OF_ALL_RANKS:
        raise ValueError
    if not isinstance(told["dtype"], str) or not isinstance(told["inner"], str):
        raise ValueError
    return ReplicaLayout(
        page_size=_whole(told["page_size"], MAX_PAGE_SIZE),
        head_dim=_whole(told["head_dim"], MAX_SIZE),
        num_kv_heads=_whole(told["num_kv_heads"], MAX_HEADS),
        dtype=told["dtype"],
        inner=told["inner"],
        layers=tuple(layers),
        ranks=ranks,
    )


def _whole(value: object, most: int = 2**31) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError
    return value
