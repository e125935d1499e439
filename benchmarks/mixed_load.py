"""Arithmetic of the mixed load: arrivals, what a run gave, where goodput ends, where two systems cross."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.cases import FIRST_ID, LAST_ID
from benchmarks.report import percentile

CHAT, LONG = "chat", "long"
PROMPT_TOKENS = {CHAT: 256, LONG: 4000}
OUTPUT_TOKENS = 64
CHATS_PER_LONG = 10
FIRST_LONG = 4
"""Arrivals before the first long prompt, so that a short run has one and no run begins with it."""
TTFT_LIMIT_S = {CHAT: 2.0, LONG: 10.0}
ITL_LIMIT_S = 0.1
SHARE = 0.9
"""A rate counts for goodput while this share of its requests meets the limits."""
SUSTAINED = 0.9
SETTLE_S = 3.0
"""A rate is sustained if SUSTAINED of all output tokens are there this long after the last arrival."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request to be sent `at_s` seconds after the start. kind: CHAT or LONG."""

    at_s: float
    kind: str


def schedule(rate: float, seconds: float, seed: int) -> list[Arrival]:
    """rate * seconds arrivals, every (CHATS_PER_LONG + 1)th of them long: a Poisson process that is known to
    have so many, so that a rate is what it says. At least one; in order of time."""
    source = random.Random(seed)
    count = max(1, round(rate * seconds))
    passed = list(itertools.accumulate(source.expovariate(1.0) for _ in range(count + 1)))
    kinds = [LONG if n % (CHATS_PER_LONG + 1) == FIRST_LONG else CHAT for n in range(count)]
    return [
        Arrival(at_s=at * seconds / passed[-1], kind=kind)
        for at, kind in zip(passed[:-1], kinds, strict=True)
    ]


def prompts(arrivals: Sequence[Arrival], seed: int) -> list[list[int]]:
    """Unique random prompts, one per arrival."""
    source = random.Random(seed)
    return [[source.randrange(FIRST_ID, LAST_ID) for _ in range(PROMPT_TOKENS[a.kind])] for a in arrivals]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What came of one request. ttft_s: None if no token came. itl_s: gaps between its tokens."""

    kind: str
    ttft_s: float | None
    itl_s: tuple[float, ...]
    complete: bool

    @property
    def met(self) -> bool:
        """All tokens, the first in time, and 99 % of its gaps within the limit (nearest rank: of 63, all)."""
        worst = percentile(self.itl_s, 99) or 0.0
        early = self.ttft_s is not None and self.ttft_s <= TTFT_LIMIT_S[self.kind]
        return self.complete and early and worst <= ITL_LIMIT_S


def seen(arrival: Arrival, times: Sequence[float]) -> Seen:
    """times: of its tokens, in seconds from the start of the run. Waiting to be sent counts as waiting."""
    return Seen(
        kind=arrival.kind,
        ttft_s=times[0] - arrival.at_s if times else None,
        itl_s=tuple(b - a for a, b in itertools.pairwise(times)),
        complete=len(times) == OUTPUT_TOKENS,
    )


def summary(arrivals: Sequence[Arrival], times: Sequence[Sequence[float]]) -> dict[str, Any]:
    """One run. Latencies are of the requests that have them; `unfinished` says how many lack tokens.

    output_tokens_per_s: of those that came until SETTLE_S after the last arrival, over that time.
    goodput_per_s: requests that met the limits, over the time of arrivals.
    """
    found = [seen(a, t) for a, t in zip(arrivals, times, strict=True)]
    window = max(arrivals[-1].at_s, 1e-9)
    until = window + SETTLE_S
    tokens = sum(at <= until for request in times for at in request)
    met = sum(one.met for one in found)
    return {
        "requests": len(found),
        "long": sum(one.kind == LONG for one in found),
        "unfinished": sum(not one.complete for one in found),
        "output_tokens_per_s": round(tokens / until, 1),
        "sustained": tokens >= SUSTAINED * OUTPUT_TOKENS * len(found),
        "met": met,
        "share": round(met / len(found), 4),
        "goodput_per_s": round(met / window, 3),
        "missed": missed(found),
        **_latencies(found),
    }


def missed(found: Sequence[Seen]) -> dict[str, int]:
    """How many requests broke which limit; one may break several."""
    late = [f for f in found if f.ttft_s is None or f.ttft_s > TTFT_LIMIT_S[f.kind]]
    return {
        "ttft_short": sum(f.kind == CHAT for f in late),
        "ttft_long": sum(f.kind == LONG for f in late),
        "itl": sum((percentile(f.itl_s, 99) or 0.0) > ITL_LIMIT_S for f in found),
    }


def _latencies(found: Sequence[Seen]) -> dict[str, float | None]:
    out: dict[str, float | None] = {}
    for kind in (CHAT, LONG):
        firsts = [f.ttft_s for f in found if f.kind == kind and f.ttft_s is not None]
        for percent in (50, 99):
            out[f"ttft_{kind}_p{percent}_ms"] = _ms(percentile(firsts, percent))
    gaps = [gap for f in found if f.kind == CHAT for gap in f.itl_s]
    for percent in (50, 99):
        out[f"itl_chat_p{percent}_ms"] = _ms(percentile(gaps, percent))
    return out


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)


Curve = Mapping[float, Mapping[str, Any]]
"""Per rate (requests a second), the summary of one system's run."""


def good_rate(curve: Curve) -> float:
    """The highest rate at which SHARE of the requests met the limits; 0 if there is none."""
    return max((rate for rate, run in curve.items() if run["share"] >= SHARE), default=0.0)


def next_rate(curve: Curve, ladder: Sequence[float], halvings: int) -> float | None:
    """Where to measure a system next: up the ladder to the rung after its first miss, then between the
    highest rate that was good and the next one that was not, `halvings` times; not below half of the first
    rung, where a run would take minutes. None: it is done."""
    climb = [rate for rate in ladder if rate not in curve]
    misses = [rate for rate, run in curve.items() if run["share"] < SHARE]
    rungs_missed = [rate for rate in misses if rate in ladder]
    if climb and len(rungs_missed) < 2 and not any(curve[r]["unfinished"] for r in rungs_missed):
        return climb[0]
    between = len([rate for rate in curve if rate not in ladder])
    good = good_rate(curve)
    above = [rate for rate in misses if rate > good]
    if between >= halvings or not above:
        return None
    rate = round((good + min(above)) / 2, 3)
    return rate if rate >= ladder[0] / 2 else None


def equal_load(curves: Mapping[str, Curve], ours: str, peers: Sequence[str]) -> dict[str, Any] | None:
    """Chats' p99 ITL of ours over the best peer's, at every rate that both sustain; headline: the highest.

    None if there is no such rate.
    """
    rows = []
    for rate, run in sorted(curves.get(ours, {}).items()):
        rivals = {p: curves[p][rate] for p in peers if rate in curves.get(p, {})}
        able = {p: other["itl_chat_p99_ms"] for p, other in rivals.items() if other["sustained"]}
        able = {p: value for p, value in able.items() if value}
        if not able or not run["sustained"] or not run["itl_chat_p99_ms"]:
            continue
        best = min(able, key=lambda peer: able[peer])
        mine = run["itl_chat_p99_ms"]
        row = {"rate": rate, "ours_ms": mine, "peer": best, "peer_ms": able[best]}
        rows.append({**row, "ratio": round(mine / able[best], 3)})
    return {**rows[-1], "all": rows} if rows else None


def goodput(curves: Mapping[str, Curve], ours: str, peers: Sequence[str]) -> dict[str, Any]:
    """Highest good rates and the ratio to the best peer's. If no peer has any, ratio is None, and ratio_above
    is that to the lowest rate at which a peer was measured: it is more than that."""
    rates = {name: good_rate(curve) for name, curve in curves.items()}
    rivals = {name: rates[name] for name in peers if name in rates}
    best = max(rivals, key=lambda name: rivals[name], default=None)
    mine = rates.get(ours, 0.0)
    tried = [rate for name in rivals for rate in curves[name]]
    ratio = round(mine / rivals[best], 3) if best and rivals[best] else None
    above = round(mine / min(tried), 3) if ratio is None and tried else None
    return {"rates": rates, "peer": best, "ratio": ratio, "ratio_above": above}


def crossovers(a: Curve, b: Curve, field: str) -> list[float]:
    """Rates at which the lead in `field` changes between two systems, by straight lines between the rates
    that both have."""
    both = sorted(
        rate for rate in a if rate in b if a[rate][field] is not None and b[rate][field] is not None
    )
    gaps = [(rate, a[rate][field] - b[rate][field]) for rate in both]
    gaps = [(rate, gap) for rate, gap in gaps if gap]
    return [
        round(left + (right - left) * g / (g - h), 2)
        for (left, g), (right, h) in itertools.pairwise(gaps)
        if (g < 0) != (h < 0)
    ]


def settings() -> dict[str, Any]:
    """What a run asks for, for the result file."""
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "chats_per_long": CHATS_PER_LONG,
        "arrivals": "Poisson given their number, seeded, the same for all systems",
        "ttft_limit_s": TTFT_LIMIT_S,
        "itl_limit_s": ITL_LIMIT_S,
        "share": SHARE,
    }
