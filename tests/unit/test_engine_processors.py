"""What a request changes in its logits: transformers' processors, log-probabilities, failures of one row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.logprobs import token_logprob
from pdserve.engine.masks import Bits, unpacked
from pdserve.engine.picking import TokenPicker
from pdserve.engine.processors import NothingLeft, processed
from pdserve.sched.plan import History, SeqStep
from pdserve.types import Grammar, GrammarKind, SamplingParams
from tests.support import reference_sampling as reference

VOCAB = 12
IDS = st.integers(0, VOCAB - 1)
PENALTY = st.one_of(st.just(0.0), st.floats(-2, 2, width=32))
GRAMMAR = Grammar(kind=GrammarKind.REGEX, text="a*")

ROWS = st.integers(0, 10_000).map(
    lambda seed: np.random.default_rng(seed).normal(0, 3, VOCAB).astype(np.float32)
)
HISTORIES = st.lists(IDS, min_size=1, max_size=14).flatmap(
    lambda ids: st.integers(1, len(ids)).map(lambda n: History(token_ids=tuple(ids), num_prompt=n))
)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 4]),
    top_p=st.sampled_from([1.0, 0.6]),
    typical_p=st.sampled_from([1.0, 0.4]),
    seed=st.integers(0, 2**64 - 1),
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.125, 10, width=32)),
    presence_penalty=PENALTY,
    frequency_penalty=PENALTY,
    logit_bias=st.dictionaries(IDS, st.floats(-100, 100, width=32), max_size=4).map(
        lambda biases: tuple(sorted(biases.items()))
    ),
    min_tokens=st.integers(0, 6),
    stop_token_ids=st.lists(IDS, max_size=2).map(tuple),
    ignore_eos=st.booleans(),
    bad_words=st.lists(st.lists(IDS, min_size=1, max_size=3).map(tuple), max_size=6, unique=True).map(tuple),
)


def test_a_penalty_that_float32_makes_nothing_of_goes_as_far_as_numbers_go() -> None:
    history = History(token_ids=(0, 1, 2), num_prompt=3)
    row = np.array([0.0, 2.0, -2.0, 5.0], np.float32)
    with np.errstate(all="raise"):
        out = processed(row, SamplingParams(repetition_penalty=0.0), history)
    assert out.tolist() == [0.0, np.finfo(np.float32).max, 0.0, 5.0]


@settings(max_examples=300)
@given(ROWS, PARAMS, HISTORIES)
def test_rows_are_processed_as_by_transformers(
    row: np.ndarray, params: SamplingParams, history: History
) -> None:
    before = row.copy()
    want = reference.processed(row, params, history)[0].numpy()
    if not np.isfinite(want).any():
        with pytest.raises(NothingLeft):
            processed(row, params, history, end_token_ids=reference.ENDS)
    else:
        got = processed(row, params, history, end_token_ids=reference.ENDS)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert (row == before).all(), "log-probabilities are of the row as it was"


@settings(max_examples=300)
@given(ROWS, PARAMS, HISTORIES, st.lists(st.booleans(), min_size=VOCAB, max_size=VOCAB))
def test_what_is_impossible_is_never_made(
    row: np.ndarray, params: SamplingParams, history: History, allowed: list[bool]
) -> None:
    """Whatever else is asked; and a token comes as long as one is possible."""
    params = changed(params, grammar=GRAMMAR)
    made = history.token_ids[history.num_prompt :]
    forbidden = {
        word[-1] for word in params.bad_words if (*history.token_ids, word[-1])[-len(word) :] == word
    }
    if len(made) < params.min_tokens:
        forbidden |= {*params.stop_token_ids, *(() if params.ignore_eos else reference.ENDS)}
    possible = {token for token in range(VOCAB) if allowed[token]} - forbidden
    step = reference.step(params, len(made), history)
    picked = TokenPicker(reference.ENDS, Masks(allowed)).pick([step], row[None], [int(row.argmax())])
    if possible:
        assert picked.tokens["a"] in possible
    else:
        assert "no token is possible" in picked.failed["a"]


@given(ROWS, PARAMS, HISTORIES, st.randoms())
def test_penalties_do_not_see_the_order_of_the_prompt(
    row: np.ndarray, params: SamplingParams, history: History, random: Any
) -> None:
    params = changed(params, bad_words=(), min_tokens=0)
    prompt = list(history.token_ids[: history.num_prompt])
    random.shuffle(prompt)
    other = History(
        token_ids=(*prompt, *history.token_ids[history.num_prompt :]), num_prompt=history.num_prompt
    )
    np.testing.assert_array_equal(processed(row, params, history), processed(row, params, other))


def test_presence_and_frequency_do_not_count_the_prompt() -> None:
    row, history = np.zeros(6, np.float32), History(token_ids=(4, 4, 5, 1, 1, 2), num_prompt=3)
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    assert processed(row, params, history).tolist() == [0.0, -1.0, -0.75, 0.0, 0.0, 0.0]


def test_a_tiny_repetition_penalty_stays_a_number() -> None:
    row = np.array([0.0, 1e30, -1e30, 1.0], np.float32)
    history = History(token_ids=(0, 1, 2), num_prompt=1)
    got = processed(row, SamplingParams(repetition_penalty=1e-40), history)
    assert np.isfinite(got).all()
    assert got.argmax() == 1


class Masks:
    """A grammar that allows the same tokens always, or fails with a sentence."""

    def __init__(self, allowed: list[bool], problem: str = "") -> None:
        self._bits: Bits = np.packbits(
            np.array([*allowed, *[False] * (-len(allowed) % 32)]), bitorder="little"
        ).view(np.uint32)
        self._problem = problem
        self.asked: list[SeqStep] = []

    def allowed(self, seq: SeqStep) -> Bits | None:
        if self._problem:
            raise ValueError(self._problem)
        self.asked.append(seq)
        return self._bits


def changed(params: SamplingParams, **fields: Any) -> SamplingParams:
    values = {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}
    return SamplingParams(**values | fields)


@given(st.lists(st.booleans(), min_size=1, max_size=200))
def test_a_mask_is_a_bit_for_each_token(allowed: list[bool]) -> None:
    masks = Masks(allowed)
    bits = masks.allowed(reference.step(SamplingParams()))
    assert bits is not None
    assert unpacked(bits, len(allowed)).tolist() == allowed


def test_only_the_sequence_that_leaves_nothing_fails() -> None:
    rows = np.zeros((4, VOCAB), np.float32)
    history = History(token_ids=(1, 2), num_prompt=1)
    all_bad = SamplingParams(bad_words=tuple((token,) for token in range(VOCAB)))
    steps = [
        reference.step(SamplingParams(logprobs=1), name="plain"),
        reference.step(all_bad, 1, history, "nothing left"),
        reference.step(SamplingParams(grammar=GRAMMAR), 1, history, "broken grammar"),
        reference.step(SamplingParams(temperature=1.0, min_tokens=5), 1, history, "min tokens"),
    ]
    masks = Masks([True] * VOCAB, problem="the grammar has no end")
    picked = TokenPicker(reference.ENDS, masks).pick(steps, rows, [0] * 4)
    assert set(picked.tokens) == {"plain", "min tokens"}
    assert set(picked.logprobs) == {"plain"}
    assert picked.failed["broken grammar"] == "the grammar has no end"
    assert "no token is possible" in picked.failed["nothing left"]
    without = TokenPicker(reference.ENDS).pick(steps[2:3], rows[:1], [0])
    assert "grammar" in without.failed["broken grammar"]


def test_only_sequences_with_a_grammar_are_asked_for_their_mask() -> None:
    rows, masks = np.zeros((2, VOCAB), np.float32), Masks([False] * 7 + [True] * (VOCAB - 7))
    history = History(token_ids=(1, 2), num_prompt=1)
    steps = [
        reference.step(SamplingParams(), name="plain"),
        reference.step(SamplingParams(grammar=GRAMMAR), 1, history, "grammar"),
    ]
    picked = TokenPicker((), masks).pick(steps, rows, [0, 0])
    assert picked.tokens == {"plain": 0, "grammar": 7}
    assert masks.asked == [steps[1]]


@given(st.integers(0, 1000), st.integers(0, 20), st.sampled_from([20, 500]))
def test_logprobs_are_the_log_softmax_of_the_row(seed: int, num_top: int, vocab: int) -> None:
    generator = np.random.default_rng(seed)
    row = generator.normal(0, 4, vocab).astype(np.float32)
    row[generator.integers(0, vocab, 6)] = row[0]  # ties
    token = int(generator.integers(0, vocab))
    made = token_logprob(row, token, num_top)
    want = torch.from_numpy(row).double().log_softmax(-1).numpy()
    assert (made.token_id, len(made.top)) == (token, num_top)
    best = sorted(range(vocab), key=lambda t: (-row[t], t))[:num_top]
    assert [each.token_id for each in made.top] == best
    for each in (made, *made.top):
        assert each.logprob == pytest.approx(want[each.token_id], rel=1e-6, abs=1e-6)
        assert each.logprob == float(np.float32(each.logprob)), "goes by wire as it is"


def test_logprobs_of_rows_far_apart_stay_numbers() -> None:
    row = np.array([1e30, -1e30, 0.0], np.float32)
    made = token_logprob(row, 1, 3)
    assert made.top[0].logprob == 0.0
    assert np.isfinite(made.logprob)
