"""What a planted defect is: patches of production modules for the time of a run, the bias under which it
matters, and who must catch it.

The product has no switch: a defect replaces attributes of production classes and modules here, in tests,
and puts them back. Defence in depth hides single defects, so some come with the layer off that would mask
them: either as one more patch (`layers`), or as `Bias.mask` where the layer is in the simulated data plane.
The suite also runs each bias and its layers WITHOUT the defect: what is caught is the defect, not the bias.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from tests.simulation.bias import Bias
from tests.simulation.runner import Breach, run_seed

UNBIASED = Bias()
Make = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """owner.name (owner[name], where owner is a table) becomes make(what it was)."""

    owner: Any
    name: Any
    make: Make


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """One planted defect. rules: what may catch it, by name (S1 … L3, or a counter with a bound). layers:
    patches that disable what would mask it; they alone must break nothing."""

    name: str
    patches: tuple[Patch, ...]
    rules: frozenset[str]
    bias: Bias = UNBIASED
    layers: tuple[Patch, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Catch:
    """seed: the first that caught it; None if none did."""

    defect: str
    seed: int | None
    rule: str = ""
    detail: str = ""


@contextmanager
def patched(patches: tuple[Patch, ...]) -> Iterator[None]:
    """While it lasts, the production modules are as the patches want them."""
    with ExitStack() as undo:
        for patch in patches:
            place = patch.owner if isinstance(patch.owner, dict) else patch.owner.__dict__
            original = place[patch.name]
            _put(patch, patch.make(original))
            undo.callback(_put, patch, original)
        yield


def _put(patch: Patch, value: Any) -> None:
    if isinstance(patch.owner, dict):
        patch.owner[patch.name] = value
    else:
        setattr(patch.owner, patch.name, value)


def hunt(defect: Defect, seeds: range) -> Catch:
    """Runs seeds with the defect planted until one is caught."""
    with patched((*defect.layers, *defect.patches)):
        for seed in seeds:
            try:
                run_seed(seed, bias=defect.bias)
            except Breach as breach:
                return Catch(defect=defect.name, seed=seed, rule=breach.rule, detail=breach.detail)
    return Catch(defect=defect.name, seed=None)


def control(defect: Defect, seeds: range) -> Catch:
    """The same runs without the defect: nothing may be caught."""
    with patched(defect.layers):
        for seed in seeds:
            try:
                run_seed(seed, bias=defect.bias)
            except Breach as breach:
                return Catch(defect=defect.name, seed=seed, rule=breach.rule, detail=breach.detail)
    return Catch(defect=defect.name, seed=None)
