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
MOST = 60
"""Streams started at most to bring so many to one worker."""
PROMPT_TOKENS = 100
LIMIT_S = 60.0


@dataclass
class Fleet:
    """workers: by name. The page server of the one called "slow" is reached through the proxy; the router
    does not know the one called "spare" at first."""

    stack: Stack
    proxy: SlowProxy
    sponsors: list[Sponsor]
    workers: dict[str, StatusOf]

    def until(self, name: str, wanted: Callable[[WorkerState], bool]) -> WorkerState:
        """Asks a worker until it is as wanted."""
        end = time.monotonic() + LIMIT_S
        while not wanted(state := self.workers[name].state()):
            assert time.monotonic() < end, state
        return state

    def add_spare(self) -> None:
        """Returns when the router knows the spare prefill worker too."""
        spare, secret = self.workers["spare"], bytes.fromhex(self.stack.secret)
        tcp = spare.state().record.peer.tcp
        self.sponsors.append(Sponsor(self.stack.address, spare, secret, tcp=tcp))
        self.stack.until(lambda status: "spare" in usable(status))

    def stop(self) -> None:
        for sponsor in self.sponsors:
            sponsor.close()
        self.proxy.close()
        for worker in self.workers.values():
            worker.close()
        self.stack.stop()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    stack = Stack.start(
        {Role.DECODE: 2},
        router_flags=("--max-queue-wait-s", "1", "--prefill-backlog-tokens", "0"),
        model=str(make_model(tmp_path_factory.mktemp("tiny"))),
        num_pages=1500, transports=("tcp",), decode_pace_s=0.0, threads=1, lease_s=60.0,
    )  # fmt: skip
    secret = bytes.fromhex(stack.secret)
    with stack.client() as client:
        controls = {w.record.peer.worker_id: w.record.peer.control for w in client.get_status().workers}
    for name in ("slow", "spare"):
        stack.launch(name, Role.PREFILL, routers=())
    controls |= {name: stack.wait_started(name) for name in ("slow", "spare")}
    workers = {name: StatusOf(control, secret) for name, control in controls.items()}
    proxy = SlowProxy(workers["slow"].state().record.peer.tcp)
    sponsors = [Sponsor(stack.address, workers["slow"], secret, tcp=proxy.endpoint)]
    stack.until(lambda s: len(usable(s)) == 3)
    made = Fleet(stack, proxy, sponsors, workers)
    yield made
    made.stop()


def ask(client: Client, seed: int, *, max_tokens: int = 30) -> Result:
    return client.generate(
        token_ids=prompt(seed, PROMPT_TOKENS), max_tokens=max_tokens, temperature=0.0, ignore_eos=True,
        no_prefix_cache=True,
    ).result()  # fmt: skip


def fill(fleet: Fleet, name: str, start: Callable[[int], Future[Result]]) -> list[Future[Result]]:
    """Starts streams until so many keys live at a worker. They may be a while on their way to it."""
    streams: list[Future[Result]] = []
    end = time.monotonic() + LIMIT_S
    while fleet.workers[name].state().live < PENDING:
        assert time.monotonic() < end
        if len(streams) < MOST:
            streams.append(start(len(streams)))
        else:
            assert not all(stream.done() for stream in streams), "they were too short to meet there"
    return streams


def test_a_prefill_worker_with_pending_transfers(fleet: Fleet) -> None:
    with fleet.stack.client() as client, ThreadPoolExecutor(MOST + 8) as pool:
        fleet.proxy.limit(30_000.0)
        streams = fill(fleet, "slow", lambda n: pool.submit(ask, client, n))
        fleet.until("slow", lambda s: not s.load.waiting_tokens)
        fleet.add_spare()
        early = fleet.workers["slow"].drain(0.0)
        assert (early.drained, early.remaining > PENDING // 2) == (False, True)
        later = [pool.submit(ask, client, 1000 + n) for n in range(8)]
        assert {f.result(LIMIT_S).ledger.prefill_worker for f in later} == {"spare"}
        assert fleet.workers["slow"].state().live, "transfers still wait for the wire"
        fleet.proxy.limit(None)
        check_drained(fleet, "slow", fleet.workers["slow"].drain(LIMIT_S).drained)
        results = [stream.result(LIMIT_S) for stream in streams]
        truth = [result.token_ids for result in pool.map(lambda n: ask(client, n), range(len(streams)))]
    assert [r.token_ids for r in results] == truth
    assert {r.epochs for r in results} == {1}
    assert {r.ledger.prefill_worker for r in results} == {"slow"}
    assert not any(r.ledger.decode_computed_prompt_tokens for r in results), "pages were pulled, not computed"


def test_a_decode_worker_with_running_streams(fleet: Fleet) -> None:
    long = 400
    with fleet.stack.client() as client, ThreadPoolExecutor(MOST + 8) as pool:
        streams = fill(fleet, "decode-0", lambda n: pool.submit(ask, client, n, max_tokens=long))
        draining = pool.submit(fleet.workers["decode-0"].drain, LIMIT_S)
        fleet.until("decode-0", lambda s: s.load.draining)
        later = [pool.submit(ask, client, 2000 + n) for n in range(8)]
        assert {f.result(LIMIT_S).ledger.decode_worker for f in later} == {"decode-1"}
        results = [stream.result(LIMIT_S) for stream in streams]
        check_drained(fleet, "decode-0", draining.result(LIMIT_S).drained)
        again = pool.map(lambda n: ask(client, n, max_tokens=long), range(len(streams)))
        truth = [result.token_ids for result in again]
    assert [r.token_ids for r in results] == truth
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
