"""The arithmetic of `pdserve bench`: what a step needs, its floor, plans of steps, percentiles, summaries."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.bench.engine import EngineWish, select
from pdserve.bench.floors import Peaks, Product, Rows, Work, floor_seconds, share
from pdserve.bench.model_work import work_of
from pdserve.bench.percentiles import percentile
from pdserve.bench.serving import Load, Sample, starts, summary
from pdserve.bench.steps import DECODE, PAGE, PREFILL, Case, fill_plans
from pdserve.engine.runner import ModelRunner, page_layout
from pdserve.errors import ConfigError
from pdserve.kvcache.pool import KVPool
from pdserve.models.loader import load_model
from tests.support import tiny_models, tiny_moe

MB = 10**6
PEAKS = Peaks(
    products={"float32": 100e9, "bfloat16": 40e9, "int8": 400e9},
    bandwidth=((10 * MB, 50e9), (100 * MB, 20e9), (1000 * MB, 30e9)),
)


def test_bandwidth_is_that_of_the_largest_size_that_fits_and_never_below_that_of_a_larger_one() -> None:
    assert PEAKS.bytes_per_s(1) == 50e9
    assert PEAKS.bytes_per_s(99 * MB) == 50e9
    assert PEAKS.bytes_per_s(100 * MB) == 30e9
    assert PEAKS.bytes_per_s(5000 * MB) == 30e9


def test_bfloat16_counts_the_faster_of_its_own_products_and_those_of_float32() -> None:
    assert PEAKS.operations("bfloat16") == 100e9
    assert PEAKS.operations("int8") == 400e9


def test_the_better_of_two_measurements_counts() -> None:
    other = Peaks(
        products={"float32": 90e9, "bfloat16": 50e9, "int8": 1e9},
        bandwidth=((10 * MB, 1e9), (100 * MB, 60e9), (1000 * MB, 1e9)),
    )
    best = PEAKS.best_with(other)
    assert best.products == {"float32": 100e9, "bfloat16": 50e9, "int8": 400e9}
    assert [speed for _, speed in best.bandwidth] == [50e9, 60e9, 30e9]


WORK = Work(
    products=(
        Product(phase="qkv", kind="int8", size=20 * MB, size_bytes=20 * MB),
        Product(phase="head", kind="bfloat16", size=10 * MB, size_bytes=20 * MB, wanted_only=True),
    ),
    num_layers=2,
    num_heads=3,
    head_dim=64,
    kv_kind="bfloat16",
    kv_token_bytes=1000,
)


def test_a_small_step_is_bound_by_bytes_and_a_large_one_by_operations() -> None:
    one = floor_seconds(WORK, [Rows(queries=(1,), contexts=(1000,), wanted=1)], PEAKS)
    speed = 50e9  # 40 MB of weights and 1 MB of keys and values are read once a step
    assert one == {"qkv": 20 * MB / speed, "head": 20 * MB / speed, "attention": 1 * MB / speed}
    many = floor_seconds(WORK, [Rows(queries=(1000,), contexts=(1000,), wanted=0)], PEAKS)
    visible = 1000 * 1001 / 2
    assert many == {
        "qkv": 2 * 1000 * 20 * MB / 400e9,
        "attention": pytest.approx(4 * visible * 3 * 64 * 2 / 100e9),
    }


def test_floors_of_steps_add_up() -> None:
    step = Rows(queries=(1, 1), contexts=(5, 9), wanted=2)
    once, twice = (floor_seconds(WORK, [step] * times, PEAKS) for times in (1, 2))
    assert twice == {name: pytest.approx(2 * seconds) for name, seconds in once.items()}


def test_share() -> None:
    assert share(1.0, 4.0) == 0.25
    assert share(1.0, 0.0) == 0.0


@given(context=st.integers(1, 3000), chunk=st.integers(1, 700))
def test_a_prompt_s_chunks_compute_each_token_once_and_see_all_before_it(context: int, chunk: int) -> None:
    case = Case(phase=PREFILL, context=context, chunk=chunk)
    rows, plans = list(case.rows()), case.plans()
    assert sum(sum(step.queries) for step in rows) == case.num_tokens == context
    assert sum(step.visible for step in rows) == context * (context + 1) // 2
    assert [step.wanted for step in rows] == [0] * (len(rows) - 1) + [1]
    seqs = [plan.seqs[0] for plan in plans]
    assert [seq.start for seq in seqs] == list(range(0, context, chunk))
    assert [seq.sample for seq in seqs] == [bool(step.wanted) for step in rows]
    assert max(seqs[-1].pages) + 1 == case.num_pages


@given(context=st.integers(1, 300), batch=st.integers(1, 9))
def test_sequences_of_a_decode_step_have_pages_of_their_own(context: int, batch: int) -> None:
    case = Case(phase=DECODE, context=context, batch=batch)
    (plan,) = case.plans()
    used = [page for seq in plan.seqs for page in seq.pages]
    assert sorted(used) == list(range(case.num_pages))
    assert {seq.start + len(seq.token_ids) for seq in plan.seqs} == {context}
    (rows,) = case.rows()
    assert (rows.visible, rows.wanted) == (batch * context, batch)


@given(pages=st.integers(1, 90), tokens=st.integers(1, 300))
def test_filling_writes_every_page_from_one_that_was_computed(pages: int, tokens: int) -> None:
    (prompt,), rest = (lambda plans: (plans[:-1], plans[-1]))(list(fill_plans(pages, tokens, 50)))
    written = set(prompt.seqs[0].pages)
    assert max(written) < pages
    assert max(prompt.seqs[0].token_ids) < 50
    full = {page for page in written if (page + 1) * PAGE <= len(prompt.seqs[0].token_ids)} or {0}
    assert {source for source, _ in rest.copies} <= full
    assert written | {target for _, target in rest.copies} == set(range(pages))


def wish(**changed: object) -> EngineWish:
    given: dict[str, object] = {
        "model": "m", "weights": "exact", "dtype": "bfloat16", "kv_dtype": "auto", "prompts": [64],
        "contexts": [16, 128], "batches": [1, 4], "chunk_tokens": 32, "seconds": 0.1, "pool_bytes": 1 << 30,
    }  # fmt: skip
    return EngineWish(**{**given, **changed})  # type: ignore[arg-type]


def test_steps_that_need_more_pages_than_there_may_be_are_left_out_by_name(tmp_path: Path) -> None:
    config = load_model(str(tiny_models.save(tiny_models.llama(), tmp_path))).config
    layout = page_layout(config, page_size=PAGE, dtype="bfloat16")
    few = select(wish(pool_bytes=8 * layout.stride_bytes), layout, config.max_context, 100)
    assert few.skipped == ["decode-4x128"]
    assert [case.name for case in few.cases] == ["prefill-64", "decode-1x16", "decode-1x128", "decode-4x16"]
    assert few.num_pages == 8
    assert {case.vocab for case in few.cases} == {100}
    with pytest.raises(ConfigError, match=r"^pool_gib:"):
        select(wish(pool_bytes=1), layout, config.max_context, 100)
    with pytest.raises(ConfigError, match=r"^contexts: the model's context has 100 tokens"):
        select(wish(), layout, 100, 100)


@pytest.mark.parametrize(("weights", "kind"), [("exact", "bfloat16"), ("w8a8", "int8"), ("w4a8", "int8")])
def test_a_model_s_work_is_the_sum_of_its_linears(tmp_path: Path, weights: str, kind: str) -> None:
    model = load_model(str(tiny_models.save(tiny_models.llama(), tmp_path)))
    layout = page_layout(model.config, page_size=PAGE, dtype="bfloat16")
    runner = ModelRunner(model, KVPool.create(layout, 1, pool_id=1), weights=weights)
    work = work_of(runner.decoder, model.config, layout)
    assert work is not None
    assert {product.kind for product in work.products} == {kind}
    linears = [w.numel() for name, w in model.weights.items() if "proj" in name]
    head = model.config.vocab_size * model.config.hidden_size
    assert sum(product.size for product in work.products) == sum(linears) + head
    assert sum(product.wanted_only for product in work.products) == 4  # the head, and the last layer's end
    sizes = model.config
    assert work.kv_token_bytes == 2 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim * 2


def test_the_work_of_a_mixture_is_not_known(tmp_path: Path) -> None:
    model = load_model(str(tiny_models.save(tiny_moe.mixtral(), tmp_path)))
    layout = page_layout(model.config, page_size=PAGE, dtype="bfloat16")
    runner = ModelRunner(model, KVPool.create(layout, 1, pool_id=1))
    assert work_of(runner.decoder, model.config, layout) is None


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentile([], 50) is None
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile(list(range(1, 101)), 99) == 99
    assert percentile([5.0], 99) == 5.0


def test_a_summary_counts_failures_apart_and_messages_of_several_tokens_once() -> None:
    samples = [
        Sample(started=0.0, arrivals=[(0.1, 1), (0.2, 2), (0.4, 1)]),
        Sample(started=0.1, arrivals=[(0.3, 1), (0.4, 1)]),
        Sample(started=0.2, arrivals=[(0.9, 1)], error="overloaded"),
        Sample(started=0.2),
    ]
    found = summary(samples, 2.0, prompt_tokens=100)
    assert (found["requests"], found["failed"]) == (4, 2)
    assert found["errors"] == {"overloaded": 1, "no_tokens": 1}
    assert (found["output_tokens"], found["tokens_per_s"]) == (7, 3.5)
    assert (found["prompt_tokens_per_s"], found["requests_per_s"]) == (100.0, 1.0)
    assert (found["ttft_p50_ms"], found["ttft_p99_ms"]) == (100.0, 300.0)
    assert found["itl_p99_ms"] == pytest.approx(200.0)


def test_a_summary_compares_no_request_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def compared(one: Sample, other: object) -> bool:
        raise AssertionError("a summary of a million requests would take for ever")

    monkeypatch.setattr(Sample, "__eq__", compared)
    samples = [Sample(started=0.0, arrivals=[(0.1, 1)]), Sample(started=0.0, error="unavailable")] * 2
    found = summary(samples, 1.0, prompt_tokens=1)
    assert (found["failed"], found["errors"]) == (2, {"unavailable": 2})


def test_a_summary_of_nothing_but_failures_has_no_latencies() -> None:
    found = summary([Sample(started=0.0, error="unavailable")], 1.0, 10)
    assert (found["ttft_p50_ms"], found["itl_p99_ms"], found["tokens_per_s"]) == (None, None, 0.0)


@given(rate=st.floats(0.1, 1000), requests=st.integers(1, 50))
def test_a_rate_spreads_requests_and_the_same_seed_does_it_again(rate: float, requests: int) -> None:
    load = Load(requests=requests, concurrency=None, rate=rate, prompt_tokens=1, output_tokens=1)
    found = starts(load)
    assert found == sorted(found) == starts(load)
    assert len(found) == requests
    assert starts(Load(requests=2, concurrency=1, rate=None, prompt_tokens=1, output_tokens=1)) == [0.0, 0.0]
