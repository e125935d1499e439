"""Sampling: filters against transformers, frequencies against probabilities, Philox against its paper."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pdserve.engine.sampler import Draw, candidates, sample, uniform
from pdserve.types import SamplingParams

GREEDY = SamplingParams()


def transformers_probabilities(row: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities [V] after transformers' processors, in its order."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    scores = warpers(torch.zeros(1, 1, dtype=torch.int64), torch.from_numpy(row)[None].double())
    return scores.softmax(-1)[0].numpy()


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
)
def test_filters_are_those_of_transformers(
    seed: int, vocab: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    row = logits(seed, vocab)
    np.testing.assert_allclose(
        our_probabilities(row, params), transformers_probabilities(row, params), rtol=1e-6, atol=1e-12
    )


def test_flat_distributions_need_more_than_the_first_guess_of_top_p() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9)
    row = logits(3, 40_000, spread=0.1)
    assert (our_probabilities(row, params) > 0).sum() > 30_000
    np.testing.assert_allclose(
        our_probabilities(row, params), transformers_probabilities(row, params), rtol=1e-6, atol=1e-12
    )


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(temperature=0.7, top_k=12, top_p=0.9, seed=6),
        SamplingParams(temperature=1.5, min_p=0.05, seed=7),
    ],
)
def test_frequencies_are_the_probabilities_of_transformers(params: SamplingParams) -> None:
    row = logits(1, 600, spread=2.0)
    expected = transformers_probabilities(row, params)
    draws = [Draw(params=params, counter=i) for i in range(8_000)]
    tokens = sample(np.broadcast_to(row, (len(draws), row.size)), draws)
    counts = np.bincount(tokens, minlength=row.size)
    assert counts[expected == 0].sum() == 0
    likely = expected > 5 / len(draws)
    error = (counts - expected * len(draws))[likely] / np.sqrt(expected[likely] * len(draws))
    assert np.abs(error).max() < 5
    assert (error**2).mean() < 2


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


def test_a_token_depends_on_its_row_and_draw_alone() -> None:
    rows = np.stack([logits(i, 500) for i in range(6)])
    draws = [Draw(params=SamplingParams(temperature=1.1, top_k=i * 7, seed=i), counter=i) for i in range(6)]
    together = sample(rows, draws)
    alone = [sample(rows[i : i + 1], [draws[i]])[0] for i in range(6)]
    assert together == alone
    assert sample(rows[::-1].copy(), draws[::-1]) == together[::-1]


def test_seed_and_counter_both_matter() -> None:
    row = np.zeros((1, 10_000), np.float32)
    tokens = {
        sample(row, [Draw(params=SamplingParams(temperature=1.0, seed=s), counter=c)])[0]
        for s in range(10)
        for c in range(10)
    }
    assert len(tokens) > 95


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    rows = np.zeros((3, 70_000), np.float32)
    rows[0, [65_000, 40, 41]] = 3.0
    rows[1, [69_999, 16_385]] = 1.0
    assert sample(rows, [Draw(params=GREEDY, counter=0)] * 3) == [40, 16_385, 0]


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    row = logits(4, 100)
    draw = Draw(params=SamplingParams(temperature=temperature, seed=1), counter=0)
    assert sample(row[None], [draw]) == [int(row.argmax())]


def test_a_token_without_weight_is_never_drawn() -> None:
    row = np.full(1000, -1e4, np.float32)
    row[[3, 700]] = 0.0
    params = SamplingParams(temperature=1.0, seed=2)
    tokens = {sample(row[None], [Draw(params=params, counter=i)])[0] for i in range(300)}
    assert tokens == {3, 700}
