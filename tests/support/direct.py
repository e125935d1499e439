"""Real workers without a router: the test is the router, so that each phase of a handover can be held still.

Two `WorkerHost`s in this process, real gRPC and data plane, the default model in deterministic float32.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kvtransfer import ticket
from pdserve.config.worker import WorkerConfig
from pdserve.messages import Ended, Prefilled, PrefillRequest, Refused, Reserve, Reserved, Token
from pdserve.rpc import convert
from pdserve.rpc.channel import open_channel
from pdserve.rpc.fleet_auth import authenticated
from pdserve.rpc.v1 import cluster_pb2, cluster_pb2_grpc, decode_pb2, decode_pb2_grpc, prefill_pb2_grpc
from pdserve.types import (
    HandoverMode,
    Key,
    PeerRef,
    Role,
    SamplingParams,
    TokenLogprob,
    WorkerRecord,
)
from pdserve.worker.host import WorkerHost
from tests.support.memory import give_back

MODEL = "smollm2-135m-instruct"
TENANT = "tests"


@dataclass(kw_only=True)
class Direct:
    """One prefill and one decode worker, and the secret to speak with them as a router does."""

    secret: bytes
    prefill: WorkerHost
    decode: WorkerHost
    records: dict[Role, WorkerRecord] = field(default_factory=dict)

    @classmethod
    def start_many(cls, pairs: int, **settings: Any) -> list[Direct]:
        """Pairs of one fleet: any prefill worker can serve any decode worker (see `crossed`)."""
        secret = secrets.token_bytes(32)
        return [cls.start(secret=secret, suffix=f"-{i}", **settings) for i in range(pairs)]

    def crossed(self, other: Direct) -> Direct:
        """Our prefill worker with the other pair's decode worker."""
        records = {Role.PREFILL: self.records[Role.PREFILL], Role.DECODE: other.records[Role.DECODE]}
        return Direct(secret=self.secret, prefill=self.prefill, decode=other.decode, records=records)

    @classmethod
    def start(cls, secret: bytes | None = None, suffix: str = "", **settings: Any) -> Direct:
        """Two workers with small pools. settings: fields of WorkerConfig."""
        secret = secret or secrets.token_bytes(32)
        base = WorkerConfig(
            worker_id="w", role=Role.PREFILL, model=MODEL, fleet_secret=secret.hex(), dtype="float32",
            deterministic=True, num_pages=120, prefill_chunk_tokens=64, token_budget=128, threads=2,
        )  # fmt: skip
        base = replace(base, **settings)
        hosts = [
            WorkerHost(replace(base, worker_id=f"{r}{suffix}", role=r)) for r in (Role.PREFILL, Role.DECODE)
        ]
        made = cls(secret=secret, prefill=hosts[0], decode=hosts[1])
        made.records = {Role.PREFILL: hosts[0].start(), Role.DECODE: hosts[1].start()}
        return made

    def stop(self) -> None:
        """Ends both workers and gives back their memory; nothing else can be asked of them afterwards."""
        self.prefill.stop()
        self.decode.stop()
        del self.prefill, self.decode
        give_back()

    @property
    def p(self) -> PeerRef:
        return self.records[Role.PREFILL].peer

    @property
    def d(self) -> PeerRef:
        return self.records[Role.DECODE].peer

    def ask(self, token_ids: tuple[int, ...], **changes: Any) -> Ask:
        """A request of its own id. changes: fields of Ask."""
        return Ask(direct=self, key=Key(request_id=secrets.token_hex(6)), token_ids=token_ids, **changes)

    async def until_idle(self, limit_s: float = 30.0) -> None:
        """Waits until no key lives and every page of both pools is free or evictable."""
        for peer in (self.p, self.d):
            await until(self, peer, lambda state: state.idle and not state.integrity_problem, limit_s)

    def page_bytes(self, role: Role, keys: tuple[bytes, ...]) -> list[bytes]:
        """The bytes of published pages by content key, in order; fails if one is not in the cache."""
        engine = (self.prefill if role is Role.PREFILL else self.decode)._engine
        assert engine is not None
        pages = engine.parts.pages.match(keys)
        assert len(pages) == len(keys), "pages are not in the prefix cache"
        return [bytes(engine.parts.pool.page_view(page)) for page in pages]


async def until(direct: Direct, peer: PeerRef, wanted: Callable[[Any], bool], limit_s: float = 30.0) -> None:
    """Asks a worker for its state until it is as wanted. Fails at the limit (seconds)."""
    end = time.monotonic() + limit_s
    channel = open_channel(peer.control)
    try:
        stub = authenticated(cluster_pb2_grpc.WorkerServiceStub(channel), direct.secret)
        while True:
            answer = await stub.GetWorkerStatus(cluster_pb2.GetWorkerStatusRequest())
            state = convert.worker_state_from_pb(answer)
            if wanted(state):
                return
            assert time.monotonic() < end, f"never came to be: {state}"
    finally:
        await channel.close(None)


@dataclass(kw_only=True)
class Ask:
    """One request as a router sends it; `prefill_as` and `decode_as` change what the other side is told."""

    direct: Direct
    key: Key
    token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=8, ignore_eos=True))
    mode: HandoverMode = HandoverMode.DISAGGREGATED
    num_forced: int = 0
    deadline_s: float = 60.0
    use_prefix_cache: bool = True
    prefill_may_hit: bool = True
    decode_may_hit: bool = True
    prefill_as: PeerRef | None = None
    tenant: str = TENANT

    def ticket(self) -> bytes:
        """The router's ticket for this try."""
        now = time.monotonic()
        local = self.mode is HandoverMode.LOCAL
        facts = ticket.TicketFacts(
            key=self.key, prefill_incarnation=0 if local else self.direct.p.incarnation,
            decode_incarnation=self.direct.d.incarnation, emitter=self.direct.d.worker_id, mode=self.mode,
            tenant=self.tenant, request_hash=ticket.request_hash(self.token_ids, self.sampling),
            page_budget=1000, num_choices=1, prefill_expires=now + 600, decode_expires=now + 600,
        )  # fmt: skip
        return ticket.mint(self.direct.secret, facts)

    def _common(self) -> dict[str, Any]:
        return {
            "key": self.key, "ticket": self.ticket(), "token_ids": self.token_ids,
            "num_forced": self.num_forced, "sampling": self.sampling, "tenant": self.tenant,
            "deadline_s": self.deadline_s,
        }  # fmt: skip

    def reserve_message(self) -> Reserve:
        peer = None if self.mode is HandoverMode.LOCAL else (self.prefill_as or self.direct.p)
        return Reserve(
            **self._common(),
            receiver_incarnation=self.direct.d.incarnation,
            mode=self.mode,
            prefill=peer,
            use_prefix_cache=self.use_prefix_cache and self.decode_may_hit,
        )

    def prefill_message(self) -> PrefillRequest:
        return PrefillRequest(
            **self._common(),
            receiver_incarnation=self.direct.p.incarnation,
            decode=self.direct.d,
            use_prefix_cache=self.use_prefix_cache and self.prefill_may_hit,
        )


class Reserving:
    """An open Reserve call and what came of it."""

    def __init__(self, direct: Direct, message: Reserve) -> None:
        self._channel = open_channel(direct.d.control)
        stub = authenticated(decode_pb2_grpc.DecodeServiceStub(self._channel), direct.secret)
        self.call = stub.Reserve(convert.reserve_to_pb(message))
        self.key = message.key
        self._num_forced = message.num_forced
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob | None] = []
        self.ended: Ended | None = None

    async def next(self) -> Reserved | Refused | Token | Ended:
        """The next event."""
        answer = await self.call.read()
        if not isinstance(answer, decode_pb2.ReserveResponse):
            raise AssertionError(f"the stream is over: {await self.call.code()} {await self.call.details()}")
        event = convert.decode_event_from_pb(answer)
        if isinstance(event, Token):
            assert event.index == self._num_forced + len(self.tokens)
            self.tokens.append(event.token_id)
            self.logprobs.append(event.logprob)
        if isinstance(event, Ended):
            self.ended = event
        return event

    async def finish(self) -> Ended:
        """Reads on to the end."""
        while self.ended is None:
            event = await self.next()
            assert not isinstance(event, Refused), event
        return self.ended

    async def close(self) -> None:
        """Breaks the stream, as a router that dies does."""
        self.call.cancel()
        await self._channel.close(None)


def reserve(ask: Ask) -> Reserving:
    """Opens Reserve on the decode worker."""
    return Reserving(ask.direct, ask.reserve_message())


def prefill(ask: Ask) -> asyncio.Task[Prefilled | Refused]:
    """Opens Prefill on the prefill worker."""

    async def call() -> Prefilled | Refused:
        channel = open_channel(ask.direct.p.control)
        try:
            stub = authenticated(prefill_pb2_grpc.PrefillServiceStub(channel), ask.direct.secret)
            return convert.prefill_result_from_pb(
                await stub.Prefill(convert.prefill_to_pb(ask.prefill_message()))
            )
        finally:
            await channel.close(None)

    return asyncio.ensure_future(call())


async def generate(ask: Ask) -> tuple[list[int], Ended]:
    """Both calls at once, to the end."""
    call, ended = await stream(ask)
    return call.tokens, ended


async def stream(ask: Ask) -> tuple[Reserving, Ended]:
    """As `generate`; the call, which has all that came, is closed."""
    half = prefill(ask) if ask.mode is HandoverMode.DISAGGREGATED else None
    call = reserve(ask)
    ended = await call.finish()
    if half is not None:
        await half
    await call.close()
    return call, ended


async def stalled_listener() -> AsyncIterator[str]:
    """host:port of a listener that takes connections and never answers: a transfer that stands still."""
    held: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda r, w: held.append(w), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    yield f"{host}:{port}"
    for writer in held:
        writer.close()
    server.close()
    await server.wait_closed()
