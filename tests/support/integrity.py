"""One prefill and two decode worker processes with everything between them in the test's hands.

What lives here: `Bench` and what a request came to. What does not: the faults (tests/integration/integrity).
"""

from __future__ import annotations

import secrets
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from pdserve.config.worker import WorkerConfig
from pdserve.messages import Announce, Ended, Nack
from pdserve.types import HandoverMode, Role, SamplingParams
from tests.support import direct as dx
from tests.support.chaos import ChaosDoor, ChaosProxy
from tests.support.processes import WorkerProcess
from tests.support.relay import Relay

WAYS = ("shm", "tcp")
LEASE_S = 3.0
PAGE = 16
# One chunk: prefill computes nothing any more while a test plays with the pages it announced.
PROMPT = tuple(100 + i * 104729 % 40000 for i in range(72))
NUM_PAGES = 5
SAMPLING = SamplingParams(max_tokens=4, ignore_eos=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Came:
    """What became of one request. Counters are by how much they rose on the two workers."""

    tokens: list[int]
    ended: Ended
    prefill: Counter[str]
    decode: Counter[str]

    def assert_repaired(self, resent: int) -> None:
        """By moving so many pages again, and no other: decode computed nothing of the prompt."""
        ledger = self.ended.ledger
        assert ledger.decode_computed_prompt_tokens == 0, self
        assert ledger.transfer.pages == NUM_PAGES, self
        assert ledger.transfer.resent_pages == resent, self

    def assert_computed_by_decode(self) -> None:
        """The transfer was given up; decode computed what it did not have verified."""
        assert self.ended.ledger.decode_computed_prompt_tokens > 0, self


class Bench:
    """The processes, and relay, proxy and door between them. All faults are set here and `reset`."""

    def __init__(self) -> None:
        secret = secrets.token_bytes(32)
        base = WorkerConfig(
            worker_id="p", role=Role.PREFILL, model=dx.MODEL, fleet_secret=secret.hex(), dtype="float32",
            deterministic=True, num_pages=400, prefill_chunk_tokens=128, token_budget=256, threads=2,
            lease_s=LEASE_S, max_num_seqs=128,
        )  # fmt: skip
        decode = replace(base, role=Role.DECODE)
        self.prefill = WorkerProcess(base)
        self.decode = {
            way: WorkerProcess(replace(decode, worker_id=f"d-{way}", transports=(way,))) for way in WAYS
        }
        for worker in (self.prefill, *self.decode.values()):
            worker.wait()
        self._directory = tempfile.TemporaryDirectory()
        peer = self.prefill.peer
        self.relay = Relay(peer.control, secret)
        self.proxy = ChaosProxy(peer.tcp)
        self.door = ChaosDoor(peer.shm, Path(self._directory.name, "door"))
        self._between = replace(
            peer, control=self.relay.address, tcp=self.proxy.address, shm=self.door.address
        )
        self._direct = {way: self._pair(secret, way) for way in WAYS}
        self._right: dict[tuple[int, ...], list[int]] = {}

    def _pair(self, secret: bytes, way: str) -> dx.Direct:
        p, d = cast(Any, self.prefill), cast(Any, self.decode[way])
        made = dx.Direct(secret=secret, prefill=p, decode=d)
        made.records = {
            Role.PREFILL: cast(Any, SimpleNamespace(peer=p.peer)),
            Role.DECODE: cast(Any, SimpleNamespace(peer=d.peer)),
        }
        return made

    def stop(self) -> None:
        """Ends everything."""
        self.relay.stop()
        self.proxy.stop()
        self.door.stop()
        for worker in (self.prefill, *self.decode.values()):
            worker.stop()
        self._directory.cleanup()

    def reset(self) -> None:
        """No fault any more."""
        self.relay.reset()
        self.proxy.reset()
        self.door.reset()

    def ask(self, way: str, tokens: tuple[int, ...] = PROMPT, **changes: Any) -> dx.Ask:
        """A request that goes through the test's hands. No prefix cache unless said otherwise."""
        settings = {"sampling": SAMPLING, "use_prefix_cache": False, "prefill_as": self._between} | changes
        return self._direct[way].ask(tokens, **settings)

    async def right(self, way: str, tokens: tuple[int, ...]) -> list[int]:
        """The aggregated answer: one worker computes all of it, without cache."""
        if tokens not in self._right:
            ask = self.ask(way, tokens, mode=HandoverMode.LOCAL, prefill_as=None)
            self._right[tokens], ended = await dx.generate(ask)
            assert ended.ledger.decode_computed_prompt_tokens == len(tokens)
        return self._right[tokens]

    async def run(self, way: str, tokens: tuple[int, ...] = PROMPT, **changes: Any) -> Came:
        """One request to its end: the text is the aggregated one, always, and both pools are idle after."""
        want = await self.right(way, tokens)
        return await self.came(way, want, dx.generate(self.ask(way, tokens, **changes)))

    async def came(self, way: str, want: list[int], request: Any) -> Came:
        """What a request came to; see `run`."""
        before = self.counters(way)
        got, ended = await request
        assert got == want, "a 200 with other content"
        assert ended.error_label == "", ended
        await self.until_idle(way)
        after = self.counters(way)
        rose = [now - then for now, then in zip(after, before, strict=True)]
        return Came(tokens=got, ended=ended, prefill=rose[0], decode=rose[1])

    async def until_idle(self, way: str) -> None:
        """Waits until neither worker of that way holds anything."""
        await self._direct[way].until_idle()

    def counters(self, way: str) -> tuple[Counter[str], Counter[str]]:
        """Of prefill and of that decode worker."""
        p, d = self.prefill.status(), self.decode[way].status()
        assert not p["integrity_problem"], p
        assert not d["integrity_problem"], d
        return Counter(p["counters"]), Counter(d["counters"])

    def announced(self) -> dict[int, Announce]:
        """The last announce of each index that was passed on."""
        return {m.index: m for m in self.relay.log if isinstance(m, Announce)}

    def nacked(self) -> list[int]:
        """Indices that decode would not take."""
        return [m.index for m in self.relay.log if isinstance(m, Nack)]
