"""Which rank holds which expert, for one layer: packing and its improvement. Pure and deterministic.

What lives here: a draft of one layer's placement that is changed in place, filling it (largest first on the
least loaded rank), levelling shares of replicated experts, and local search by swaps, moves and replicas.
What does not: bounds (`placement_bound`), what the result is called (`placement_table`), nodes and layers
(`placement`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from pdserve.parallel.placement_bound import copies_by_load

SWEEPS, TRIAL_SWEEPS = 30, 6
"""Levelling ends after so many rounds over the replicated experts; it usually settles in a few. A trial of
the local search looks at what fewer rounds reach: the rest can only be better.
"""
SETTLED = 1e-4
"""Loads that differ by less than this part of the mean count as equal."""
SWAPS, REPLICAS = 500, 8
"""Steps of the local search in one layer at most, and those among them that change replicas."""
HOT, SPARES = 2, 16
"""Experts of the fullest rank, and slots elsewhere, that such a step tries with each other."""


class Draft:
    """A placement in the making. Ranks and experts are indices.

    loads: by expert. slots: of every rank. even: an expert's copies share its load equally; else as levels
    best. amount: by rank, the load each expert it holds brings there. hosts: by expert, the ranks that hold
    it. total: by rank.
    """

    def __init__(self, loads: Sequence[float], num_ranks: int, slots: int, *, even: bool = False) -> None:
        self.loads, self.num_ranks, self.slots, self.even = loads, num_ranks, slots, even
        self.amount: list[dict[int, float]] = [{} for _ in range(num_ranks)]
        self.hosts: list[list[int]] = [[] for _ in loads]
        self.total = [0.0] * num_ranks
        self.small = SETTLED * sum(loads) / num_ranks

    def copy(self) -> Draft:
        """A draft of its own with the same contents."""
        other = Draft(self.loads, self.num_ranks, self.slots, even=self.even)
        other.amount = [dict(held) for held in self.amount]
        other.hosts = [list(hosts) for hosts in self.hosts]
        other.total = list(self.total)
        return other

    @property
    def largest(self) -> float:
        """The largest rank load."""
        return max(self.total)

    def room(self, rank: int) -> bool:
        """A slot of the rank is free."""
        return len(self.amount[rank]) < self.slots

    def add(self, expert: int, rank: int, amount: float = 0.0) -> None:
        """A copy more, which serves `amount`; the others' shares stay as they are."""
        self.hosts[expert].append(rank)
        self.amount[rank][expert] = amount
        self.total[rank] += amount

    def drop(self, expert: int, rank: int) -> float:
        """A copy less. Returns what it served, which nobody serves now."""
        self.hosts[expert].remove(rank)
        amount = self.amount[rank].pop(expert)
        self.total[rank] -= amount
        return amount

    def level(self, expert: int) -> float:
        """Shares the expert's load over its copies so that its fullest rank is least full (water level).

        Returns the largest change of a rank's load.
        """
        hosts, load = self.hosts[expert], self.loads[expert]
        without = [self.total[rank] - self.amount[rank][expert] for rank in hosts]
        if self.even or len(hosts) == 1:
            water = [load / len(hosts)] * len(hosts)
        elif len(hosts) == 2:
            first = min(load, max(0.0, (load + without[1] - without[0]) / 2))
            water = [first, load - first]
        else:
            level = _water_level(sorted(without), load)
            water = [max(0.0, level - base) for base in without]
        change = 0.0
        for rank, base, new in zip(hosts, without, water, strict=True):
            held = self.amount[rank]
            change = max(change, abs(new - held[expert]))
            held[expert] = new
            self.total[rank] = base + new
        return change

    def level_all(self, sweeps: int = SWEEPS) -> None:
        """Levels expert by expert until nothing moves. Each step lessens the sum of the squares of the loads,
        and the least sum of squares over shares has the least largest load too (lexicographically optimal
        bases of polymatroids, Fujishige 1980).
        """
        experts = [e for e, hosts in enumerate(self.hosts) if len(hosts) > 1]
        for _ in range(sweeps):
            if max((self.level(expert) for expert in experts), default=0.0) <= self.small:
                break


def _water_level(rising: Sequence[float], load: float) -> float:
    """How high the load stands over ranks with these loads, if all that get something end at one level."""
    below, level = 0.0, 0.0
    for count, base in enumerate(rising, 1):
        below += base
        level = (load + below) / count
        if count == len(rising) or level <= rising[count]:
            break
    return level


def settle(draft: Draft) -> None:
    """Homes for the experts that have none, hottest first, on the least loaded ranks; then levels."""
    homeless = sorted(
        (e for e, hosts in enumerate(draft.hosts) if not hosts), key=lambda e: (-draft.loads[e], e)
    )
    for expert in homeless:
        rank = _least(draft, expert)
        if rank is None:
            rank = _make_room(draft)
        draft.add(expert, rank, draft.loads[expert])
    draft.level_all()


def fill(draft: Draft, *, hottest: bool = False) -> None:
    """An empty draft filled: copies by load, largest part first on the least loaded rank.

    hottest: the hottest expert gets a copy on every rank before the next gets a second one: it levels the
    others.
    """
    extra = draft.num_ranks * draft.slots - len(draft.loads)
    counts = _hottest_first(draft, extra) if hottest else copies_by_load(draft.loads, draft.num_ranks, extra)
    parts = [(draft.loads[e] / count, e) for e, count in enumerate(counts) for _ in range(count)]
    for part, expert in sorted(parts, key=lambda item: (-item[0], item[1])):
        rank = _least(draft, expert)
        if rank is not None:  # else all with room hold it; its first copy always finds room
            draft.add(expert, rank, part)
    for expert in range(len(draft.loads)):
        draft.level(expert)
    use_free_slots(draft)


def _hottest_first(draft: Draft, extra: int) -> list[int]:
    counts = [1] * len(draft.loads)
    for expert in sorted(range(len(draft.loads)), key=lambda e: (-draft.loads[e], e)):
        more = min(extra, draft.num_ranks - 1)
        counts[expert] += more
        extra -= more
    return counts


def _least(draft: Draft, expert: int) -> int | None:
    """The least loaded rank with room that does not hold the expert."""
    ranks = (r for r in range(draft.num_ranks) if draft.room(r) and expert not in draft.amount[r])
    return min(ranks, key=lambda rank: draft.total[rank], default=None)


def _make_room(draft: Draft) -> int:
    """Drops the replica that serves least, and says where it was. Each expert has a slot to find."""
    spare = min(_replicas(draft))
    draft.drop(spare[2], spare[1])
    draft.level(spare[2])
    return spare[1]


def _replicas(draft: Draft) -> list[tuple[float, int, int]]:
    """(what it serves, rank, expert) of every copy whose expert has another."""
    return [
        (amount, rank, expert)
        for rank, held in enumerate(draft.amount)
        for expert, amount in held.items()
        if len(draft.hosts[expert]) > 1
    ]


def use_free_slots(draft: Draft) -> None:
    """A replica of the expert with the largest load per copy, in every slot that is still free."""
    for rank in sorted(range(draft.num_ranks), key=lambda r: draft.total[r]):
        while draft.room(rank):
            absent = (e for e in range(len(draft.loads)) if e not in draft.amount[rank])
            expert = max(absent, key=lambda e: draft.loads[e] / len(draft.hosts[e]), default=None)
            if expert is None:
                break
            draft.add(expert, rank)
    draft.level_all()


def supply(draft: Draft, goal: float) -> None:
    """Copies for experts whose load over their copies is above the goal: they are needed for it."""
    for expert in sorted(range(len(draft.loads)), key=lambda e: (-draft.loads[e], e)):
        while draft.loads[expert] > goal * len(draft.hosts[expert]):
            places = (
                (old, rank)
                for old, rank in _spare(draft)
                if expert not in draft.amount[rank]
                and (old < 0 or draft.loads[old] <= goal * (len(draft.hosts[old]) - 1))
            )
            old, rank = next(places, (-1, -1))
            if rank < 0:
                break
            _replace(draft, old, rank, expert)
    draft.level_all()


def improve(draft: Draft, goal: float, *, replicas: int = REPLICAS, sparing: bool = False) -> None:
    """Local search: until the largest load is at most `goal` or nothing helps, with bounded work.

    replicas: steps that may change replicas at most. sparing: those first, as they bring one copy where a
    swap brings two; else last, as they take more time to find.

    A step is one swap or move of copies between the fullest rank and another, or, where none of those helps,
    one replica more for an expert of the fullest rank, in a free slot or in that of a replica less needed.
    """
    for _ in range(SWAPS):
        if draft.largest <= goal:
            return
        if not sparing and swap_step(draft):
            continue
        if replicas and replica_step(draft):
            replicas -= 1
        elif not (sparing and swap_step(draft)):
            return


def swap_step(draft: Draft) -> bool:
    """The best exchange between the fullest rank and any other; False: none lessens the fuller of the two."""
    full = max(range(draft.num_ranks), key=lambda rank: draft.total[rank])
    best: tuple[float, int, int, int] | None = None
    for rank in range(draft.num_ranks):
        gap = draft.total[full] - draft.total[rank]
        if gap <= 2 * draft.small:
            continue
        for gain, out, back in _exchanges(draft, full, rank, gap):
            if gain > draft.small and (best is None or gain > best[0]):
                best = gain, rank, out, back
    if best is None:
        return False
    _exchange(draft, full, *best[1:])
    return True


def _exchanges(draft: Draft, full: int, rank: int, gap: float) -> Iterable[tuple[float, int, int]]:
    """(gain, expert out of the full rank, expert back or -1): for each expert the partners near the ideal
    size.

    Moving d from one to the other leaves the fuller one at its load less min(d, gap - d).
    """
    here, there = draft.amount[full], draft.amount[rank]
    back = sorted((amount, e) for e, amount in there.items() if e not in here)
    room = draft.room(rank)
    for expert, amount in here.items():
        if expert in there:
            continue
        if room:
            yield min(amount, gap - amount), expert, -1
        at = bisect_left(back, (amount - gap / 2, -1))
        for size, partner in back[max(0, at - 1) : at + 1]:
            moved = amount - size
            yield min(moved, gap - moved), expert, partner


def _exchange(draft: Draft, full: int, rank: int, out: int, back: int) -> None:
    amount = draft.drop(out, full)
    if back >= 0:
        draft.add(back, full, draft.drop(back, rank))
    draft.add(out, rank, amount)
    for expert in (out, back):
        if expert >= 0:
            draft.level(expert)
    draft.level_all()


def replica_step(draft: Draft) -> bool:
    """A copy more of an expert of the fullest rank, if that lessens the largest load; the best of the tried
    ones.
    """
    full = max(range(draft.num_ranks), key=lambda rank: draft.total[rank])
    hot = sorted(draft.amount[full], key=lambda e: -draft.amount[full][e])[:HOT]
    best: Draft | None = None
    for old, rank in [place for place in _spare(draft) if place[1] != full][:SPARES]:
        for expert in hot:
            if expert in draft.amount[rank]:
                continue
            trial = draft.copy()
            _replace(trial, old, rank, expert)
            trial.level_all(TRIAL_SWEEPS)
            if trial.largest < (best or draft).largest - draft.small:
                best = trial
    if best is None:
        return False
    draft.amount, draft.hosts, draft.total = best.amount, best.hosts, best.total
    draft.level_all()
    return True


def _spare(draft: Draft) -> list[tuple[int, int]]:
    """(expert to drop or -1, rank): free slots and replicas, those on the least loaded ranks first."""
    free = [(draft.total[r], r, -1) for r in range(draft.num_ranks) if draft.room(r)]
    used = [(draft.total[r] + amount, r, e) for amount, r, e in _replicas(draft)]
    return [(e, r) for _, r, e in sorted(free + used)]


def _replace(draft: Draft, old: int, rank: int, expert: int) -> None:
    """A copy of the expert in the slot of `old`, whose other copies take over; -1: in a free slot."""
    if old >= 0:
        draft.drop(old, rank)
        draft.level(old)
    draft.add(expert, rank)
    draft.level(expert)
