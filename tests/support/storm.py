"""Disconnect storms on real processes: many streams, held in one phase, then gone at once.

What lives here: the fleet, holding the phases still, and what is measured. What does not: bounds (the tests).
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdserve.api import FleetStatus
from pdserve.client import AsyncClient
from pdserve.errors import PdserveError
from pdserve.rpc.convert import WorkerState
from pdserve.types import Role
from tests.support import tiny_models
from tests.support.proxies import SlowProxy, Sponsor, StatusOf
from tests.support.stack import Stack, usable, wait_serving

STREAMS = 200
LEASE_S = 10.0
CONTEXT = 4096
PROBES = 9
LIMIT_S = 40.0


def make_model(directory: Path) -> Path:
    """A tiny llama with a long context and a wide MLP: its steps last some milliseconds, outside Python."""
    model = tiny_models.llama(max_position_embeddings=CONTEXT, intermediate_size=4096)
    return tiny_models.save(model, directory)


def prompt(seed: int, length: int) -> list[int]:
    """Token ids without a shared prefix between seeds."""
    return random.Random(seed).choices(range(1, 250), k=length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One look at everything. at: monotonic seconds."""

    at: float
    router: FleetStatus
    prefill: WorkerState
    decode: WorkerState
    started: int

    @property
    def stopping(self) -> bool:
        """Every key that is left on the workers only waits for quiet."""
        return all(state.live == state.closing for state in (self.prefill, self.decode))

    @property
    def idle(self) -> bool:
        router = (self.router.running, self.router.queued)
        outstanding = sum(w.outstanding_tokens + w.outstanding_requests for w in self.router.workers)
        return self.prefill.idle and self.decode.idle and router == (0, 0) and not outstanding

    def brief(self) -> str:
        """In a few words, for who debugs."""
        sides = [
            f"live {w.live} closing {w.closing} running {w.load.num_running} waiting {w.load.num_waiting} "
            f"filling {w.load.filling_pages} reserved {w.load.reserved_pages} sealed {w.load.sealed_pages} "
            f"idle {w.idle} {dict(w.counters)}"
            for w in (self.prefill, self.decode)
        ]
        return f"queued {self.router.queued} running {self.router.running} started {self.started}; {sides}"

    @property
    def steps(self) -> tuple[int, int]:
        """Steps that have started, on prefill and on decode."""
        return self.prefill.counters.get("steps", 0), self.decode.counters.get("steps", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Where the streams are when the storm comes. extra: more streams than the 200, to fill the workers.

    reached: whether enough of them are there. bytes_per_s: how slow the page wire is meanwhile.
    """

    name: str
    prompt_tokens: int
    max_tokens: int
    reached: Callable[[Seen], bool]
    extra: int = 0
    bytes_per_s: float | None = 60_000.0


PHASES = {
    phase.name: phase
    for phase in (
        Phase(
            name="queued", prompt_tokens=1500, max_tokens=2000, extra=80,
            reached=lambda s: s.router.queued >= STREAMS and s.decode.live > 0,
        ),
        Phase(
            name="prefill", prompt_tokens=400, max_tokens=3500,
            reached=lambda s: s.router.running == s.prefill.live == STREAMS
            and s.prefill.load.num_running > 0,
        ),
        Phase(
            name="transfer", prompt_tokens=64, max_tokens=3500,
            reached=lambda s: s.prefill.live >= STREAMS - 20 and s.decode.load.filling_pages > STREAMS
            and not s.prefill.load.num_running and not s.prefill.load.num_waiting,
        ),
        Phase(
            name="decode", prompt_tokens=24, max_tokens=3500, bytes_per_s=None,
            reached=lambda s: s.started == STREAMS and s.decode.load.num_running == STREAMS,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one round showed. Times in ms; steps_after: started once all keys were closing."""

    phase: str
    cancelling_ms: float
    stopping_ms: float
    idle_ms: float
    steps_after: tuple[int, int]
    before_ms: float
    after_ms: float
    tombstones: tuple[int, int]
    same_processes: bool


def back_at(before_ms: float, after_ms: float) -> bool:
    """Whether a latency is at its baseline again; generous, as medians of few wander."""
    return after_ms <= 1.5 * before_ms + 50


@dataclass
class StormFleet:
    """The fleet under the storms; the prefill worker's page server is reached through a proxy."""

    stack: Stack
    proxy: SlowProxy
    sponsor: Sponsor
    prefill: StatusOf
    decode: StatusOf
    seed: int = 0
    first: set[tuple[int, int]] = field(default_factory=set)

    @classmethod
    def start(cls, model: Path, **settings: Any) -> StormFleet:
        """A router, one prefill and one decode worker over tcp. settings: fields of WorkerConfig."""
        values: dict[str, Any] = {
            "model": str(model), "num_pages": 6800, "max_num_seqs": 256, "transports": ("tcp",),
            "lease_s": LEASE_S, "decode_pace_s": 0.0, "threads": 1,
        } | settings  # fmt: skip
        stack = Stack.start({Role.DECODE: 1}, router_flags=("--prefill-backlog-tokens", "0"), **values)
        stack.launch("prefill-0", Role.PREFILL, routers=())
        control = stack.wait_started("prefill-0")
        secret = bytes.fromhex(stack.secret)
        prefill = StatusOf(control, secret)
        proxy = SlowProxy(prefill.state().record.peer.tcp)
        sponsor = Sponsor(stack.address, prefill, secret, tcp=proxy.endpoint)
        status = stack.until(lambda s: len(usable(s)) == 2)
        wait_serving(stack.address)
        other = next(w.record.peer.control for w in status.workers if w.record.role is Role.DECODE)
        made = cls(stack, proxy, sponsor, prefill, StatusOf(other, secret))
        made.first = made.processes()
        return made

    def processes(self) -> set[tuple[int, int]]:
        """(pid, incarnation) of each worker."""
        records = [self.prefill.state().record, self.decode.state().record]
        return {(r.pid, r.peer.incarnation) for r in records}

    def stop(self) -> None:
        self.sponsor.close()
        self.prefill.close()
        self.decode.close()
        self.proxy.close()
        self.stack.stop()

    # -- one round ---------------------------------------------------------------------------------------

    async def round(self, phase: Phase, *, vanish: bool) -> Report:
        """Opens the streams, holds them in the phase, ends all at once, and watches what becomes of them.

        vanish: break the connection; otherwise each stream is cancelled.
        """
        async with AsyncClient(self.stack.address) as observer:
            before = await self.latency_ms(observer)
            self.proxy.limit(phase.bytes_per_s)
            streams = _Streams(self, phase)
            try:
                await self.until(observer, lambda s: streams.undisturbed() and phase.reached(s), streams)
                begun = time.monotonic()
                await streams.end(vanish=vanish)
                cancelled = time.monotonic()
                stopping = await self.until(observer, lambda s: s.stopping and not s.router.running, streams)
                idle = await self.until(observer, lambda s: s.idle, streams)
            finally:
                await streams.end(vanish=True)
                self.proxy.limit(None)
            problems = [side.state(check=True).integrity_problem for side in (self.prefill, self.decode)]
            assert problems == ["", ""]
            after = await self.latency_ms(observer)
            for _ in range(2):  # somebody else's work on this machine is no fault of ours, if it passes
                if not back_at(before, after):
                    after = await self.latency_ms(observer)
        return Report(
            phase=phase.name, cancelling_ms=1e3 * (cancelled - begun),
            stopping_ms=1e3 * (stopping.at - begun), idle_ms=1e3 * (idle.at - begun),
            steps_after=(idle.steps[0] - stopping.steps[0], idle.steps[1] - stopping.steps[1]),
            before_ms=before, after_ms=after,
            tombstones=(idle.prefill.tombstones, idle.decode.tombstones),
            same_processes=self.processes() == self.first,
        )  # fmt: skip

    async def look(self, observer: AsyncClient, streams: _Streams) -> Seen:
        """The state of everything now; no state is older than `at`."""
        at = time.monotonic()
        prefill, decode = await asyncio.gather(
            asyncio.to_thread(self.prefill.state), asyncio.to_thread(self.decode.state)
        )
        router = await observer.get_status()
        return Seen(at=at, router=router, prefill=prefill, decode=decode, started=streams.num_started)

    async def until(self, observer: AsyncClient, wanted: Callable[[Seen], bool], streams: _Streams) -> Seen:
        """Looks again and again until everything is as wanted."""
        limit = time.monotonic() + LIMIT_S
        while not wanted(seen := await self.look(observer, streams)):
            assert time.monotonic() < limit, seen.brief()
        return seen

    async def latency_ms(self, client: AsyncClient) -> float:
        """Median time of a short request, handed over like any other."""
        times = []
        for _ in range(PROBES):
            self.seed += 1
            begun = time.monotonic()
            result = await client.generate(
                token_ids=prompt(self.seed, 48), max_tokens=4, temperature=0.0, ignore_eos=True, no_text=True
            ).result()
            times.append(1e3 * (time.monotonic() - begun))
            assert result.ledger.transfer.pages == 3, result.ledger
        return statistics.median(times)


class _Streams:
    """The streams of one storm, over one connection."""

    def __init__(self, fleet: StormFleet, phase: Phase) -> None:
        self._client = AsyncClient(fleet.stack.address, retry=None)
        self.num_started = 0
        self._streams = []
        for _ in range(STREAMS + phase.extra):
            fleet.seed += 1
            self._streams.append(
                self._client.generate(
                    token_ids=prompt(fleet.seed, phase.prompt_tokens), max_tokens=phase.max_tokens,
                    temperature=0.0, ignore_eos=True, no_prefix_cache=True, no_text=True, deadline_s=60.0,
                )
            )  # fmt: skip
        self._readers = [asyncio.ensure_future(self._read(stream)) for stream in self._streams]

    async def _read(self, stream: Any) -> str:
        """Reads to the end; the label it ended with."""
        started = False
        try:
            async for _ in stream:
                self.num_started += not started
                started = True
        except PdserveError as error:
            return error.label
        return "complete"

    def undisturbed(self) -> bool:
        """None has ended by itself yet. Fails otherwise."""
        early = [reader.result() for reader in self._readers if reader.done()]
        assert not early, early
        return True

    async def end(self, *, vanish: bool) -> None:
        """Ends all."""
        if vanish:
            await self._client.close()
        else:
            for stream in self._streams:
                stream.cancel()
        await asyncio.gather(*self._readers)
        await self._client.close()
