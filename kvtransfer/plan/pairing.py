"""Which workers may exchange pages, and by what way.

What lives here: equal layouts are copied as they are, others re-laid where they can be, and anything else is
refused in words. What does not: how layouts are bridged (`relayout`), choosing workers by load
(`router.policy`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Literal

from kvtransfer.plan.record import parse_layout
from kvtransfer.plan.relayout import bridge_problem
from pdserve.errors import Incompatible
from pdserve.types import CapabilityRecord

Mixing = Literal["strict", "relaxed"]
SAME_HOST_ONLY = frozenset({"shm"})
AS_THEY_ARE = frozenset({"nixl"})
"""Transports that do not bring pages of another layout: they read into registered memory, the pool."""


def pairing_problem(
    prefill: CapabilityRecord, decode: CapabilityRecord, mixing: Mixing, *, same_host: bool = True
) -> str | None:
    """Why pages of `prefill` are no good to `decode`, as a sentence for people; None if they fit.

    mixing: "strict" also asks for pages computed in the same way (numerics id); "relaxed" does not.
    same_host: whether transports of one machine can reach.
    """
    if not _protocols_overlap(prefill.protocol, decode.protocol):
        return (
            f"prefill speaks page protocol {_range(prefill.protocol)} and decode {_range(decode.protocol)}; "
            "bring both to one release."
        )
    problem = _difference(prefill, decode)
    if problem is not None:
        return problem
    if mixing == "strict" and prefill.numerics != decode.numerics:
        return (
            f"prefill computes pages as {prefill.numerics} and decode as {decode.numerics}; "
            "give both the same dtype, kernels and ranks (any number with --deterministic), "
            "or allow --kv-mixing relaxed."
        )
    if not set(prefill.codecs) & set(decode.codecs):
        return (
            f"prefill sends pages as {_names(prefill.codecs)} and decode reads {_names(decode.codecs)}; "
            "bring both to one release."
        )
    if common_transport(prefill, decode, same_host=same_host) is None:
        if needs_bridge(prefill, decode) and "nixl" in set(prefill.transports) & set(decode.transports):
            return "pages of different layouts move by shm or tcp only; enable one of them on both."
        apart = "" if same_host else " between two machines"
        return (
            f"prefill offers transports {_names(prefill.transports)} and decode {_names(decode.transports)}; "
            f"enable one on both that works{apart}."
        )
    return None


def common_transport(prefill: CapabilityRecord, decode: CapabilityRecord, *, same_host: bool) -> str | None:
    """The first transport in decode's order of preference that both have and that can reach, or None."""
    bridge = needs_bridge(prefill, decode)
    for name in decode.transports:
        if bridge and name in AS_THEY_ARE:
            continue
        if name in prefill.transports and (same_host or name not in SAME_HOST_ONLY):
            return name
    return None


def _difference(prefill: CapabilityRecord, decode: CapabilityRecord) -> str | None:
    checks = (
        ("loaded model", prefill.model[:12], decode.model[:12], prefill.model == decode.model),
        ("tokenizer", prefill.tokenizer[:12], decode.tokenizer[:12], prefill.tokenizer == decode.tokenizer),
        ("KV dtype", prefill.dtype, decode.dtype, prefill.dtype == decode.dtype),
    )
    return _first(checks) or _layout_problem(prefill, decode)


def _first(checks: Iterable[tuple[str, object, object, bool]]) -> str | None:
    for what, ours, theirs, same in checks:
        if not same:
            return f"the {what} differs: {ours} at prefill, {theirs} at decode."
    return None


def _layout_problem(prefill: CapabilityRecord, decode: CapabilityRecord) -> str | None:
    """Why pages can not be taken as they are nor re-laid."""
    checks = (
        ("page size in tokens", prefill.page_size, decode.page_size, prefill.page_size == decode.page_size),
        ("page layout", prefill.layout[:12], decode.layout[:12], prefill.layout == decode.layout),
        (
            "page size in bytes",
            prefill.page_bytes,
            decode.page_bytes,
            prefill.page_bytes == decode.page_bytes,
        ),
    )
    if not needs_bridge(prefill, decode):
        return _first(checks)
    if not prefill.pages or not decode.pages:
        return _first(checks) or "one of the two page layouts can not be described; use equal layouts."
    try:
        return bridge_problem(_read(prefill.pages), _read(decode.pages))
    except Incompatible as refused:
        return refused.message


def needs_bridge(prefill: CapabilityRecord, decode: CapabilityRecord) -> bool:
    """Whether pages of these two are cut differently."""
    if prefill.pages and decode.pages:
        return prefill.pages != decode.pages
    return (prefill.layout, prefill.page_size) != (decode.layout, decode.page_size)


_read = functools.lru_cache(maxsize=64)(parse_layout)


def _protocols_overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return max(one[0], other[0]) <= min(one[1], other[1])


def _range(protocol: tuple[int, int]) -> str:
    return str(protocol[0]) if protocol[0] == protocol[1] else f"{protocol[0]} to {protocol[1]}"


def _names(transports: tuple[str, ...]) -> str:
    return ", ".join(transports) or "none"
