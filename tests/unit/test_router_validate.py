"""Validation: what is refused and by which field, what becomes of the rest."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.api import ChatMessage, GenerateInput, SamplingInput
from pdserve.errors import NeverFits, PdserveError, PromptTooLong
from pdserve.types import ModelLimits
from router.validate import Target, ValidRequest, check_fields, check_prompt

LIMITS = ModelLimits(vocab_size=100, max_context=64, end_token_ids=(2, 3), bos_token_id=1)
TARGET = Target(model="m", limits=LIMITS)
nan, inf = float("nan"), float("inf")
MANY = (ChatMessage(role="user", content="x"),) * 1025
ODD = (ChatMessage(role="root", content="x"),)


def valid(source: GenerateInput, ids: tuple[int, ...] = (5, 6), target: Target = TARGET) -> ValidRequest:
    return check_prompt(check_fields(source, target, seed=42), ids, target)


def ask(**fields: Any) -> GenerateInput:
    return GenerateInput(**({"prompt": "x"} | fields))


def sampling(**fields: Any) -> GenerateInput:
    return ask(sampling=SamplingInput(**fields))


BAD = [
    (ask(prompt=None), "invalid_request", "input"),
    (ask(token_ids=(1,)), "invalid_request", "input"),
    (ask(prompt=""), "invalid_request", "prompt"),
    (ask(prompt=None, token_ids=()), "invalid_request", "tokens"),
    (ask(prompt=None, messages=()), "invalid_request", "chat.messages"),
    (ask(prompt=None, messages=MANY), "invalid_request", "chat.messages"),
    (ask(prompt=None, messages=ODD), "invalid_request", "chat.messages.role"),
    (ask(model="other"), "unknown_model", None),
    (ask(n=9), "invalid_request", "n"),
    (ask(best_of=9), "invalid_request", "best_of"),
    (ask(n=3, best_of=2), "invalid_request", "best_of"),
    (ask(resume_window_s=1.0), "unsupported", "resume_window_s"),
    (ask(resume_window_s=-1.0), "invalid_request", "resume_window_s"),
    (ask(resume_window_s=nan), "invalid_request", "resume_window_s"),
    (ask(priority=-101), "invalid_request", "priority"),
    (ask(client_request_id="é" * 65), "invalid_request", "client_request_id"),
    (ask(trace_id="xyz"), "invalid_request", "trace_id"),
    (ask(trace_id="A" * 32), "invalid_request", "trace_id"),
    (ask(stop=("a",) * 17), "invalid_request", "stop"),
    (ask(stop=("",)), "invalid_request", "stop"),
    (ask(stop=("é" * 129,)), "invalid_request", "stop"),
    *((ask(deadline_s=d), "invalid_request", "deadline_s") for d in (-1.0, nan, inf, 600.1)),
    *((sampling(temperature=t), "invalid_request", "sampling.temperature") for t in (-0.1, nan, inf, 100.1)),
    *((sampling(top_p=p), "invalid_request", "sampling.top_p") for p in (-0.1, 0.0, 1.1, nan)),
    *((sampling(min_p=p), "invalid_request", "sampling.min_p") for p in (-0.1, 1.0, nan)),
    *((sampling(top_k=k), "invalid_request", "sampling.top_k") for k in (-1, 101, 2**31)),
    (sampling(max_tokens=0), "invalid_request", "sampling.max_tokens"),
    (sampling(seed=2**64), "invalid_request", "sampling.seed"),
    (sampling(stop_token_ids=(100,)), "invalid_request", "sampling.stop_token_ids"),
    (sampling(stop_token_ids=(1,) * 65), "invalid_request", "sampling.stop_token_ids"),
    *((sampling(typical_p=p), "invalid_request", "sampling.typical_p") for p in (-0.1, 0.0, 1.1, nan)),
    *(
        (sampling(repetition_penalty=p), "invalid_request", "sampling.repetition_penalty")
        for p in (0.0, -1.0, 10.1, nan)
    ),
    *(
        (sampling(**{name: p}), "invalid_request", f"sampling.{name}")
        for name in ("presence_penalty", "frequency_penalty")
        for p in (-2.1, 2.1, nan, inf)
    ),
    *(
        (sampling(logit_bias=b), "invalid_request", "sampling.logit_bias")
        for b in (((100, 1.0),), ((5, 100.5),), ((5, nan),), ((5, -inf),), ((5, 1.0), (5, 2.0)))
    ),
    (sampling(logit_bias=tuple((i, 1.0) for i in range(1025))), "invalid_request", "sampling.logit_bias"),
    *(
        (sampling(bad_words=w), "invalid_request", "sampling.bad_words")
        for w in (((),), ((100,),), ((1, -1),), ((1,) * 17,), ((1,),) * 65)
    ),
    *((sampling(logprobs=n), "invalid_request", "sampling.logprobs") for n in (-1, 21)),
    (sampling(min_tokens=-1), "invalid_request", "sampling.min_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "label", "field"), BAD)
def test_bad_fields(source: GenerateInput, label: str, field: str | None) -> None:
    with pytest.raises(PdserveError) as caught:
        check_fields(source, TARGET, seed=0)
    assert caught.value.label == label
    if field is not None:
        assert [v.field for v in caught.value.violations] == [field]
        assert field in caught.value.message


@pytest.mark.parametrize(
    ("ids", "label"),
    [
        ((), "invalid_request"),
        ((1, 100), "invalid_request"),
        ((-1,), "invalid_request"),
        ((1,) * 64, "prompt_too_long"),
    ],
)
def test_bad_prompts(ids: tuple[int, ...], label: str) -> None:
    with pytest.raises(PdserveError) as caught:
        valid(ask(), ids)
    assert caught.value.label == label


def test_documented_defaults() -> None:
    request = valid(ask())
    params = request.sampling
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.0, 0, 1.0, 0.0)
    assert params.seed == 42
    assert params.max_tokens == 62  # 256, but the context ends before
    assert request.deadline_s == 600.0
    assert request.use_prefix_cache
    assert request.want_text
    assert request.stop_ids == {2, 3}
    wide = Target(
        model="m", limits=ModelLimits(vocab_size=9, max_context=9999, end_token_ids=(), bos_token_id=None)
    )
    assert valid(ask(), target=wide).sampling.max_tokens == 256


def test_min_tokens_fit_into_max_tokens() -> None:
    assert valid(sampling(min_tokens=4, max_tokens=4)).sampling.min_tokens == 4
    for source, ids in (
        (sampling(min_tokens=5, max_tokens=4), (5,)),
        (sampling(min_tokens=64), (5,)),  # the context ends before
    ):
        with pytest.raises(PdserveError, match="min_tokens") as caught:
            valid(source, ids)
        assert caught.value.label == "invalid_request"


def test_what_was_asked_of_logits_is_kept() -> None:
    params = valid(
        sampling(
            typical_p=0.9, repetition_penalty=1.2, presence_penalty=-2.0, frequency_penalty=2.0,
            logit_bias=((9, 1.5), (3, -100.0)), min_tokens=2, bad_words=((1,), (2, 3)), logprobs=0,
        )
    ).sampling  # fmt: skip
    assert (params.typical_p, params.repetition_penalty) == (0.9, 1.2)
    assert (params.presence_penalty, params.frequency_penalty) == (-2.0, 2.0)
    assert params.logit_bias == ((3, -100.0), (9, 1.5))
    assert (params.min_tokens, params.bad_words, params.logprobs) == (2, ((1,), (2, 3)), 0)
    plain = valid(ask()).sampling
    assert (plain.typical_p, plain.repetition_penalty, plain.presence_penalty) == (1.0, 1.0, 0.0)
    assert (plain.min_tokens, plain.bad_words, plain.logprobs, plain.logit_bias) == (0, (), None, ())


def test_what_was_asked_is_kept() -> None:
    source = ask(
        model="m", sampling=SamplingInput(
            temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=0, max_tokens=4, stop_token_ids=(9,)
        ),
        stop=("a", "b"), deadline_s=1.5, priority=-3, client_request_id="mine", no_prefix_cache=True,
        trace_id="0123456789abcdef" * 2, no_text=True, n=1,
    )  # fmt: skip
    request = valid(source)
    params = request.sampling
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.7, 5, 0.9, 0.1)
    assert (params.seed, params.max_tokens, params.stop_token_ids) == (0, 4, (9,))
    assert (request.stop, request.stop_ids) == (("a", "b"), {2, 3, 9})
    assert (request.deadline_s, request.priority, request.client_request_id) == (1.5, -3, "mine")
    assert (request.use_prefix_cache, request.want_text) == (False, False)
    assert valid(sampling(ignore_eos=True, stop_token_ids=(9,))).stop_ids == {9}


def test_the_pool_bounds_what_is_asked_for_and_the_default() -> None:
    small = Target(model="m", limits=LIMITS, capacity=16)
    assert valid(ask(), (1,) * 10, small).sampling.max_tokens == 6
    assert valid(sampling(max_tokens=6), (1,) * 10, small).sampling.max_tokens == 6
    for source, ids in ((sampling(max_tokens=7), (1,) * 10), (ask(), (1,) * 16)):
        with pytest.raises(PdserveError) as caught:
            valid(source, ids, small)
        assert caught.value.label == "never_fits"


@given(
    num_prompt=st.integers(1, 80),
    asked=st.none() | st.integers(1, 2**32 - 1),
    capacity=st.none() | st.integers(1, 90),
)
def test_whatever_is_valid_fits(num_prompt: int, asked: int | None, capacity: int | None) -> None:
    target = Target(model="m", limits=LIMITS, capacity=capacity)
    try:
        request = valid(sampling(max_tokens=asked), (1,) * num_prompt, target)
    except (PromptTooLong, NeverFits):
        assert num_prompt + min(asked or 1, 64) > min(64, capacity or 64)
        return
    total = num_prompt + request.sampling.max_tokens
    assert request.sampling.max_tokens >= 1
    assert total <= 64
    assert capacity is None or total <= capacity
