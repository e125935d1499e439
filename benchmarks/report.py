"""Arithmetic of the benchmark: from token times to values, pairs, ratios and percentiles. Pure functions."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.cases import DECODE, PREFILL, Case
from pdserve.bench.percentiles import percentile

TokenTimes = Sequence[Sequence[float]]
"""Per request, the seconds from the start of the run at which each output token arrived."""


def value_of(case: Case, batches: Sequence[TokenTimes]) -> float:
    """The metric of one run: the median over its repeats. Raises ValueError if tokens are missing."""
    return statistics.median(_one(case, batch) for batch in batches)


def _one(case: Case, batch: TokenTimes) -> float:
    if len(batch) != case.concurrency or any(len(times) != case.output_tokens for times in batch):
        raise ValueError(f"{case.name}: a run did not give every token it was asked for")
    if case.metric == PREFILL:
        return case.prompt_tokens / batch[0][0]
    if case.metric == DECODE:
        return (case.output_tokens - 1) / (batch[0][-1] - batch[0][0])
    return case.concurrency * case.output_tokens / max(times[-1] for times in batch)


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Median of ours/theirs over pairs measured next to each other; None without a pair."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return statistics.median(ratios) if ratios else None


def latency(batches: Sequence[TokenTimes]) -> dict[str, float | None]:
    """TTFT and ITL percentiles in ms. Tokens that arrive in one message have an ITL of 0 between them."""
    firsts = [times[0] for batch in batches for times in batch]
    gaps = [b - a for batch in batches for times in batch for a, b in itertools.pairwise(times)]
    out: dict[str, float | None] = {}
    for name, values in (("ttft", firsts), ("itl", gaps)):
        for percent in (50, 90, 99):
            found = percentile(values, percent)
            out[f"{name}_p{percent}_ms"] = None if found is None else round(found * 1000, 3)
    return out


NO_CHANCE = 0.8


def too_slow(warm_up: Mapping[str, float], family: Mapping[str, str]) -> set[str]:
    """Variants whose warm-up was so far behind their engine's best one that measuring them tells nothing."""
    best = {e: max(warm_up[name] for name in family if family[name] == e) for e in set(family.values())}
    return {name for name, engine in family.items() if warm_up[name] < NO_CHANCE * best[engine]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One case's result. values: per system, one value per pair. family: of each peer system, its engine."""

    case: Case
    ours: Sequence[float]
    ours_aggregated: Sequence[float]
    values: Mapping[str, Sequence[float]]
    family: Mapping[str, str]

    def best_variants(self) -> dict[str, str]:
        """Per engine, the system (its fastest variant on this line) that stands for it."""
        best: dict[str, str] = {}
        for system, values in self.values.items():
            engine = self.family[system]
            if values and (
                engine not in best or statistics.median(values) > statistics.median(self.values[best[engine]])
            ):
                best[engine] = system
        return best

    def ratios(self, ours: Sequence[float]) -> dict[str, float]:
        """Median paired ratio of ours to each engine's best variant. Engines without values are left out."""
        found = {e: paired_ratio(ours, self.values[s]) for e, s in self.best_variants().items() if ours}
        return {engine: round(ratio, 3) for engine, ratio in found.items() if ratio is not None}

    def as_json(self, engines: Sequence[str]) -> dict[str, object]:
        """The line of `results/latest.json`; an engine without values is there as null."""
        best = self.best_variants()
        disaggregated, aggregated = self.ratios(self.ours), self.ratios(self.ours_aggregated)
        own = paired_ratio(self.ours, self.ours_aggregated) if self.ours and self.ours_aggregated else None
        return {
            "case": self.case.name,
            "unit": self.case.unit,
            "ours": middle(self.ours),
            "ours_aggregated": middle(self.ours_aggregated),
            "peers": {e: middle(self.values[best[e]]) if e in best else None for e in engines},
            "ratio_to_best": min(disaggregated.values(), default=None),
            "ratio_to_best_aggregated": min(aggregated.values(), default=None),
            "ratio_to_own_aggregated": None if own is None else round(own, 3),
            "ratios": disaggregated,
            "ratios_aggregated": aggregated,
            "peer_variant": best,
            "all_variants": {system: middle(values) for system, values in self.values.items() if values},
            "pairs": len(self.ours),
            "samples": {
                "ours": rounded(self.ours),
                "ours_aggregated": rounded(self.ours_aggregated),
                **{system: rounded(values) for system, values in self.values.items()},
            },
        }


def middle(values: Sequence[float]) -> float | None:
    """Median to one decimal; None without values."""
    return round(statistics.median(values), 1) if values else None


def rounded(values: Sequence[float]) -> list[float]:
    """To one decimal."""
    return [round(value, 1) for value in values]
