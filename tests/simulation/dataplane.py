"""The simulated data plane: pool memory, and page reads that take time, in parts, with the checks of shm
and tcp.

A read has two touches of its target. Between them the source may be freed, reused and overwritten, its
owner may die or be stopped, and the reading process too. Until a read has ended it writes its target,
whatever was cancelled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtransfer import verdict
from kvtransfer.effects import Relay, StartRead
from kvtransfer.transport import ReadStatus
from pdserve.kvcache.allocator import Holder, HolderKind
from tests.simulation.bias import LEASE_S, STALL_S

if TYPE_CHECKING:
    from tests.simulation.process import Process


class Memory:
    """A pool's bytes: rows by page, and the mapped header's generations. Outlives its process where
    mapped."""

    def __init__(self, num_pages: int, page_size: int, pool_id: int) -> None:
        self.rows = [[0] * page_size for _ in range(num_pages)]
        self.generations = [0] * num_pages
        self.page_size, self.pool_id = page_size, pool_id

    def digest(self, page: int, index: int, valid_rows: int, rank: int, num_ranks: int) -> bytes:
        """See `digest`."""
        return digest(self.rows[page], index, valid_rows, rank, num_ranks)

    def copy(self, page: int, source: list[int], first: int, end: int, step: int) -> None:
        self.rows[page][first:end:step] = source[first:end:step]

    def lay(self, relay: Relay, source: list[int], rank: int, num_ranks: int) -> None:
        """A rank's rows of a page of another size go where they belong, save those that are there already."""
        pages = dict(relay.targets)
        for row in range(rank, len(source), num_ranks):
            at = relay.span_page * len(source) + row
            if at < relay.num_tokens and at // self.page_size not in relay.held:
                self.rows[pages[at // self.page_size]][at % self.page_size] = source[row]


def digest(rows: list[int], index: int, valid_rows: int, rank: int, num_ranks: int) -> bytes:
    """16 bytes over what a rank's part of a page is, and its rows. Rank r has rows r, r + n, …"""
    first = hash((index, valid_rows, *rows[rank::num_ranks]))
    return first.to_bytes(8, "big", signed=True) * 2


class Read:
    """One page read of a decode worker. Ends exactly once, with `finish`."""

    def __init__(self, reader: Process, source: Process | None, effect: StartRead, path: str) -> None:
        self.reader, self.source, self.effect, self.path = reader, source, effect, path
        self.moving = self.ended = False
        self.started_at = reader.world.now
        self.struck = ""  # a fault that explains a mismatch
        self._pin = ""
        whole = reader.read_duration(effect)
        self.queued = min(whole, STALL_S) * reader.world.rng.random()  # behind other pages
        self.duration = whole - self.queued
        size = source.memory.page_size if source is not None else 0
        self.half = size // 2
        self.num_ranks = effect.num_ranks
        self.staged = [0] * size if effect.relay is not None else None

    def start(self) -> None:
        wait = 0.0001 + self.queued
        if self.source is None:
            self.reader.later(wait, lambda: self.finish(ReadStatus.FAILED))
        elif self.path == "shm":
            self.reader.later(wait, self._shm_begin)
        else:
            self.reader.later(wait, self._ask)

    def cancel(self) -> None:
        """Ends a read that does not move yet; a moving one goes on."""
        if not self.moving and not self.ended:
            self.reader.later(0.0, lambda: self.finish(ReadStatus.FAILED))

    def finish(self, status: ReadStatus, digest: bytes = b"") -> None:
        """The transport reports the end: from now on nothing touches the target."""
        if not self.ended:
            self.ended = True
            self.reader.read_ended(self, status, digest)

    # -- shm ------------------------------------------------------------------------------------------------

    def _same_generation(self) -> bool:
        assert self.source is not None
        name = self.effect.source
        seen = self.source.memory.generations[name.page]
        return self.reader.world.masked("generation") or not verdict.is_stale(seen, name.generation)

    def _shm_begin(self) -> None:
        assert self.source is not None
        if self.ended:
            return
        if not self.source.alive:  # its socket is closed: no new attach, though the mapping is still there
            self.finish(ReadStatus.FAILED)
        elif not self._same_generation():
            self.finish(ReadStatus.STALE)
        else:
            self._first_half()
            self.reader.maybe_stop_between_check_and_act()
            self.reader.later(self.duration, self._shm_end)

    def _first_half(self) -> None:
        assert self.source is not None
        self.moving = True
        rows = self.source.memory.rows[self.effect.source.page]
        self._put(rows, 0, self.half)

    def _put(self, rows: list[int], start: int, end: int) -> None:
        """Bytes of this rank's part arrive in the target."""
        first = start + (self.effect.rank - start) % self.num_ranks
        if self.staged is not None:
            self.staged[first : end : self.num_ranks] = rows[first : end : self.num_ranks]
        else:
            self.reader.memory.copy(self.effect.target_page, rows, first, end, self.num_ranks)

    def _put_rest(self, rows: list[int]) -> None:
        """The last of them, as they are or struck on the way."""
        assert self.source is not None
        rank, target = self.effect.rank, self._target()
        self._put(rows, self.half, len(target))
        if self.reader.fleet.corrupts(self.reader.name, self.source.name):
            self.struck = "corrupt_wire"
            target[rank] = -target[rank] - 1

    def _target(self) -> list[int]:
        """Where its bytes arrive: our page, or memory of its own if that is of another size."""
        return self.reader.memory.rows[self.effect.target_page] if self.staged is None else self.staged

    def _second_half(self) -> None:
        assert self.source is not None
        self._put_rest(self.source.memory.rows[self.effect.source.page])

    def _shm_end(self) -> None:
        self._second_half()
        if self._same_generation():
            self._verify()
        else:
            self.finish(ReadStatus.STALE)

    def _verify(self) -> None:
        effect = self.effect
        got = digest(self._target(), effect.index, effect.valid_rows, effect.rank, self.num_ranks)
        intact = self.reader.world.masked("digest") or verdict.is_intact(got, effect.digest)
        if intact and effect.relay is not None:
            self.reader.memory.lay(effect.relay, self._target(), effect.rank, self.num_ranks)
        self.finish(verdict.verdict(stale=False, intact=intact), got)

    # -- tcp ------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        assert self.source is not None
        if self.ended:
            return
        reader, source = self.reader, self.source
        reader.later(STALL_S + self.duration, self._stalled)
        reader.fleet.network.stream(reader.name, source.name, lambda: source.later(0.0, self._serve))
        if not source.alive:
            reader.later(0.01, self._lost)

    def _lost(self) -> None:
        """The connection broke: nothing more arrives, and nothing touches the target."""
        self.finish(ReadStatus.FAILED)

    def _stalled(self) -> None:
        if self.source is not None and (self.source.unreachable_by(self.reader) or not self.moving):
            self._lost()

    def _serve(self) -> None:
        source, effect = self.source, self.effect
        assert source is not None
        name, world = effect.source, source.world
        if self.ended:
            return self._answer(ReadStatus.FAILED)
        if not world.masked("ticket") and not source.prefill.authorise(
            effect.ticket, effect.key, source.now()
        ):
            return self._answer(ReadStatus.FAILED)
        held = Holder(HolderKind.TRANSFER, str(effect.key)) in source.pages.holders(name.page)
        seen = source.pages.generation(name.page)
        generation = world.masked("generation") or not verdict.is_stale(seen, name.generation)
        if name.pool_id != source.memory.pool_id or not held or not generation:
            return self._answer(ReadStatus.STALE)
        if not world.masked("pin"):
            self._pin = f"tcp:{effect.read_id}:{self.reader.name}"
            source.pages.hold(name.page, Holder(HolderKind.IO, self._pin))
        source.later(world.rng.uniform(0.0, 0.002), self._send_first)
        return None

    def _answer(self, status: ReadStatus) -> None:
        assert self.source is not None
        self._to_reader(lambda: self.finish(status))

    def _to_reader(self, what) -> None:
        source, reader = self.source, self.reader
        source.fleet.network.stream(source.name, reader.name, lambda: reader.later(0.0, what))

    def _send_first(self) -> None:
        source = self.source
        assert source is not None
        first = source.memory.rows[self.effect.source.page][: self.half]
        self._to_reader(lambda: self._receive_first(first))
        source.later(self.duration, self._send_rest)

    def _send_rest(self) -> None:
        source = self.source
        assert source is not None
        rows = list(source.memory.rows[self.effect.source.page])
        self._to_reader(lambda: self._receive_rest(rows))
        if self._pin:
            pin, page = Holder(HolderKind.IO, self._pin), self.effect.source.page
            source.feed(lambda now: source.pages.drop(page, pin) or [])

    def _receive_first(self, rows: list[int]) -> None:
        if not self.ended:
            self.moving = True
            self._put(rows, 0, self.half)
            self.reader.maybe_stop_between_check_and_act()

    def _receive_rest(self, rows: list[int]) -> None:
        if self.ended:
            return
        self._put_rest(rows)
        self._verify()


def may_outlast_lease(rng_value: float) -> float:
    """A read's length under the bias "I/O longer than the lease": 0.8 to 2.6 leases."""
    return LEASE_S * (0.8 + 1.8 * rng_value)
