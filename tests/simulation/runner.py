"""One seed, one run: `run_seed(seed, bias=Bias(...)) -> Run` raises `Breach(rule, detail, trace)` at the
first breach.

The planted-defect suite works on this: a defect is a patch of a production module that the test applies
around `run_seed`; `Bias` (see `bias`) leans the run so that the defect matters, and `Bias.mask` switches
off, in the simulated data plane and processes only, the layer that would hide it. `Run` has the run's
counters; one that has a bound (zombie commits, false expiries, deadline failures, quarantined pages, over-
credit announces, unexplained failures, false alarms, false retirements) raises `Breach` under that name. A
run is exactly repeatable: the same seed, bias and code give the same trace. `python -m
tests.simulation.run --seed N --trace` replays one by hand.

A run: requests arrive during a storm of faults (`faults`); then everything heals; then everybody ends, a
few last requests must succeed, and everything must be idle within a lease.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tests.simulation import coverage
from tests.simulation.bias import LEASE_S, Bias
from tests.simulation.faults import STORM_S
from tests.simulation.fleet import Fleet
from tests.simulation.model import VOCAB
from tests.simulation.router import Wish
from tests.simulation.world import Breach, World

__all__ = ["Bias", "Breach", "Run", "run_seed"]

TENANTS = ("tenant-a", "tenant-b")
MIN_REQUESTS, MIN_EVENTS, MIN_FAULTS = 20, 500, 3
NUM_PROBES = 3
LONGEST_PROMPT = 48
LIMIT_S = 200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run was. Counters by name; trace only if it was asked for."""

    seed: int
    num_requests: int
    num_events: int
    num_faults: int
    seconds: float
    arrows: Counter[str]
    faults: Counter[str]
    counters: Counter[str]
    trace: str = ""


def run_seed(seed: int, *, bias: Bias = Bias(), trace: bool = False) -> Run:
    """One run to the end. Raises Breach."""
    world = World(seed, bias)
    fleet = Fleet(world)
    with coverage.observed(world.arrows, fleet.judge):
        _storm(world, fleet)
        _calm(world, fleet)
        _probe(world, fleet)
        _drain(world, fleet)
    run = Run(
        seed=seed, num_requests=len(fleet.router.requests), num_events=world.num_events,
        num_faults=sum(world.faults.values()), seconds=world.now, arrows=world.arrows, faults=world.faults,
        counters=world.counters, trace=world.trace.text(None) if trace else "",
    )  # fmt: skip
    if not bias.only:
        _check_size(run)
    return run


def _check_size(run: Run) -> None:
    """A run that does little proves little."""
    assert run.num_requests >= MIN_REQUESTS, run.num_requests
    assert run.num_events >= MIN_EVENTS, run.num_events
    assert run.num_faults >= MIN_FAULTS, run.num_faults


def _storm(world: World, fleet: Fleet) -> None:
    for wish, at in _wishes(world):
        world.after(at, lambda w=wish: _submit(world, fleet, w))  # type: ignore[misc]
    fleet.faults.plan()
    world.run(lambda: world.now >= STORM_S, STORM_S)
    world.now = STORM_S


def _wishes(world: World) -> list[tuple[Wish, float]]:
    """What clients ask for, and when: some prompts share prefixes, some are cut or grown copies."""
    rng, bias = world.rng, world.bias
    prompts: list[tuple[int, ...]] = []
    out = []
    bursts = world.bursts = [rng.uniform(0.0, STORM_S * 0.8) for _ in range(rng.choice((2, 6, 30)))]
    for i in range(bias.num_requests or rng.randint(22, 30)):
        prompt = tuple(rng.randrange(1, VOCAB) for _ in range(rng.randint(16 if world.tight else 1, 40)))
        if prompts and rng.random() < (0.5 if bias.sharing is None else bias.sharing):
            base = rng.choice(prompts)
            prompt = base[: rng.randint(1, len(base))] + prompt[: rng.randint(0, 12)]
        prompt = prompt[:LONGEST_PROMPT]
        prompts.append(prompt)
        out.append((_wish(world, f"r{i}", prompt), rng.choice(bursts) + rng.uniform(0.0, 0.1)))
    return out


def _wish(world: World, name: str, prompt: tuple[int, ...]) -> Wish:
    rng = world.rng
    longest = rng.randint(1, 24)
    hasty = rng.random() < (0.12 if world.bias.hasty is None else world.bias.hasty)
    return Wish(
        name=name, tenant=rng.choice(TENANTS), prompt=prompt, max_tokens=longest, sampled=rng.random() < 0.4,
        deadline_s=rng.uniform(0.02, 1.5) if hasty else rng.uniform(80.0, 120.0),
        stop_after=rng.randint(1, longest) if rng.random() < 0.1 else 0, priority=rng.choice((0, 1, 2)),
    )  # fmt: skip


def _submit(world: World, fleet: Fleet, wish: Wish) -> None:
    request = fleet.router.submit(wish)
    if request is None:
        return
    if wish.deadline_s < 60.0:
        world.fault("deadline", "client", f"{wish.name} has {wish.deadline_s:.2f} s")
    rng, share = world.rng, world.bias.cancels
    if rng.random() < (0.2 if share is None else share):
        world.after(rng.uniform(0.0, rng.choice((0.1, 1.0, 4.0))), lambda: _cancel(world, fleet, wish.name))


def _cancel(world: World, fleet: Fleet, name: str) -> None:
    fleet.router.client_leaves(name)
    if world.bias.reuse_at_once and len(fleet.router.requests) < 60:
        for i in range(2):
            prompt = tuple(world.rng.randrange(1, VOCAB) for _ in range(world.rng.randint(20, 40)))
            _submit(world, fleet, _wish(world, f"{name}x{i}", prompt))


def _calm(world: World, fleet: Fleet) -> None:
    """No fault from here on. Episodes end by themselves by now; what is stopped goes on within two leases."""
    world.calm = True
    world.note("world", "is calm from here on")

    def healthy() -> bool:
        well = all(p.alive and not p.stopped and not p.reads for p in fleet.processes.values())
        return fleet.router.done and well

    if not world.run(healthy, LIMIT_S):
        waiting = [name for name, request in fleet.router.requests.items() if request.end is None]
        raise world.breach("L1", f"nothing is left to happen, or time is up; waiting: {waiting}")
    settled = world.now + 2 * LEASE_S
    world.run(lambda: world.now >= settled, settled)


def _probe(world: World, fleet: Fleet) -> None:
    """Once all is well, requests succeed, and soon."""
    start = world.now
    for i in range(NUM_PROBES):
        prompt = tuple(world.rng.randrange(1, VOCAB) for _ in range(world.rng.randint(1, 40)))
        wish = Wish(
            name=f"probe{i}", tenant=TENANTS[i % 2], prompt=prompt, max_tokens=8, sampled=False,
            deadline_s=60.0, probe=True,
        )  # fmt: skip
        fleet.router.submit(wish)
    world.run(lambda: fleet.router.done, start + 61.0)
    if world.now > start + LEASE_S * world.pace:
        raise world.breach("deadline failures", f"with all well, requests took {world.now - start:.1f} s")


def _drain(world: World, fleet: Fleet) -> None:
    """Within a lease everything is idle."""
    limit = world.now + 1.3 * LEASE_S
    if not world.run(lambda: not fleet.judge.problem_at_end(), limit):
        raise world.breach("L2", f"a lease after the last request: {fleet.judge.problem_at_end()}")
