"""Virtual time: the event heap, clocks that differ, the trace, and what a run counts.

What lives here: the order in which things happen, and what is remembered of them. What does not: what happens
(`worker`, `router`, `faults`) and what is right (`invariants`).
"""

from __future__ import annotations

import heapq
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tests.simulation.bias import Bias
from tests.simulation.model import Texts
from tests.simulation.trace import Trace

_REQUEST = re.compile(r"\b(r\d+(x\d+)*|probe\d)\b")
TINY_S = 1e-7
MANY = 20_000


class Breach(AssertionError):
    """An invariant did not hold. rule: S1 … L3, or the counter's name. trace: what led there, readable."""

    def __init__(self, rule: str, detail: str, trace: str = "") -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule, self.detail, self.trace = rule, detail, trace


@dataclass(frozen=True, slots=True)
class ProcessClock:
    """One machine's monotonic clock: it starts anywhere and runs at a rate of its own."""

    offset: float = 0.0
    rate: float = 1.0

    def local(self, true: float) -> float:
        return self.offset + self.rate * true

    def true(self, local: float) -> float:
        return (local - self.offset) / self.rate


class World:
    """One run's time, chance and memory. Single-threaded; the seed decides everything."""

    def __init__(self, seed: int, bias: Bias) -> None:
        self.seed, self.bias = seed, bias
        self.rng = random.Random(f"pdserve {seed}")
        self.now = 0.0
        self.pace = self.rng.choice((1.0, 3.0, 8.0))  # slow machines: more is under way when a fault strikes
        self.pace = self.pace if bias.pace is None else bias.pace
        self.texts = Texts()
        self.tight = self.rng.random() < 0.5  # long prompts wait for each other's pages
        self.trace = Trace()
        self.bursts = [0.0]
        self.arrows: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.counters: Counter[str] = Counter()
        self.num_events = 0
        self.calm = False
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def masked(self, layer: str) -> bool:
        return layer in self.bias.mask

    def after(self, delay: float, what: Callable[[], None]) -> None:
        """Runs `what` after a delay, seconds."""
        self._count += 1
        heapq.heappush(self._heap, (self.now + (delay if delay > 0.0 else 0.0), self._count, what))

    def note(self, who: str, what: str, *about: object) -> None:
        """Adds a line to the trace that a failing seed prints; formatted only when it is printed."""
        self.trace.add(self.now, who, what, about)

    def fault(self, kind: str, who: str, detail: str = "") -> None:
        """A fault strikes."""
        self.faults[kind] += 1
        self.trace.add(self.now, who, f"*** fault: {kind} {detail}", ())

    def breach(self, rule: str, detail: str) -> Breach:
        """The exception to raise when a rule is broken now."""
        self.note("judge", f"!!! {rule}: {detail}")
        named = _REQUEST.search(detail)
        trace = self.trace.text(about=named.group() if named else "")
        return Breach(rule, f"seed {self.seed} at {self.now:.4f} s: {detail}", trace)

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Runs events until the condition holds. False when nothing is left or virtual time is up."""
        heap, still = self._heap, 0
        while not until():
            if not heap or heap[0][0] > limit_s:
                return False
            before = self.now
            self.now, _, what = heapq.heappop(heap)
            still = still + 1 if self.now - before < TINY_S else 0
            if still > MANY:
                raise self.breach("L1", "time stands still: something happens again and again")
            what()
        return True
