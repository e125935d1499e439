"""Draining workers that are in the middle of something: nothing is lost, every text is exact.

Two prefill and two decode workers over tcp, a tiny model. The tests stand in the order in which the workers
go: a drained worker does not come back.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from pdserve.client import Client, Result
from pdserve.errors import Overloaded
from pdserve.rpc.convert import WorkerState
from pdserve.types import Role
from tests.support.proxies import SlowProxy, Sponsor, StatusOf
from tests.support.stack import Stack, usable
from tests.support.storm import make_model, prompt

PENDING = 20
PROMPT_TOKENS = 100
LIMIT_S = 60.0


@dataclass
class Fleet:
    """workers: by name. The page server of the one called "slow" is reached through the proxy."""

    stack: Stack
    proxy: SlowProxy
    sponsor: Sponsor
    workers: dict[str, StatusOf]

    def until(self, name: str, wanted: Callable[[WorkerState], bool]) -> WorkerState:
        """Asks a worker until it is as wanted."""
        end = time.monotonic() + LIMIT_S
        while not wanted(state := self.workers[name].state()):
            assert time.monotonic() < end, state
        return state

    def stop(self) -> None:
        self.sponsor.close()
        self.proxy.close()
        for worker in self.workers.values():
            worker.close()
        self.stack.stop()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    stack = Stack.start(
        {Role.DECODE: 2, Role.PREFILL: 1},
        router_flags=("--max-queue-wait-s", "1", "--prefill-backlog-tokens", "0"),
        model=str(make_model(tmp_path_factory.mktemp("tiny"))),
        num_pages=1500, transports=("tcp",), decode_pace_s=0.0, threads=1,
    )  # fmt: skip
    stack.launch("slow", Role.PREFILL, routers=())
    secret = bytes.fromhex(stack.secret)
    slow = StatusOf(stack.wait_started("slow"), secret)
    proxy = SlowProxy(slow.state().record.peer.tcp)
    sponsor = Sponsor(stack.address, slow, secret, tcp=proxy.endpoint)
    peers = [w.record.peer for w in stack.until(lambda s: len(usable(s)) == 4).workers]
    workers = {peer.worker_id: StatusOf(peer.control, secret) for peer in peers}
    made = Fleet(stack, proxy, sponsor, workers)
    yield made
    made.stop()


def ask(client: Client, seed: int, *, max_tokens: int = 30) -> Result:
    return client.generate(
        token_ids=prompt(seed, PROMPT_TOKENS), max_tokens=max_tokens, temperature=0.0, ignore_eos=True,
        no_prefix_cache=True,
    ).result()  # fmt: skip


def undisturbed(client: Client, count: int, *, max_tokens: int = 30) -> list[tuple[int, ...]]:
    return [tuple(ask(client, n, max_tokens=max_tokens).token_ids) for n in range(count)]


def test_a_prefill_worker_with_pending_transfers(fleet: Fleet) -> None:
    with fleet.stack.client() as client, ThreadPoolExecutor(2 * PENDING) as pool:
        wanted = undisturbed(client, 2 * PENDING)
        fleet.proxy.limit(50_000.0)
        streams = [pool.submit(ask, client, n) for n in range(2 * PENDING)]
        fleet.until("slow", lambda s: s.live >= PENDING - 2 and not s.load.waiting_tokens)
        early = fleet.workers["slow"].drain(0.0)
        assert (early.drained, early.remaining >= PENDING - 3) == (False, True)
        later = [pool.submit(ask, client, 1000 + n) for n in range(8)]
        assert {f.result(LIMIT_S).ledger.prefill_worker for f in later} == {"prefill-0"}
        still = fleet.workers["slow"].state()
        assert still.live >= PENDING - 6, "its transfers still wait for the wire"
        fleet.proxy.limit(None)
        done = fleet.workers["slow"].drain(LIMIT_S)
        check_drained(fleet, "slow", done.drained)
        results = [stream.result(LIMIT_S) for stream in streams]
    assert [tuple(r.token_ids) for r in results] == wanted
    assert {r.epochs for r in results} == {1}
    handed = [r for r in results if r.ledger.prefill_worker == "slow"]
    assert len(handed) >= PENDING - 2
    assert all(r.ledger.decode_computed_prompt_tokens == 0 for r in handed), "pages were pulled, not computed"


def test_a_decode_worker_with_running_streams(fleet: Fleet) -> None:
    long = 300
    with fleet.stack.client() as client, ThreadPoolExecutor(2 * PENDING + 8) as pool:
        wanted = undisturbed(client, 2 * PENDING, max_tokens=long)
        streams = [pool.submit(ask, client, n, max_tokens=long) for n in range(2 * PENDING)]
        fleet.until("decode-0", lambda s: s.load.num_running >= PENDING)
        draining: Future[object] = pool.submit(fleet.workers["decode-0"].drain, LIMIT_S)
        fleet.until("decode-0", lambda s: s.load.draining)
        later = [pool.submit(ask, client, 2000 + n) for n in range(8)]
        assert {f.result(LIMIT_S).ledger.decode_worker for f in later} == {"decode-1"}
        results = [stream.result(LIMIT_S) for stream in streams]
        check_drained(fleet, "decode-0", draining.result(LIMIT_S).drained)  # type: ignore[attr-defined]
    assert [tuple(r.token_ids) for r in results] == wanted
    assert {r.epochs for r in results} == {1}
    assert sum(r.ledger.decode_worker == "decode-0" for r in results) >= PENDING


def check_drained(fleet: Fleet, name: str, drained: bool) -> None:
    """Drained means that no key is left in any state, and that no page is in anybody's hands."""
    state = fleet.workers[name].state(check=True)
    assert (drained, state.live, state.closing, state.idle) == (True, 0, 0, True)
    assert state.load.retiring_pages == state.load.filling_pages == state.load.reserved_pages == 0
    assert not state.integrity_problem


def test_sigterm_ends_a_drained_worker_cleanly(fleet: Fleet) -> None:
    process = fleet.stack.workers.pop("decode-0")
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 0


def test_without_another_worker_new_requests_are_refused_with_a_hint(fleet: Fleet) -> None:
    for name in set(fleet.stack.workers) & {"decode-0", "decode-1"}:
        assert fleet.workers[name].drain(LIMIT_S).drained
    with fleet.stack.client() as client, pytest.raises(Overloaded) as caught:
        ask(client, 1)
    assert caught.value.retry_after_s
