"""Where a step's time goes, and the loops that say what the machine can do at most."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdserve.engine.runner import ModelRunner, page_layout
from pdserve.kernels.peaks import PRODUCTS, products, read
from pdserve.kernels.stack import PHASES
from pdserve.kvcache.pool import KVPool
from pdserve.models.loader import load_model
from pdserve.sched.plan import SeqStep, StepPlan
from pdserve.types import SamplingParams
from tests.support import tiny_models, tiny_moe

PLAN = StepPlan(
    step_id=0,
    seqs=(
        SeqStep(
            seq_id="a", token_ids=tuple(range(40)), start=0, pages=(0, 1, 2), sample=True, sample_counter=0,
            sampling=SamplingParams(),
        ),
    ),
)  # fmt: skip


def runner_of(folder: Path, weights: str = "exact") -> ModelRunner:
    model = load_model(str(folder))
    pool = KVPool.create(page_layout(model.config, page_size=16, dtype=model.dtype), 4, pool_id=1)
    return ModelRunner(model, pool, weights=weights, capture_logits=True)


@pytest.mark.parametrize("weights", ["exact", "w8a8", "w4a8"])
def test_phases_are_timed_only_while_asked_for_and_change_no_bit(tmp_path: Path, weights: str) -> None:
    runner = runner_of(tiny_models.save(tiny_models.llama(), tmp_path), weights)
    seconds = runner.phase_seconds
    assert seconds is not None
    runner.execute(PLAN)
    plain = runner.last_logits["a"]
    assert set(seconds.take().values()) == {0.0}
    seconds.on = True
    result = runner.execute(PLAN)
    taken = seconds.take()
    assert tuple(taken) == PHASES
    assert all(spent > 0 for spent in taken.values())
    assert sum(taken.values()) < result.elapsed_s
    assert torch.equal(runner.last_logits["a"], plain)
    assert set(seconds.take().values()) == {0.0}


def test_models_that_are_not_one_call_have_no_phases(tmp_path: Path) -> None:
    assert runner_of(tiny_models.save(tiny_moe.mixtral(), tmp_path)).phase_seconds is None


def test_products_are_counted_by_chains_lanes_and_threads() -> None:
    done = {kind: products(kind, 10) for kind in PRODUCTS}
    assert done["float32"] > 0
    assert done["int8"] == 4 * done["float32"]
    assert done["bfloat16"] in (0, 2 * done["float32"])
    assert products("float32", 30) == 3 * done["float32"]


def test_reading_takes_every_size_of_whole_units() -> None:
    data = torch.zeros(1 << 20, dtype=torch.uint8)
    data = data[-data.data_ptr() % 64 :]
    for size in (1024, 256 * 1024, 257 * 1024, 513 * 1024):
        read(data[:size])
