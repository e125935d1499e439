"""Who waits, who runs, who holds pages: the scheduler's lists, kept in order. No policy."""

from __future__ import annotations

from bisect import bisect_left, insort

from pdserve.sched.sequence import Seq


def _rank(seq: Seq) -> tuple[int, float, int]:
    return seq.rank


def _age(seq: Seq) -> tuple[float, int]:
    return seq.age


class Roster:
    """All live sequences. Waiting ones are sorted by rank; they may already hold pages (handed over)."""

    def __init__(self) -> None:
        self.running: dict[str, Seq] = {}
        self.waiting: list[Seq] = []
        self._by_id: dict[str, Seq] = {}
        self._waiting_holders: dict[str, Seq] = {}

    def get(self, seq_id: str) -> Seq | None:
        return self._by_id.get(seq_id)

    def add(self, seq: Seq) -> None:
        """A new sequence waits."""
        self._by_id[seq.seq_id] = seq
        self._wait(seq)

    def start(self, seq: Seq) -> None:
        """waiting → running."""
        self._leave_waiting(seq)
        self.running[seq.seq_id] = seq

    def send_back(self, seq: Seq) -> None:
        """Running or waiting → waiting without pages."""
        if self.running.pop(seq.seq_id, None) is not None:
            self._wait(seq)
        else:
            self._waiting_holders.pop(seq.seq_id, None)

    def remove(self, seq: Seq) -> None:
        """The sequence is over."""
        if self.running.pop(seq.seq_id, None) is None:
            self._leave_waiting(seq)
        del self._by_id[seq.seq_id]

    @property
    def any_waiting_holder(self) -> bool:
        return bool(self._waiting_holders)

    def by_rank(self) -> list[Seq]:
        """Running sequences in order of service."""
        return sorted(self.running.values(), key=_rank)

    def by_age(self) -> list[Seq]:
        """Running sequences, oldest first."""
        return sorted(self.running.values(), key=_age)

    def holders_younger_than(self, seq: Seq) -> list[Seq]:
        """Sequences that have pages and are younger than `seq`, youngest last."""
        holders = (*self.running.values(), *self._waiting_holders.values())
        return sorted((each for each in holders if each.age > seq.age), key=_age)

    def holders_older_than(self, seq: Seq) -> list[Seq]:
        """Sequences that have pages and are older than `seq`."""
        holders = (*self.running.values(), *self._waiting_holders.values())
        return [each for each in holders if each.age < seq.age]

    def _wait(self, seq: Seq) -> None:
        insort(self.waiting, seq, key=_rank)
        if seq.pages:
            self._waiting_holders[seq.seq_id] = seq

    def _leave_waiting(self, seq: Seq) -> None:
        del self.waiting[bisect_left(self.waiting, seq.rank, key=_rank)]
        self._waiting_holders.pop(seq.seq_id, None)
