"""A decode and a prefill role without a network: calls with genuine tickets, and what came back by kind."""

from __future__ import annotations

from typing import Any

from decode_worker.loop import DecodeRole
from kvtransfer import ticket
from kvtransfer.digest import digest_of_digests
from kvtransfer.session.guard import RoleContext, finish_record
from kvtransfer.transport import ReadStatus
from pdserve.kvcache.contentkeys import page_keys
from pdserve.kvcache.manager import PageManager
from pdserve.messages import Announce, Finish, PrefillRequest, Reserve
from pdserve.sched.config import SchedConfig
from pdserve.sched.scheduler import StepScheduler
from pdserve.types import HandoverMode, Key, PageName, PeerRef, SamplingParams
from pdserve.worker.core import WorkerCore
from prefill_worker.loop import PrefillRole

SECRET = b"secret-of-these-tests-16"
SIZE, L = 4, 10.0
P = PeerRef(worker_id="p", incarnation=11, control="p")
P2 = PeerRef(worker_id="p2", incarnation=12, control="p2")
D = PeerRef(worker_id="d", incarnation=21, control="d")
SAMPLING = SamplingParams(max_tokens=8)
TENANT = "t"


def key(epoch: int = 0, request_id: str = "r") -> Key:
    return Key(request_id=request_id, epoch=epoch)


def prompt(length: int = 14) -> tuple[int, ...]:
    return tuple(range(100, 100 + length))


def digest(index: int) -> bytes:
    return bytes([index + 1]) * 16


def mint(call: dict[str, Any], prefill: PeerRef | None, expires: float) -> bytes:
    mode = HandoverMode.LOCAL if prefill is None else HandoverMode.DISAGGREGATED
    facts = ticket.TicketFacts(
        key=call["key"], prefill_incarnation=prefill.incarnation if prefill else 0,
        decode_incarnation=D.incarnation, emitter=D.worker_id, mode=mode, tenant=TENANT,
        request_hash=ticket.request_hash(call["token_ids"], call["sampling"]), page_budget=1000,
        num_choices=1, prefill_expires=expires, decode_expires=expires,
    )  # fmt: skip
    return ticket.mint(SECRET, facts)


def _common(key_: Key, tokens: tuple[int, ...], num_forced: int) -> dict[str, Any]:
    return {
        "key": key_, "token_ids": tokens, "num_forced": num_forced, "sampling": SAMPLING, "tenant": TENANT,
        "deadline_s": 100.0,
    }  # fmt: skip


def reserve_call(
    key_: Key, *, prefill: PeerRef | None = P, tokens: tuple[int, ...] = prompt(), num_forced: int = 0,
    expires: float = 1000.0,
) -> Reserve:  # fmt: skip
    common = _common(key_, tokens, num_forced)
    mode = HandoverMode.LOCAL if prefill is None else HandoverMode.DISAGGREGATED
    return Reserve(
        **common, receiver_incarnation=D.incarnation, ticket=mint(common, prefill, expires), mode=mode,
        prefill=prefill,
    )  # fmt: skip


def prefill_call(
    key_: Key, *, tokens: tuple[int, ...] = prompt(), expires: float = 1000.0
) -> PrefillRequest:  # fmt: skip
    common = _common(key_, tokens, 0)
    return PrefillRequest(
        **common, receiver_incarnation=P.incarnation, ticket=mint(common, P, expires), decode=D
    )


class Worker:
    """Pages, scheduler, one role, and the core around them; the time is the test's."""

    def __init__(self, peer: PeerRef, num_pages: int, **context: Any) -> None:
        self.pages = PageManager(num_pages, 7)
        self.ctx = RoleContext(
            worker_id=peer.worker_id, incarnation=peer.incarnation, page_size=SIZE, max_context=1000,
            model="m", numerics="n", secret=SECRET, lease_s=L, growth_tokens=4, **context,
        )  # fmt: skip
        config = SchedConfig(
            page_size=SIZE, chunk_tokens=SIZE, token_budget=64, max_num_seqs=8, model="m", numerics="n"
        )
        self.scheduler = StepScheduler(config, self.pages)


class Decode(Worker):
    """A decode worker and the prefill side's words to it."""

    def __init__(self, num_pages: int = 32, **context: Any) -> None:
        super().__init__(D, num_pages, **context)
        self.role = DecodeRole(self.ctx, self.pages, self.scheduler, page_bytes=1)
        self.started: list[Any] = []
        self.core = WorkerCore(self.pages, self.scheduler, [self.role])

    def announce(self, key_: Key, index: int, *, peer: PeerRef = P, now: float = 0.0) -> list[Any]:
        """Page `index` of the prompt, as the prefill worker names it."""
        keys = page_keys(prompt(), SIZE, salt=TENANT.encode(), model="m", numerics="n")
        message = Announce(
            key=key_, index=index, page=PageName(pool_id=9, page=index, generation=1),
            valid_rows=min(SIZE, len(prompt()) - index * SIZE), content_key=keys[index], digest=digest(index),
        )  # fmt: skip
        return self.role.message(peer.worker_id, peer.incarnation, message, now)

    def read(self, started: list[Any], status: ReadStatus = ReadStatus.GOOD, now: float = 0.0) -> list[Any]:
        """Ends the one read that `started` began."""
        (read,) = of(started, "StartRead")
        return self.role.read_done(read.read_id, status, b"", "tcp", now)

    def verify(self, key_: Key, *indices: int, peer: PeerRef = P) -> list[Any]:
        """Announces and reads pages."""
        return [e for i in indices for e in self.read(self.announce(key_, i, peer=peer))]

    def finish(self, key_: Key, indices: tuple[int, ...], peer: PeerRef = P) -> list[Any]:
        """The first token, over the pages announced in this epoch."""
        bare = Finish(
            key=key_, index=0, token_id=5, next_counter=1, finish=None, num_announced=len(indices),
            digest_of_digests=b"",
        )  # fmt: skip
        pairs = [(i, digest(i)) for i in indices]
        sealed = Finish(
            key=key_, index=0, token_id=5, next_counter=1, finish=None, num_announced=len(indices),
            digest_of_digests=digest_of_digests(pairs, finish_record(bare)),
        )  # fmt: skip
        return self.role.message(peer.worker_id, peer.incarnation, sealed, 0.0)


class Prefill(Worker):
    """A prefill worker."""

    def __init__(self, num_pages: int = 32, **context: Any) -> None:
        super().__init__(P, num_pages, **context)
        self.role = PrefillRole(self.ctx, self.pages, self.scheduler)
        self.core = WorkerCore(self.pages, self.scheduler, [self.role])

    def said(self, message: Any, now: float = 0.0) -> list[Any]:
        """What decode says."""
        return self.role.message(D.worker_id, D.incarnation, message, now)


def of(effects: list[Any], kind: str) -> list[Any]:
    """Effects of this kind, or messages of this kind in them."""
    found = [e for e in effects if type(e).__name__ == kind]
    messages = [e.message for e in effects if hasattr(e, "message")]
    return found + [m for m in messages if type(m).__name__ == kind]
