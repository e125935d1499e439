"""A worker's own stamps of one request, for the latency ledger. Pure: every time is given by the caller.

What lives here: the computing worker's waits and chunks, the pulling worker's pages. What does not: what the
phases mean (`pdserve.types.Phase`), other processes' clocks and sums (`router.ledger`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.types import Phase, Span

MAX_CHUNKS = 256
MAX_RUNS = 64
"""More are joined to the last: a ledger stays small."""


@dataclass(slots=True, kw_only=True)
class _Stretch:
    """A begin and an end with what lies between: pages or rows, and the sum of the parts' own lengths."""

    begin: float
    end: float
    count: int = 0
    sum_s: float = 0.0

    def span(
        self, phase: Phase, clock: str, *, begin_clock: str | None = None, on_path: bool = False
    ) -> Span:
        return Span(
            phase=phase, begin_s=self.begin, end_s=self.end, end_clock=clock,
            begin_clock=clock if begin_clock is None else begin_clock,
            on_path=on_path, count=self.count, sum_s=self.sum_s,
        )  # fmt: skip


@dataclass(slots=True)
class ComputeLog:
    """Waits and chunks of one prompt on the worker that computes it.

    ready_at: since when it could be computed, None before that.
    """

    ready_at: float | None = None
    _waits: list[_Stretch] = field(default_factory=list)
    _chunks: list[_Stretch] = field(default_factory=list)

    @property
    def ended_at(self) -> float | None:
        """When the last chunk's step ended; None before the first."""
        return self._chunks[-1].end if self._chunks else None

    @property
    def rows(self) -> int:
        """Rows computed so far."""
        return sum(chunk.count for chunk in self._chunks)

    @property
    def queue_s(self) -> float:
        """From being ready to the first chunk's step; 0 before it."""
        return self._waits[0].sum_s if self._waits else 0.0

    @property
    def compute_s(self) -> float:
        """The steps of all chunks so far."""
        return sum(chunk.sum_s for chunk in self._chunks)

    def ready(self, now: float) -> None:
        """The sequence may be computed from now on. Only the first call counts."""
        if self.ready_at is None:
            self.ready_at = now

    def chunk(self, begin: float, end: float, rows: int) -> None:
        """A step computed so many rows of the prompt; until its begin the sequence waited."""
        waited_from = self.ended_at if self._chunks else self.ready_at
        if waited_from is not None:
            _join(self._waits, _Stretch(begin=waited_from, end=begin, sum_s=begin - waited_from), MAX_CHUNKS)
        _join(self._chunks, _Stretch(begin=begin, end=end, count=rows, sum_s=end - begin), MAX_CHUNKS)

    def spans(self, clock: str, now: float) -> list[Span]:
        """What is known so far; a first wait that goes on ends now."""
        waits = self._waits
        if not self._chunks and self.ready_at is not None:
            waits = [_Stretch(begin=self.ready_at, end=now, sum_s=now - self.ready_at)]
        return [
            *(w.span(Phase.PREFILL_QUEUE, clock, on_path=True) for w in waits),
            *(c.span(Phase.COMPUTE, clock, on_path=True) for c in self._chunks),
        ]


@dataclass(slots=True, kw_only=True)
class _Page:
    """A page's way here: sealed at the source (by its clock), announced, arrived and verified here."""

    sealed: float
    announced: float
    arrived: float = 0.0
    verified: float = 0.0


@dataclass(slots=True)
class PageLog:
    """The pages that one request pulls, on the worker that pulls them."""

    _open: dict[int, _Page] = field(default_factory=dict)
    _runs: list[_Stretch] = field(default_factory=list)
    _announced: _Stretch | None = None
    _verified: _Stretch | None = None
    _last: _Page | None = None

    @property
    def verified_at(self) -> float | None:
        """When the last page was verified; None before any was."""
        return self._last.verified if self._last else None

    @property
    def verify_s(self) -> float:
        """Checking the pages that were good, all together."""
        return self._verified.sum_s if self._verified else 0.0

    def announced(self, index: int, sealed_s: float, now: float) -> None:
        """A page's Announce arrived and its read begins."""
        self._open[index] = _Page(sealed=sealed_s, announced=now)

    def ended(self, index: int, *, arrived: float, verified: float, good: bool) -> None:
        """The read of a page ended; only a good one counts."""
        page = self._open.pop(index, None)
        if page is None or not good:
            return
        page.arrived, page.verified = max(arrived, page.announced), verified
        self._announced = _extended(self._announced, page.sealed, page.announced)
        self._verified = _extended(self._verified, page.arrived, page.verified)
        _run(self._runs, page.announced, page.arrived)
        if self._last is None or page.verified >= self._last.verified:
            self._last = page

    def spans(self, clock: str, source: str) -> list[Span]:
        """All pages together, and the runs in which the wire was busy; none on the path."""
        out = [run.span(Phase.WIRE, clock) for run in self._runs]
        if self._announced is not None:
            out.append(self._announced.span(Phase.ANNOUNCE, clock, begin_clock=source))
        if self._verified is not None:
            out.append(self._verified.span(Phase.VERIFY, clock))
        return out

    def path(self, clock: str, source: str) -> list[Span]:
        """The way of the page that was verified last."""
        page = self._last
        if page is None:
            return []
        ways = ((Phase.ANNOUNCE, page.sealed, page.announced, source),
                (Phase.WIRE, page.announced, page.arrived, clock),
                (Phase.VERIFY, page.arrived, page.verified, clock))  # fmt: skip
        return [
            _Stretch(begin=begin, end=end, count=1, sum_s=end - begin).span(
                phase, clock, begin_clock=begin_clock, on_path=True
            )
            for phase, begin, end, begin_clock in ways
        ]


def _join(parts: list[_Stretch], new: _Stretch, limit: int) -> None:
    if len(parts) < limit:
        parts.append(new)
        return
    last = parts[-1]
    last.end, last.count, last.sum_s = new.end, last.count + new.count, last.sum_s + new.sum_s


def _run(runs: list[_Stretch], begin: float, end: float) -> None:
    """Adds a page to the run it overlaps, or begins a new one."""
    if runs and (begin <= runs[-1].end or len(runs) == MAX_RUNS):
        last = runs[-1]
        last.begin, last.end = min(last.begin, begin), max(last.end, end)
        last.count, last.sum_s = last.count + 1, last.sum_s + end - begin
        return
    runs.append(_Stretch(begin=begin, end=end, count=1, sum_s=end - begin))


def _extended(old: _Stretch | None, begin: float, end: float) -> _Stretch:
    if old is None:
        return _Stretch(begin=begin, end=end, count=1, sum_s=end - begin)
    old.begin, old.end = min(old.begin, begin), max(old.end, end)
    old.count, old.sum_s = old.count + 1, old.sum_s + end - begin
    return old
