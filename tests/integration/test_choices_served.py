"""Several choices over real workers: the prompt's pages are shared, faults change no token, nothing is left.

A tiny model in deterministic float32; the truth is each choice asked for alone with its own seed. Of three
decode workers two are killed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pdserve.client import Client, Result
from pdserve.errors import Cancelled
from pdserve.rpc import convert
from pdserve.rpc.convert.cluster import WorkerState
from pdserve.rpc.fleet_auth import authenticated
from pdserve.rpc.v1 import cluster_pb2, cluster_pb2_grpc
from pdserve.types import Role
from tests.support import tiny_models
from tests.support.stack import Stack, channel_to

PAGE, LONG = 16, 1000
MANY = 320
"""Tokens that take long enough for what is done while they are made."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model = tiny_models.llama(max_position_embeddings=2048)
    path = tiny_models.save(model, tmp_path_factory.mktemp("tiny"))
    made = Stack.start({Role.PREFILL: 1, Role.DECODE: 3}, model=str(path), num_pages=700)
    yield made
    made.stop()


@pytest.fixture(autouse=True)
def all_idle_after(stack: Stack) -> Iterator[None]:
    yield
    stack.until_idle()


def prompt(seed: int, length: int = LONG) -> list[int]:
    return [(seed * 7919 + i * 104729 + 13) % 250 for i in range(length)]


def ask(client: Client, tokens: list[int], **options: object) -> Result:
    return client.generate(
        token_ids=tokens, temperature=1.0, ignore_eos=True, no_text=True, **options  # type: ignore[arg-type]
    ).result()  # fmt: skip


def alone(
    client: Client, tokens: list[int], num: int, *, seed: int, max_tokens: int
) -> list[tuple[int, ...]]:
    """Each choice as a request of its own."""
    results = [ask(client, tokens, seed=seed + i, max_tokens=max_tokens) for i in range(num)]
    return [result.token_ids for result in results]


def state_of(stack: Stack, worker_id: str) -> WorkerState:
    with stack.client() as client:
        workers = client.get_status().workers
    address = next(w.record.peer.control for w in workers if w.record.peer.worker_id == worker_id)
    with channel_to(address) as channel:
        stub = authenticated(cluster_pb2_grpc.WorkerServiceStub(channel), bytes.fromhex(stack.secret))
        answer = stub.GetWorkerStatus(cluster_pb2.GetWorkerStatusRequest(), timeout=30)
    return convert.worker_state_from_pb(answer)


@pytest.mark.parametrize("no_prefix_cache", [False, True])
def test_choices_equal_requests_of_their_own(stack: Stack, no_prefix_cache: bool) -> None:
    tokens = prompt(1 + no_prefix_cache, 100)
    with stack.client() as client:
        result = ask(client, tokens, n=4, seed=70, max_tokens=20, no_prefix_cache=no_prefix_cache)
        assert [c.token_ids for c in result.choices] == alone(client, tokens, 4, seed=70, max_tokens=20)
    assert result.usage.completion_tokens == 80


@pytest.mark.parametrize("no_prefix_cache", [False, True])
def test_eight_choices_hold_the_prompt_once_and_compute_only_its_tail(
    stack: Stack, no_prefix_cache: bool
) -> None:
    """Pages held on decode: the prompt's full ones, and eight tails; of each extra choice less than two pages
    of the prompt are computed."""
    with stack.client() as client:
        for seed in range(20, 25):
            stream = client.generate(
                token_ids=prompt(seed + 100 * no_prefix_cache), n=8, max_tokens=MANY, temperature=1.0,
                seed=seed, ignore_eos=True, no_text=True, no_prefix_cache=no_prefix_cache,
            )  # fmt: skip
            started: set[int] = set()
            for chunk in stream:
                started.add(chunk.choice)
                if len(started) == 8:
                    break
            assert stream.request_id is not None
            first = client.explain(stream.request_id)
            state = state_of(stack, first.decode_worker)
            result = stream.result()
            if state.live == 8:
                break
        else:
            pytest.fail("never saw all eight choices run")
        found = client.explain(result.request_id)
        others = [client.explain(name) for name in found.choice_ids]
    load = state.load
    held = load.num_pages - load.free_pages - load.evictable_pages
    assert LONG // PAGE < held <= LONG // PAGE + 8 * (MANY // PAGE + 3)
    assert found.ledger.prefill_computed_tokens == LONG
    assert found.ledger.decode_computed_prompt_tokens == 0
    for other in others:
        assert other.decode_worker == first.decode_worker
        assert 0 < other.ledger.decode_computed_prompt_tokens < 2 * PAGE
        assert other.ledger.decode_hit_tokens == LONG // PAGE * PAGE


def test_a_decode_worker_that_dies_in_the_midst_changes_no_token(stack: Stack) -> None:
    tokens = prompt(40, 200)
    with stack.client() as client, ThreadPoolExecutor(1) as pool:
        wanted = ask(client, tokens, n=4, seed=5, max_tokens=2 * MANY)
        streaming = threading.Event()

        def run() -> Result:
            stream = client.generate(
                token_ids=tokens, n=4, seed=5, max_tokens=2 * MANY, temperature=1.0, ignore_eos=True,
                no_prefix_cache=True,
            )  # fmt: skip
            started: set[int] = set()
            for chunk in stream:
                started.add(chunk.choice)
                if len(started) == 4:
                    break
            ids.append(str(stream.request_id))
            streaming.set()
            return stream.result()

        ids: list[str] = []
        running = pool.submit(run)
        assert streaming.wait(60)
        name = client.explain(ids[0]).decode_worker
        stack.kill(name)
        result = running.result()
    assert [c.token_ids for c in result.choices] == [c.token_ids for c in wanted.choices]
    assert result.epochs > 1


def test_a_cancel_in_the_midst_frees_all_pages(stack: Stack) -> None:
    with stack.client() as client:
        stream = client.generate(token_ids=prompt(50), n=8, max_tokens=800, temperature=1.0, ignore_eos=True)
        started: set[int] = set()
        for chunk in stream:
            started.add(chunk.choice)
            if len(started) == 8:
                break
        stream.cancel()
        with pytest.raises(Cancelled):
            stream.result()
    stack.until(lambda status: status.running == 0)
    stack.until_idle()


def test_best_of_gives_the_likeliest_of_its_choices(stack: Stack) -> None:
    tokens = prompt(60, 90)
    with stack.client() as client:
        every = [ask(client, tokens, seed=9 + i, max_tokens=12, logprobs=0) for i in range(5)]
        result = ask(client, tokens, seed=9, max_tokens=12, n=2, best_of=5, logprobs=0)
    means = {r.token_ids: sum(entry.logprob for entry in r.logprobs) / len(r.token_ids) for r in every}
    best = sorted(means, key=lambda ids: -means[ids])[:2]
    assert [c.token_ids for c in result.choices] == best
    for choice in result.choices:
        total = choice.cumulative_logprob
        assert total == pytest.approx(12 * means[choice.token_ids], abs=1e-4)


def made_by(stack: Stack) -> dict[str, int]:
    """How many tries each decode worker has ended, of those it still remembers."""
    names = [name for name in stack.workers if name.startswith("decode")]
    return {name: state_of(stack, name).tombstones for name in names}


def test_beams_go_on_elsewhere_when_their_worker_dies(stack: Stack) -> None:
    tokens = prompt(70, 120)
    options: Any = {"token_ids": tokens, "beam_width": 4, "n": 4, "max_tokens": 100, "no_text": True}
    with stack.client() as client, ThreadPoolExecutor(1) as pool:
        wanted = client.generate(**options).result()
        before = made_by(stack)
        running = pool.submit(client.generate(**options).result)
        while not (busy := [name for name, num in made_by(stack).items() if num > before[name] + 20]):
            assert not running.done(), "the search ended before it was seen"
        stack.kill(busy[0])
        result = running.result()
    assert [c.token_ids for c in result.choices] == [c.token_ids for c in wanted.choices]
    assert result.epochs > 1


def test_a_beam_search_that_is_cancelled_frees_all_pages(stack: Stack) -> None:
    with stack.client() as client:
        before = made_by(stack)
        stream = client.generate(token_ids=prompt(80, 120), beam_width=8, max_tokens=800)
        while not any(num > before[name] + 20 for name, num in made_by(stack).items()):
            pass
        stream.cancel()
        with pytest.raises(Cancelled):
            stream.result()
    stack.until(lambda status: status.running == 0)
