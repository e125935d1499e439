"""Sampling: filters against transformers, frequencies against probabilities, Philox against its paper."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.sampler import candidates, uniform
from pdserve.sched.plan import History
from pdserve.types import SamplingParams
from tests.support.reference_sampling import probabilities, step, tokens


def our_probabilities(row: np.ndarray, params: SamplingParams) -> np.ndarray:
    ids, weights = candidates(row, params)
    assert len(set(ids.tolist())) == ids.size
    full = np.zeros(row.size)
    full[ids] = weights / weights.sum()
    return full


def logits(seed: int, vocab: int, spread: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, vocab).astype(np.float32)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.sampled_from([2, 50, 3000]),
    temperature=st.floats(0.05, 5),
    top_k=st.sampled_from([0, 1, 2, 20, 2999, 5000]),
    top_p=st.floats(0.01, 1),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    typical_p=st.sampled_from([1.0, 0.99, 0.5, 0.02]),
)
def test_filters_are_those_of_transformers(
    seed: int, vocab: int, temperature: float, top_k: int, top_p: float, min_p: float, typical_p: float
) -> None:
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p
    )
    row = logits(seed, vocab)
    np.testing.assert_allclose(
        our_probabilities(row, params), probabilities(row, params), rtol=1e-6, atol=1e-12
    )


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"typical_p": 0.9}])
def test_flat_distributions_need_more_than_the_first_guess(params: dict[str, float]) -> None:
    asked = SamplingParams(temperature=1.0, **params)  # type: ignore[arg-type]
    row = logits(3, 40_000, spread=0.1)
    assert (our_probabilities(row, asked) > 0).sum() > 30_000
    np.testing.assert_allclose(
        our_probabilities(row, asked), probabilities(row, asked), rtol=1e-6, atol=1e-12
    )


HISTORY = History(token_ids=(5, 9, 9, 40, 41, 7, 7, 7, 80, 40), num_prompt=4)
BIASES = tuple((token, 1.5 - token % 4) for token in range(0, 60, 3))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(temperature=0.7, top_k=12, top_p=0.9, seed=6),
        SamplingParams(temperature=1.5, min_p=0.05, seed=7),
        SamplingParams(temperature=1.2, typical_p=0.6, seed=8),
        SamplingParams(temperature=0.9, repetition_penalty=1.7, top_p=0.95, seed=9),
        SamplingParams(temperature=1.0, presence_penalty=1.1, frequency_penalty=0.7, top_k=80, seed=10),
        SamplingParams(
            temperature=1.1, logit_bias=BIASES, bad_words=((40, 41), (6,), (7, 80, 40, 8)), seed=11
        ),
        SamplingParams(temperature=0.8, min_tokens=7, stop_token_ids=(11,), min_p=0.01, seed=12),
    ],
)
def test_20000_samples_have_the_distribution_of_transformers(params: SamplingParams) -> None:
    """Pearson's chi-square over tokens expected five times and more, the others as one."""
    num, row = 20_000, logits(1, 100, spread=2.0)
    expected = probabilities(row, params, HISTORY) * num
    steps = [step(params, counter, HISTORY) for counter in range(num)]
    counts = np.bincount(tokens(np.broadcast_to(row, (num, row.size)), steps), minlength=row.size)
    assert counts[expected == 0].sum() == 0
    likely = expected >= 5
    rest = expected[~likely].sum()
    bins = [*zip(counts[likely], expected[likely], strict=True)]
    if rest >= 5:
        bins.append((counts[~likely].sum(), rest))
    statistic = sum((count - mean) ** 2 / mean for count, mean in bins)
    freedom = len(bins) - 1
    assert freedom >= 4
    assert statistic < freedom + 3.5 * (2 * freedom) ** 0.5


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, ...]:
    """Philox 4x64-10 as in Salmon et al. 2011, section 3.3."""
    mask = (1 << 64) - 1
    a, b, c, d = counter
    for round_number in range(10):
        k0 = key[0] + round_number * 0x9E3779B97F4A7C15 & mask
        k1 = key[1] + round_number * 0xBB67AE8584CAA73B & mask
        first, second = a * 0xD2E7470EE14C6C93, c * 0xCA5A826395121157
        a, b, c, d = second >> 64 ^ b ^ k0, second & mask, first >> 64 ^ d ^ k1, first & mask
    return a, b, c, d


@given(seed=st.integers(0, 2**64 - 1), counter=st.integers(0, 2**40))
def test_random_numbers_are_philox_of_seed_and_counter(seed: int, counter: int) -> None:
    block = philox((seed, 0), (counter + 1, 0, 0, 0))  # numpy steps the counter before its first block
    assert uniform(seed, counter) == (block[0] >> 11) * 2.0**-53


def test_negative_seeds_are_their_64_bits() -> None:
    assert uniform(-1, 3) == uniform(2**64 - 1, 3)


def test_a_token_depends_on_its_row_and_step_alone() -> None:
    rows = np.stack([logits(i, 500) for i in range(6)])
    steps = [
        step(SamplingParams(temperature=1.1, top_k=i * 7, seed=i, repetition_penalty=1 + i % 2), i, HISTORY)
        for i in range(6)
    ]
    together = tokens(rows, steps)
    alone = [tokens(rows[i : i + 1], [steps[i]])[0] for i in range(6)]
    assert together == alone
    assert tokens(rows[::-1].copy(), steps[::-1]) == together[::-1]


def test_seed_and_counter_both_matter() -> None:
    row = np.zeros((1, 10_000), np.float32)
    made = {
        tokens(row, [step(SamplingParams(temperature=1.0, seed=s), c)])[0]
        for s in range(10)
        for c in range(10)
    }
    assert len(made) > 95


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    row = logits(4, 100)
    assert tokens(row[None], [step(SamplingParams(temperature=temperature, seed=1))]) == [int(row.argmax())]


def test_a_token_without_weight_is_never_drawn() -> None:
    row = np.full(1000, -1e4, np.float32)
    row[[3, 700]] = 0.0
    params = SamplingParams(temperature=1.0, seed=2)
    made = {tokens(row[None], [step(params, i)])[0] for i in range(300)}
    assert made == {3, 700}
