"""A fake engine and a fake role around the step scheduler, with real page contents, for the tests of `sched`.

A row's value is the chain hash of all tokens up to it, so a page used for the wrong prefix, overwritten or
freed too early changes what is read; a token is a hash over all rows read from the pages.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass, field

from pdserve.kvcache.allocator import Holder, HolderKind, PageState
from pdserve.kvcache.manager import PageManager
from pdserve.kvcache.prefix import content_keys
from pdserve.sched.plan import (
    PageReady,
    Preempted,
    SeqEvent,
    SeqFailed,
    SeqFinished,
    SeqKind,
    SeqSpec,
    SeqStep,
    SeqStopped,
    Started,
    StepPlan,
    StepResult,
    TokenSampled,
)
from pdserve.sched.scheduler import SchedConfig, StepScheduler
from pdserve.types import SamplingParams

VOCAB = 50


def row_values(token_ids: tuple[int, ...] | list[int]) -> list[bytes]:
    """What the rows of these tokens hold."""
    values, value = [], b"start"
    for token in token_ids:
        value = hashlib.blake2b(value + token.to_bytes(4, "little"), digest_size=8).digest()
        values.append(value)
    return values


def next_token(rows: list[bytes], seed: int, counter: int) -> int:
    """The model: a token that depends on every row, the seed and the counter."""
    data = b"".join(rows) + f"{seed}.{counter}".encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little") % VOCAB


def oracle(token_ids: tuple[int, ...], num_prompt: int, sampling: SamplingParams, end: int = -1) -> list[int]:
    """The completion tokens of an unbounded run, given ones included."""
    tokens = list(token_ids)
    while len(tokens) - num_prompt < sampling.max_tokens:
        tokens.append(next_token(row_values(tokens), sampling.seed, len(tokens) - num_prompt))
        if tokens[-1] == end:
            break
    return tokens[num_prompt:]


class FakeEngine:
    """Executes plans on a pool of rows. Reading a row that nobody wrote raises."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.rows: list[list[bytes | None]] = [[b"garbage"] * page_size for _ in range(num_pages)]

    def execute(self, plan: StepPlan, fail: frozenset[str] = frozenset()) -> StepResult:
        for page in plan.zero_pages:
            self.rows[page] = [None] * self.page_size
        for source, target in plan.copies:
            self.rows[target] = list(self.rows[source])
        tokens = {step.seq_id: token for step in plan.seqs if (token := self._run(step)) is not None}
        failed = {step.seq_id: "made to fail" for step in plan.seqs if step.seq_id in fail}
        return StepResult(step_id=plan.step_id, tokens=tokens, failed=failed or None)

    def write(self, page: int, first_row: int, values: list[bytes]) -> None:
        """Puts rows into a page, as a transfer does."""
        self.rows[page][first_row : first_row + len(values)] = values

    def _run(self, step: SeqStep) -> int | None:
        table = [self.rows[page] for page in step.pages]
        for pos, token in enumerate(step.token_ids, step.start):
            before = self._at(table, pos - 1) if pos else b"start"
            value = hashlib.blake2b(before + token.to_bytes(4, "little"), digest_size=8).digest()
            table[pos // self.page_size][pos % self.page_size] = value
        if not step.sample:
            return None
        rows = [self._at(table, pos) for pos in range(step.start + len(step.token_ids))]
        return next_token(rows, step.sampling.seed, step.sample_counter)

    def _at(self, table: list[list[bytes | None]], pos: int) -> bytes:
        value = table[pos // self.page_size][pos % self.page_size]
        assert value is not None, "a row was read that nobody computed"
        return value


@dataclass
class Sim:
    """A scheduler, a pool, an engine and a role that drops pages when a sequence is over."""

    config: SchedConfig
    num_pages: int
    num_homes: int = 1
    gap_s: float = 1.0
    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    specs: dict[str, SeqSpec] = field(default_factory=dict)
    over: dict[str, SeqEvent | None] = field(default_factory=dict)
    log: list[SeqEvent] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    next_page: dict[str, int] = field(default_factory=dict)
    restarted: set[str] = field(default_factory=set)
    outside: list[Holder] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.manager = PageManager(self.num_pages, 1, self.num_homes)
        self.sched = StepScheduler(self.config, self.manager)
        self.engine = FakeEngine(self.num_pages, self.config.page_size)
        self.in_flight: StepPlan | None = None

    # ---- requests ------------------------------------------------------------------------------------

    def submit(self, seq_id: str, token_ids: list[int], **fields: object) -> SeqSpec:
        """A sequence without pages."""
        max_tokens = int(fields.pop("max_tokens", 4))  # type: ignore[call-overload]
        sampling = fields.pop("sampling", SamplingParams(max_tokens=max_tokens, seed=len(seq_id)))
        fields.setdefault("num_prompt", len(token_ids))
        fields.setdefault("arrival", self.gap_s * len(self.specs))
        fields.setdefault("kind", SeqKind.FULL)
        spec = SeqSpec(seq_id=seq_id, token_ids=tuple(token_ids), sampling=sampling, **fields)  # type: ignore[arg-type]
        self._take(spec)
        return spec

    def hand_over(
        self, seq_id: str, prompt: list[int], *, max_tokens: int = 4, growth: int = 0, seal_tail: bool = False
    ) -> bool:
        """A sequence whose prompt was computed elsewhere and lies in pages here; False when pages lack."""
        holder = Holder(HolderKind.REQUEST, seq_id)
        size = self.config.page_size
        names = {"salt": b"", "model": self.config.model, "numerics": self.config.numerics}
        keys = content_keys(prompt, size, **names)  # type: ignore[arg-type]
        total = -(-len(prompt) // size) + growth
        home = self.manager.choose(keys, total, [self.config.floor_pages] * self.num_homes) or 0
        hits = self.manager.match_and_hold(keys, holder, home)
        floor = self.config.floor_pages
        fresh = self.manager.reserve(total - len(hits), holder, keep_back=floor, home=home)
        if fresh is None:
            self.manager.drop_all(holder)
            return False
        pages = hits + fresh
        self._place(prompt, pages, len(hits), keys)
        if seal_tail and len(prompt) % size:
            self.manager.seal(pages[len(prompt) // size], len(prompt) % size)
        sampling = SamplingParams(max_tokens=max_tokens, seed=len(seq_id))
        first = oracle(tuple(prompt), len(prompt), SamplingParams(max_tokens=1, seed=len(seq_id)))
        self.tokens[seq_id] = list(first)
        self._take(
            SeqSpec(
                seq_id=seq_id,
                kind=SeqKind.FULL,
                token_ids=(*prompt, *first),
                num_prompt=len(prompt),
                sampling=sampling,
                arrival=self.gap_s * len(self.specs),
                num_computed=len(prompt),
                pages=pages,
                num_shared=len(hits),
            )
        )
        return True

    def cancel(self, seq_id: str) -> None:
        live = self.sched.has(seq_id)
        if self.sched.cancel(seq_id) and live:
            self._end(seq_id, None)

    def take_outside(self, num_pages: int) -> None:
        """Pages go to somebody else than the scheduler, for a while."""
        holder = Holder(HolderKind.TRANSFER, f"outside-{len(self.specs)}-{len(self.plans)}")
        if self.manager.reserve(num_pages, holder) is not None:
            self.outside.append(holder)

    def give_back(self) -> bool:
        """The longest-held outside holder lets go; False when there is none."""
        if not self.outside:
            return False
        self.manager.drop_all(self.outside.pop(0))
        return True

    # ---- steps ---------------------------------------------------------------------------------------

    def begin(self) -> StepPlan | None:
        """Plans a step and checks what has to hold for every plan."""
        self.in_flight = self.sched.plan()
        events = self.sched.drain_events()
        self._apply(events)
        if self.in_flight is not None:
            self.plans.append(self.in_flight)
            self._check_plan(self.in_flight)
        self._check_preempted(events)
        return self.in_flight

    def end(self, fail: frozenset[str] = frozenset()) -> None:
        assert self.in_flight is not None
        result = self.engine.execute(self.in_flight, fail)
        self._apply(self.sched.finish_step(result))
        self.in_flight = None
        self.check()

    def step(self) -> bool:
        """One whole step; False when nothing could run."""
        if self.in_flight is None and self.begin() is None:
            return False
        self.end()
        return True

    def run(self, limit: int = 3000) -> None:
        """Steps until nothing is left; fails when it takes too long or stands still."""
        for _ in range(limit):
            if not self.step() and not self.give_back():
                break
        assert self.sched.num_running == self.sched.num_waiting == 0
        assert self.manager.idle

    def check(self) -> None:
        assert self.manager.check_integrity() == ""

    # ---- inside --------------------------------------------------------------------------------------

    def _take(self, spec: SeqSpec) -> None:
        self.specs[spec.seq_id] = spec
        self.sched.submit(spec)

    def _place(
        self, prompt: list[int], pages: tuple[int, ...], num_hits: int, keys: tuple[bytes, ...]
    ) -> None:
        size, values = self.config.page_size, row_values(prompt)
        for index in range(num_hits, -(-len(prompt) // size)):
            rows = values[index * size : (index + 1) * size]
            self.manager.fill(pages[index])
            self.engine.write(pages[index], 0, rows)
            if len(rows) == size:
                self.manager.seal(pages[index], size)
                self.manager.publish(pages[index], keys[index], keys[index - 1] if index else None)

    def _apply(self, events: list[SeqEvent]) -> None:
        self.log.extend(events)
        for event in events:
            self._check_order(event)
            if isinstance(event, TokenSampled):
                assert event.index == len(self.tokens[event.seq_id]) + self._num_given(event.seq_id)
                self.tokens[event.seq_id].append(event.token_id)
            elif isinstance(event, SeqFinished | SeqFailed | SeqStopped):
                self._end(event.seq_id, event)
            elif isinstance(event, PageReady):
                assert self.manager.state(event.page) is PageState.SEALED
                self._hold_outside(event)

    def _hold_outside(self, event: PageReady) -> None:
        """A prefill worker holds what it has to send, beyond the sequence's end."""
        if self.specs[event.seq_id].kind is SeqKind.PREFILL_ONLY:
            holder = Holder(HolderKind.TRANSFER, event.seq_id)
            self.manager.hold(event.page, holder)
            if holder not in self.outside:
                self.outside.append(holder)

    def _check_order(self, event: SeqEvent) -> None:
        """Started comes first and again after each Preempted only; pages come in order without a gap."""
        if isinstance(event, Started):
            assert event.seq_id not in self.next_page
            spec = self.specs[event.seq_id]
            first_time = event.seq_id not in self.restarted
            self.next_page[event.seq_id] = spec.num_computed // self.config.page_size if first_time else 0
        elif isinstance(event, Preempted):
            self.restarted.add(event.seq_id)
            self.next_page.pop(event.seq_id, None)
        elif isinstance(event, PageReady):
            assert event.index == self.next_page[event.seq_id]
            self.next_page[event.seq_id] += 1
        elif isinstance(event, TokenSampled):
            assert event.seq_id in self.next_page

    def _num_given(self, seq_id: str) -> int:
        """Generated tokens that came with the submission and that nobody counted here."""
        spec = self.specs[seq_id]
        return 0 if spec.pages else len(spec.token_ids) - spec.num_prompt

    def _end(self, seq_id: str, event: SeqEvent | None) -> None:
        assert seq_id not in self.over
        self.over[seq_id] = event
        self.manager.drop_all(Holder(HolderKind.REQUEST, seq_id))

    def _age(self, seq_id: str) -> float:
        return self.specs[seq_id].arrival

    def _check_preempted(self, events: list[SeqEvent]) -> None:
        live = [seq_id for seq_id in self.specs if self.sched.has(seq_id) and self.sched.pages_of(seq_id)]
        for event in events:
            if isinstance(event, Preempted):
                assert any(self._age(seq_id) < self._age(event.seq_id) for seq_id in live)

    def _check_plan(self, plan: StepPlan) -> None:
        for step in plan.seqs:
            assert len({self.manager.homes.home(page) for page in step.pages}) == 1
        for source, target in plan.copies:
            assert self.manager.homes.home(source) == self.manager.homes.home(target)
        written = [
            step.pages[pos // self.config.page_size]
            for step in plan.seqs
            for pos in range(step.start, step.start + len(step.token_ids))
        ]
        for page in set(written):
            assert self.manager.state(page) is PageState.FILLING
        users = [
            {
                step.pages[pos // self.config.page_size]
                for pos in (step.start, step.start + len(step.token_ids) - 1)
            }
            for step in plan.seqs
        ]
        assert sum(len(pages) for pages in users) == len(set().union(*users))
        chunked = [len(step.token_ids) > 1 or not step.sample for step in plan.seqs]
        assert chunked == sorted(chunked), "decode rows come first"
        size = self.config.page_size
        fresh = [
            step.pages[pos // size]
            for step in plan.seqs
            for pos in range(step.start, step.start + len(step.token_ids))
            if pos % size == 0
        ]
        assert sorted(fresh) == sorted(plan.zero_pages), (
            "pages are zeroed before their first row, and only then"
        )
