"""The simulated network: reliable ordered streams (router and workers) and messages between workers that
may be dropped, doubled, overtaken or late. Partitions stop either, one way or both.

Crueller than the product's real links, on purpose: those are one gRPC stream per pair, which keeps order.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable

from tests.simulation.bias import LEASE_S, RATES
from tests.simulation.world import World

Deliver = Callable[[], None]
Link = tuple[str, str]


class Network:
    """All links, by (source, target)."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._blocked: Counter[Link] = Counter()
        self._last: dict[Link, float] = defaultdict(float)
        self._queues: dict[Link, deque[Deliver]] = defaultdict(deque)
        self._held: Counter[Link] = Counter()
        self.disturbed: dict[Link, float] = defaultdict(lambda: float("-inf"))
        self.rates = self._draw_rates()

    def _draw_rates(self) -> dict[str, float]:
        rng, bias = self._world.rng, self._world.bias
        drawn = {name: rng.choice((0.0, 0.0, 0.02, 0.08)) for name in RATES}
        return ({} if bias.only else drawn) | dict(bias.rates)

    # -- partitions -----------------------------------------------------------------------------------------

    def block(self, source: str, target: str) -> None:
        """Nothing passes from source to target until as many `unblock`."""
        self._blocked[source, target] += 1
        self.disturb(source, target)

    def unblock(self, source: str, target: str) -> None:
        """What streams held back goes on, in order."""
        link = (source, target)
        self._blocked[link] -= 1
        self.disturb(*link)
        while not self._blocked[link] and self._held[link]:
            self._held[link] -= 1
            self._world.after(self._world.rng.uniform(0.0001, 0.01), lambda: self._arrive(link))

    def cut(self, one: str, other: str) -> bool:
        """Whether something between the two does not pass, either way."""
        return self._blocked[one, other] > 0 or self._blocked[other, one] > 0

    def disturb(self, source: str, target: str) -> None:
        """Something struck this link just now."""
        self.disturbed[source, target] = self._world.now

    def last_disturbed(self, one: str, other: str) -> float:
        """When something last struck the links between the two."""
        now = self._world.now
        return now if self.cut(one, other) else max(self.disturbed[one, other], self.disturbed[other, one])

    # -- sending --------------------------------------------------------------------------------------------

    def stream(self, source: str, target: str, deliver: Deliver) -> None:
        """In order, exactly once; held back while the link is cut."""
        self._ordered((source, target), deliver)

    def message(self, source: str, target: str, deliver: Deliver, what: object) -> None:
        """Once and in order if nothing strikes."""
        rng, link = self._world.rng, (source, target)
        if self._blocked[link]:
            if rng.random() < 0.5:
                self._ordered(link, deliver)
            return
        if self._strikes("drop", link, what):
            return
        if self._strikes("duplicate", link, what):
            self._world.after(rng.uniform(0.0, LEASE_S), deliver)
        if self._strikes("delay", link, what):
            self._world.after(rng.uniform(0.1, 1.5 * LEASE_S), deliver)
        elif self._strikes("reorder", link, what):
            self._world.after(rng.uniform(0.01, 0.2), deliver)
        else:
            self._ordered(link, deliver)

    def _strikes(self, kind: str, link: Link, what: object) -> bool:
        rate = self.rates.get(kind, 0.0)
        if not rate or self._world.calm or self._world.rng.random() >= rate:
            return False
        self._world.faults[kind] += 1
        self._world.note(link[0], f"*** fault: {kind} of what goes to {link[1]}:", what)
        self.disturb(*link)
        return True

    def _ordered(self, link: Link, deliver: Deliver) -> None:
        world = self._world
        at = max(world.now + world.rng.uniform(0.0001, 0.01), self._last[link])
        self._last[link] = at
        self._queues[link].append(deliver)
        world.after(at - world.now, lambda: self._arrive(link))

    def _arrive(self, link: Link) -> None:
        """Something is through: what was sent first."""
        if self._blocked[link]:
            self._held[link] += 1
        else:
            self._queues[link].popleft()()
