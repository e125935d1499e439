"""The seam proven: production's pure code, all of it, on a virtual clock, without faults. 50 seeds.

Each seed runs 2 prefill and 2 decode workers (or aggregated ones) with pools too small for comfort, shared
prefixes, cancels at random moments; every stream must be the one right answer and every pool end idle.
"""

from __future__ import annotations

import pytest

from pdserve.types import FinishReason, Role
from tests.simulation.model import END_TOKEN, VOCAB, reference
from tests.simulation.world import SimRouter, SimWorker, WorkerShape, World

NUM_SEEDS = 50


def _fleet(world: World) -> SimRouter:
    rng = world.rng
    page_size = rng.choice((2, 4, 8))
    chunk = page_size * rng.choice((1, 2, 4))
    pages = rng.randint(64, 128) // page_size + 12
    threshold = rng.choice((0, 0, 6))
    roles = [Role.PREFILL] * 2 + [Role.DECODE] * 2
    if rng.random() < 0.2:
        roles = [Role.AGGREGATED] * 2
    workers = [
        SimWorker(
            world,
            f"{role}-{i}",
            WorkerShape(
                role=role, num_pages=pages, page_size=page_size, chunk_tokens=chunk, local_threshold=threshold
            ),
        )
        for i, role in enumerate(roles)
    ]
    return SimRouter(world, workers)


def _prompts(world: World, count: int) -> list[tuple[int, ...]]:
    """Some share prefixes with earlier ones, some are cut or grown copies."""
    rng = world.rng
    prompts: list[tuple[int, ...]] = []
    for _ in range(count):
        prompt = tuple(rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 40)))
        if prompts and rng.random() < 0.4:
            base = rng.choice(prompts)
            prompt = base[: rng.randint(1, len(base))] + prompt[: rng.randint(0, 12)]
        prompts.append(prompt)
    return prompts


def run_seed(seed: int, loss: float = 0.0) -> tuple[World, SimRouter, set[str]]:
    """One run to quiescence; returns what is needed to judge it."""
    world = World(seed, loss)
    router = _fleet(world)
    cancelled: set[str] = set()
    for i, prompt in enumerate(_prompts(world, 24)):
        name = f"r{i}"
        longest = world.rng.randint(1, 24)
        start = world.rng.uniform(0, 1.0)
        world.after(start, lambda n=name, p=prompt, m=longest: router.submit(n, p, m))
        if world.rng.random() < 0.2:
            cancelled.add(name)
            world.after(start + world.rng.uniform(0, 1.0), lambda n=name: router.cancel(n))
    world.after(2.1, lambda: None)
    world.run(lambda: world.now > 2.0 and router.done and len(router.requests) == 24)
    world.run(lambda: all(w.core.idle for w in router.workers.values()))
    return world, router, cancelled


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_every_stream_is_right_and_every_pool_ends_idle(seed: int) -> None:
    judge(seed, *run_seed(seed))


@pytest.mark.parametrize("seed", range(20))
def test_lost_messages_between_workers_cost_time_but_nothing_else(seed: int) -> None:
    world, router, cancelled = run_seed(seed, loss=0.1)
    judge(seed, world, router, cancelled)
    assert world.lost or not any(worker.moved for worker in router.workers.values())
    assert world.now < 100.0, "a lost message held a request until its deadline"


def judge(seed: int, world: World, router: SimRouter, cancelled: set[str]) -> None:
    """S1, S2, S3 and idle pools at the end."""
    trace = "\n".join(world.trace[-60:])
    for name, request in router.requests.items():
        state, end = request.state, request.ended
        assert end is not None
        want = reference(state.prompt, state.max_tokens)
        if name in cancelled and end.finish is None:
            assert end.label == "cancelled"
            assert want[: len(request.got)] == tuple(request.got), trace
            continue
        assert tuple(request.got) == want, f"seed {seed} {name}\n{trace}"
        stopped = want[-1] == END_TOKEN
        assert end.finish is (FinishReason.STOP if stopped else FinishReason.LENGTH), trace
    for worker in router.workers.values():
        assert worker.core.idle
        assert worker.core.check_integrity() == ""


def test_runs_cover_handovers_hits_preemptions_and_local_prefills() -> None:
    """The seeds do what they claim: otherwise the test above would prove little."""
    moved = hits = retractions = local = 0
    for seed in range(12):
        _, router, _ = run_seed(seed)
        moved += sum(w.moved for w in router.workers.values())
        ledgers = [r.ended.ledger for r in router.requests.values() if r.ended]
        hits += sum(1 for ledger in ledgers if ledger.decode_hit_tokens or ledger.prefill_cached_tokens)
        retractions += sum(ledger.num_retractions for ledger in ledgers)
        local += sum(1 for ledger in ledgers if ledger.decode_computed_prompt_tokens)
    assert min(moved, hits, retractions, local) > 0, (moved, hits, retractions, local)


def test_a_seed_replays_exactly() -> None:
    assert run_seed(3)[0].trace == run_seed(3)[0].trace
