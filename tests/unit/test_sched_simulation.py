"""Any interleaving of requests, cancels, failures and preemptions on a tiny pool gives the streams of an
unbounded run, keeps the pool's accounts, and ends with an idle pool. One seed is one run."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from pdserve.sched.plan import PageReady, SeqFailed, SeqFinished, SeqKind, SeqStopped
from pdserve.sched.scheduler import SchedConfig, pages_needed
from pdserve.sched.sequence import PATIENCE_S
from pdserve.types import FinishReason
from tests.unit.sched_sim import Sim, oracle

_KINDS = ("full", "full", "full", "prefill_only", "handed_over", "forced")


def _config(rng: Random) -> SchedConfig:
    return SchedConfig(
        page_size=rng.choice([1, 2, 4]),
        chunk_tokens=rng.choice([2, 3, 4, 8]),
        token_budget=rng.randint(1, 16),
        max_num_seqs=rng.randint(1, 6),
        deterministic=rng.random() < 0.5,
        floor_pages=rng.randint(0, 2),
        prefix_caching=rng.random() < 0.7,
        end_token_ids=rng.choice([(), (7,)]),
    )


def _submit(sim: Sim, rng: Random) -> None:
    kind = rng.choice(_KINDS)
    prompt = [rng.randint(0, 1) for _ in range(rng.randint(1, 14))]  # two tokens: prefixes repeat
    seq_id, max_tokens = f"s{len(sim.specs)}", rng.randint(2, 9)
    if kind == "handed_over":
        growth, seal_tail = rng.randint(0, 2), rng.random() < 0.5
        sim.hand_over(seq_id, prompt, max_tokens=max_tokens, growth=growth, seal_tail=seal_tail)
        return
    sim.submit(
        seq_id,
        [*prompt, 1] if kind == "forced" else prompt,
        max_tokens=max_tokens,
        num_prompt=len(prompt),
        priority=rng.choice([0, 0, 0, -1, 1]),
        kind=SeqKind.PREFILL_ONLY if kind == "prefill_only" else SeqKind.FULL,
        use_prefix_cache=rng.random() < 0.9,
        arrival=sim.gap_s * (len(sim.specs) + rng.choice([0.0, 0.0, -2.5])),
    )


def _act(sim: Sim, rng: Random) -> None:
    """One thing that may happen between two events of a worker."""
    live = [seq_id for seq_id in sim.specs if sim.sched.has(seq_id)]
    some = rng.choice([*live, "s0", "nobody"])
    dice = rng.random()
    if dice < 0.30:
        _submit(sim, rng)
    elif dice < 0.36:
        sim.cancel(some)
    elif dice < 0.39 and (sim.in_flight or sim.begin()):
        sim.end(frozenset({some}))
    elif dice < 0.42:
        sim.take_outside(rng.randint(1, 3))
    elif dice < 0.46:
        sim.give_back()
    elif dice < 0.55 and sim.in_flight is None:
        sim.begin()
    else:
        sim.step()
    sim.check()


def _check_stream(sim: Sim, seq_id: str) -> None:
    spec, event = sim.specs[seq_id], sim.over[seq_id]
    end = sim.config.end_token_ids[0] if sim.config.end_token_ids else -1
    given = [] if spec.pages else [*spec.token_ids[spec.num_prompt :]]
    got = given + sim.tokens[seq_id]
    want = oracle(spec.token_ids, spec.num_prompt, spec.sampling, end)
    assert got == want[: len(got)]
    if not isinstance(event, SeqFinished):
        assert event is None or isinstance(event, SeqFailed | SeqStopped)
    elif spec.kind is SeqKind.PREFILL_ONLY:
        assert len(got) == 1
        assert event.reason is (FinishReason.STOP if got[0] == end else None)
    else:
        assert got == want
        assert event.reason is (FinishReason.STOP if want[-1] == end else FinishReason.LENGTH)


def _run(seed: int, num_homes: int = 1) -> Counter[str]:
    rng = Random(seed)
    config = _config(rng)
    each = pages_needed(15, 9, config.page_size) + rng.randint(0, 6)
    gap_s = rng.choice([1.0, 2 * PATIENCE_S])  # with short gaps turns and ages are not in one order
    sim = Sim(config, num_homes * each, num_homes, gap_s)
    for _ in range(rng.randint(5, 80)):
        _act(sim, rng)
    sim.run()
    assert set(sim.over) == set(sim.specs)
    for seq_id in sim.specs:
        _check_stream(sim, seq_id)
    seen = Counter(type(event).__name__ for event in sim.log)
    seen["cache_hit"] = sum(isinstance(event, PageReady) and event.cached for event in sim.log)
    seen["copy"] = sum(len(plan.copies) for plan in sim.plans)
    for plan in sim.plans:
        seen["homes at once"] += len({sim.manager.homes.home(step.pages[0]) for step in plan.seqs}) > 1
    return seen


@pytest.mark.parametrize("block", range(4))
def test_streams_do_not_depend_on_the_schedule(block: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(block * 80, block * 80 + 80):
        seen += _run(seed)
    happened = {"Preempted", "cache_hit", "copy", "SeqStopped", "SeqFailed", "SeqFinished", "PromptDone"}
    assert all(seen[name] >= 3 for name in happened), seen


@pytest.mark.parametrize("num_homes", [2, 3])
def test_nor_on_the_homes_of_a_pool(num_homes: int) -> None:
    """Each sequence's pages, copied ones too, lie in one home; `Sim` judges every plan."""
    seen: Counter[str] = Counter()
    for seed in range(1000, 1160):
        seen += _run(seed, num_homes)
    happened = {"Preempted", "cache_hit", "copy", "SeqStopped", "SeqFailed", "SeqFinished", "homes at once"}
    assert all(seen[name] >= 3 for name in happened), seen
