"""Who starts, who grows and who has to give pages back, before each step.

Rules, none of which can livelock (protocol.md §5):
- Waiting sequences start by rank (priority, turn); the first that finds no pages blocks those behind it,
  save those that hold pages already, which wait for nothing else.
- All pages of a sequence's rows are bound when it starts; decode takes growth pages one at a time.
- Whoever lacks pages takes them from the youngest sequence that has some, and only from younger ones:
  the oldest never loses its pages and so always goes on.
- Where the pool has several homes, all of this is among the sequences of one home; a waiting one that holds
  no pages may go to any.
"""

from __future__ import annotations

from pdserve.sched.binding import PageBinder
from pdserve.sched.budget import Budget
from pdserve.sched.config import SchedConfig
from pdserve.sched.plan import Preempted, SeqEvent, Started
from pdserve.sched.roster import Roster
from pdserve.sched.sequence import Seq


class Admission:
    """Changes the roster and binds pages; `grow`, then `admit`, while no step is in flight. Events go to
    `events`."""

    def __init__(
        self, config: SchedConfig, roster: Roster, binder: PageBinder, events: list[SeqEvent]
    ) -> None:
        self._config = config
        self._roster = roster
        self._binder = binder
        self._events = events
        self._fresh: dict[str, tuple[Seq, int, bool]] = {}

    def grow(self) -> None:
        """Growth pages for running sequences, oldest first. One that gets none is sent back or, as the
        oldest, stays without a share of this step: its pages are held from outside, for a lease at most."""
        for seq in self._roster.by_age():
            if seq.seq_id in self._roster.running:
                self._grow_one(seq)

    def admit(self) -> None:
        """Starts what fits into the slots, the step's budget and the pool."""
        self._admit_waiting()
        for seq, num_hit, _ in self._fresh.values():
            self._events.append(Started(seq_id=seq.seq_id, hit_tokens=num_hit))
            self._events.extend(self._binder.hits(seq, num_hit))
        self._fresh.clear()

    def _admit_waiting(self) -> None:
        blocked = False
        for seq in tuple(self._roster.waiting):
            if len(self._roster.running) >= self._config.max_num_seqs:
                return
            if not seq.pages and (blocked or not self._has_rows(seq)):
                blocked = True
                if not self._roster.any_waiting_holder:
                    return
                continue
            if not self._start(seq):
                blocked = blocked or not seq.pages

    def _has_rows(self, seq: Seq) -> bool:
        """Whether the step has room for it: those that decode and those whose turn comes first leave some."""
        running = self._roster.by_rank()
        ahead = (other for other in running if other.remaining == 1 or other.rank < seq.rank)
        return Budget.after(self._config, ahead).may_start(seq)

    def _grow_one(self, seq: Seq) -> None:
        (home,) = self._binder.homes(seq)
        while not self._binder.grow(seq):
            younger = self._at(home, self._roster.holders_younger_than(seq))
            if younger and self._binder.fits_without(seq, younger, home):
                self._preempt(younger[-1])
                continue
            if self._at(home, self._roster.holders_older_than(seq)):
                self._preempt(seq)
            return

    def _start(self, seq: Seq) -> bool:
        # Newcomers leave one growth page to each running sequence, lest they are sent back at once.
        had_pages = bool(seq.pages)
        keep_back = None if had_pages else self._binder.by_home(self._roster.running.values())
        num_hit = self._binder.bind(seq, keep_back=keep_back)
        if num_hit is None:
            num_hit = self._bind_before_younger(seq)
        if num_hit is None:
            return False
        self._roster.start(seq)
        seq.started()
        self._fresh[seq.seq_id] = (seq, num_hit, had_pages)
        return True

    def _bind_before_younger(self, seq: Seq) -> int | None:
        """Binds at the cost of younger sequences (handed over after it was sent back), youngest first."""
        every = self._roster.holders_younger_than(seq)
        for home in self._binder.homes(seq):
            younger = self._at(home, every)
            if not younger or not self._binder.fits_without(seq, younger, home):
                continue
            while younger:
                num_hit = self._binder.bind(seq, home=home)
                if num_hit is not None:
                    return num_hit
                self._preempt(younger.pop())
            return self._binder.bind(seq, home=home)
        return None

    def _at(self, home: int, seqs: list[Seq]) -> list[Seq]:
        """Those whose pages are there."""
        return [seq for seq in seqs if self._binder.home(seq) == home]

    def _preempt(self, seq: Seq) -> None:
        self._binder.release(seq)
        self._roster.send_back(seq)
        # Started in this very plan and from nothing: nobody was told, and its hits may be gone already.
        _, _, had_pages = self._fresh.pop(seq.seq_id, (seq, 0, True))
        if had_pages:
            self._events.append(Preempted(seq_id=seq.seq_id))
