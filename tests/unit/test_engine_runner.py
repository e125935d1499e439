"""The runner: plans carried out, failures kept to their sequence, results that neighbours can not change."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from pdserve.engine.runner import ModelRunner, page_layout
from pdserve.engine.threads import apply_thread_count
from pdserve.errors import ConfigError
from pdserve.kvcache.pool import KVPool
from pdserve.models.loaded import LoadedModel
from pdserve.models.loader import load_model
from pdserve.sched.plan import History, SeqStep, StepPlan
from pdserve.types import SamplingParams
from tests.support import tiny_models
from tests.support.engine_driver import EngineDriver, generate

PAGE = 16


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tiny_models.save(tiny_models.qwen3(), tmp_path_factory.mktemp("tiny"))
    return load_model(str(folder), request.param)


def runner_of(
    model: LoadedModel, num_pages: int = 32, dtype: str | None = None
) -> tuple[ModelRunner, KVPool]:
    layout = page_layout(model.config, page_size=PAGE, dtype=dtype or model.dtype)
    pool = KVPool.create(layout, num_pages, pool_id=3)
    return ModelRunner(model, pool, deterministic=True, capture_logits=True), pool


def step(
    seq_id: str, token_ids: Sequence[int], pages: Sequence[int], start: int = 0, sample: bool = True
) -> SeqStep:
    return SeqStep(
        seq_id=seq_id,
        token_ids=tuple(token_ids),
        start=start,
        pages=tuple(pages),
        sample=sample,
        sample_counter=0,
        sampling=SamplingParams(),
    )


def plan(*seqs: SeqStep, **fields: tuple[object, ...]) -> StepPlan:
    return StepPlan(step_id=5, seqs=seqs, **fields)  # type: ignore[arg-type]


def tokens(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, tiny_models.VOCAB, (length,), generator=generator).tolist()


def page_bytes(pool: KVPool, pages: Sequence[int]) -> list[bytes]:
    return [bytes(pool.page_view(p)) for p in pages]


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_logits_and_pages_do_not_depend_on_neighbours_or_chunks(
    model: LoadedModel, dtype: str | None
) -> None:
    """Bit for bit, in both dtypes: alone at once, alone in pieces, and beside others on other pages."""
    prompt = tokens(75)
    alone, pool = runner_of(model, dtype=dtype)
    alone.execute(plan(step("a", prompt, range(5)), zero_pages=(0, 1, 2, 3, 4)))
    expected, pages = alone.last_logits["a"], page_bytes(pool, range(5))

    crowd, crowded = runner_of(model, dtype=dtype)
    table = (20, 3, 9, 11, 30)
    others = [step(f"o{i}", tokens(1 + 13 * i, i), range(21 + 2 * i, 23 + 2 * i)) for i in range(3)]
    crowd.execute(plan(others[0], step("a", prompt[:10], table, sample=False), zero_pages=table))
    crowd.execute(plan(*others, step("a", prompt[10:74], table, 10, sample=False)))
    result = crowd.execute(plan(step("a", prompt[74:], table, 74), *others[1:]))
    assert result.failed is None
    assert torch.equal(crowd.last_logits["a"], expected)
    assert page_bytes(crowded, table) == pages


def test_only_sequences_that_are_sampled_have_tokens(model: LoadedModel) -> None:
    runner, _ = runner_of(model)
    result = runner.execute(plan(step("a", tokens(9), [0], sample=False), step("b", tokens(3), [1])))
    assert (result.step_id, set(result.tokens), result.failed) == (5, {"b"}, None)
    assert runner.execute(plan(step("a", tokens(4), [0], 9, sample=False))).tokens == {}


def test_log_probabilities_are_made_and_a_request_for_what_can_not_be_fails_alone(model: LoadedModel) -> None:
    runner, _ = runner_of(model)
    all_bad = SamplingParams(bad_words=tuple((token,) for token in range(tiny_models.VOCAB)))
    history = History(token_ids=(5, 6), num_prompt=2)
    asks = step("asks", tokens(4), [0])
    refused = dataclasses.replace(step("refused", [5, 6], [1]), sampling=all_bad, history=history)
    result = runner.execute(
        plan(dataclasses.replace(asks, sampling=SamplingParams(logprobs=2)), refused, step("plain", [3], [2]))
    )
    assert set(result.tokens) == {"asks", "plain"}
    assert result.failed is not None
    assert "no token is possible" in result.failed["refused"]
    assert result.refused == {"refused"}
    assert set(result.logprobs) == {"asks"}
    made = result.logprobs["asks"]
    want = runner.last_logits["asks"].double().log_softmax(-1)
    assert (made.token_id, made.top[0].token_id) == (result.tokens["asks"],) * 2
    assert made.logprob == pytest.approx(float(want.max()), abs=1e-6)


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_pages_are_zeroed_then_copied_then_written(model: LoadedModel, dtype: str | None) -> None:
    runner, pool = runner_of(model, dtype=dtype)
    runner.execute(plan(step("a", tokens(20), [0, 1]), zero_pages=(0, 1)))
    pool.page_view(2)[:] = b"\xff" * pool.page_bytes
    fork = runner.execute(plan(step("b", [7], [0, 2], 20), zero_pages=(2,), copies=((1, 2),)))
    straight = runner.execute(plan(step("a", [7], [0, 1], 20)))
    assert fork.tokens["b"] == straight.tokens["a"]
    assert page_bytes(pool, [2]) == page_bytes(pool, [1])


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (step("bad", [tiny_models.VOCAB], [9]), "token id lies outside"),
        (step("bad", [-1], [9]), "token id lies outside"),
        (step("bad", [1] * 17, [9]), "block table is shorter"),
        (step("bad", [1], [32]), "a page that the pool does not have"),
        (step("bad", [1], [-1]), "a page that the pool does not have"),
        (step("bad", [1], range(33), 512), "longer than the model's context"),
        (step("bad", [], [9]), "has no rows"),
    ],
)
def test_a_sequence_that_can_not_run_fails_alone(model: LoadedModel, bad: SeqStep, sentence: str) -> None:
    runner, _ = runner_of(model)
    good = step("good", tokens(5), [0])
    expected = runner.execute(plan(good)).tokens
    result = runner.execute(plan(bad, good))
    assert result.tokens == expected
    assert result.failed is not None
    assert set(result.failed) == {"bad"}
    assert sentence in result.failed["bad"]


def test_values_that_are_not_numbers_fail_their_sequence_alone(model: LoadedModel) -> None:
    runner, pool = runner_of(model)
    good = step("good", tokens(5), [0])
    expected = runner.execute(plan(good, step("bad", tokens(20), [1, 2]))).tokens["good"]
    pool.page_view(1)[:] = b"\xff" * pool.page_bytes
    result = runner.execute(plan(step("bad", [4], [1, 2], 20), good))
    assert result.tokens == {"good": expected}
    assert result.failed == {"bad": "the model produced values that are not numbers for it"}
    assert set(runner.last_logits) == {"good"}


def test_a_step_that_breaks_is_run_again_one_by_one(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever breaks inside the model: only the sequence it breaks on fails."""
    runner, _ = runner_of(model)
    good, bad = step("good", tokens(5), [0]), step("bad", [66, 66], [1])
    expected = runner.execute(plan(good)).tokens
    forward = type(runner._model).forward

    def breaking(self: object, token_ids: torch.Tensor, *rest: object) -> torch.Tensor:
        if 66 in token_ids.tolist():
            raise RuntimeError("broken")
        return forward(self, token_ids, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(type(runner._model), "forward", breaking)
    result = runner.execute(plan(good, bad))
    assert result.tokens == expected
    assert result.failed == {"bad": "its computation failed"}


def test_warmup_reports_progress_and_leaves_the_pool_clean(model: LoadedModel) -> None:
    runner, pool = runner_of(model)
    seen: list[tuple[int, int]] = []
    runner.warmup(chunk_tokens=100, max_num_seqs=8, progress=lambda done, all_: seen.append((done, all_)))
    assert [done for done, _ in seen] == list(range(1, len(seen) + 1))
    assert {all_ for _, all_ in seen} == {len(seen)}
    assert not torch.count_nonzero(pool.storage)
    assert runner.last_logits == {}


def test_warmup_fits_a_tiny_pool(model: LoadedModel) -> None:
    runner, pool = runner_of(model, num_pages=1)
    runner.warmup(chunk_tokens=512, max_num_seqs=64)
    assert not torch.count_nonzero(pool.storage)


def test_a_pool_of_another_shape_or_device_is_refused(model: LoadedModel) -> None:
    layout = page_layout(model.config, page_size=PAGE, dtype=model.dtype)
    other = KVPool.create(dataclasses.replace(layout, num_layers=9), 4, pool_id=1)
    with pytest.raises(ConfigError, match="page pool was made for another model"):
        ModelRunner(model, other)
    with pytest.raises(ConfigError, match="device 'cuda' is not supported"):
        ModelRunner(model, KVPool.create(layout, 4, pool_id=1), device="cuda")


def test_numerics_are_named_by_dtype_and_mode(model: LoadedModel) -> None:
    layout = page_layout(model.config, page_size=PAGE, dtype=model.dtype)
    pool = KVPool.create(layout, 4, pool_id=1)
    strict = ModelRunner(model, pool, deterministic=True).numerics_id
    assert strict == ModelRunner(model, pool, deterministic=True).numerics_id
    assert strict != ModelRunner(model, pool, deterministic=False).numerics_id
    assert len(strict) == 16


def test_results_and_numerics_do_not_depend_on_the_number_of_threads(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for threads in ("1", "2"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        runner, pool = runner_of(model)
        assert torch.get_num_threads() == int(threads)
        runner.execute(plan(step("a", tokens(150), range(10)), step("b", tokens(2), [20])))
        made.append((runner.last_logits["a"].tolist(), page_bytes(pool, range(10)), runner.numerics_id))
    monkeypatch.undo()
    apply_thread_count()
    assert made[0] == made[1]


def test_preempted_and_shared_work_gives_the_same_tokens(model: LoadedModel) -> None:
    """A small pool forces preemption and a second wave finds its prompts cached: tokens stay the same."""
    prompts = {f"p{i}": tokens(40 + i, i) for i in range(5)}
    roomy = dict(generate(EngineDriver(model, num_pages=64, chunk_tokens=32), prompts, 30))
    tight = EngineDriver(model, num_pages=12, chunk_tokens=32)
    assert generate(tight, prompts, 30) == roomy
    again = {f"again-{name}": ids for name, ids in prompts.items()}
    assert {n.removeprefix("again-"): t for n, t in generate(tight, again, 30).items() if n in again} == roomy
    assert tight.manager.idle
    assert tight.manager.check_integrity() == ""


class TestPagesOfBytes:
    def test_numerics_name_the_pages(self, model: LoadedModel) -> None:
        plain, bytes8 = runner_of(model)[0], runner_of(model, dtype="int8")[0]
        assert plain.numerics_id != bytes8.numerics_id
        assert runner_of(model, dtype="int8")[0].numerics_id == bytes8.numerics_id

    def test_pages_of_another_float_type_are_refused(self, model: LoadedModel) -> None:
        other = {"float32": "bfloat16", "bfloat16": "float32"}[model.dtype]
        with pytest.raises(ConfigError, match="another model, dtype"):
            runner_of(model, dtype=other)

    def test_a_value_that_is_no_number_fails_its_sequence_alone(self, model: LoadedModel) -> None:
        """A scale that is not a number, as a row with one leaves it, comes out in the logits."""
        runner, pool = runner_of(model, dtype="int8")
        runner.execute(plan(step("a", tokens(20), [0, 1], sample=False), step("b", tokens(9), [2])))
        part = pool.layout.part_bytes
        scales = pool.page_view(0)[part - 4 * PAGE * pool.layout.num_kv_heads : part].cast("f")
        scales[3] = float("nan")
        del scales
        result = runner.execute(plan(step("a", [5], [0, 1], 20), step("b", [6], [2], 9)))
        assert set(result.tokens) == {"b"}
        assert result.failed is not None
        assert "not numbers" in result.failed["a"]
