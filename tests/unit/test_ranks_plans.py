"""Step plans as bytes: what a rank computes from comes back as it was; other bytes are refused."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.ranks.plans import decode_plan, encode_plan
from pdserve.sched.plan import SeqStep, StepPlan
from pdserve.types import SamplingParams

NUMBER = st.integers(-(2**63), 2**63 - 1)
NUMBERS = st.lists(NUMBER, max_size=40).map(tuple)


@st.composite
def sequences(draw: st.DrawFn) -> SeqStep:
    return SeqStep(
        seq_id=draw(st.text(max_size=20)),
        token_ids=draw(NUMBERS),
        start=draw(NUMBER),
        pages=draw(NUMBERS),
        sample=draw(st.booleans()),
        sample_counter=draw(NUMBER),
        sampling=SamplingParams(temperature=draw(st.sampled_from([0.0, 0.7])), seed=draw(st.integers(0, 9))),
    )


PLANS = st.builds(
    StepPlan,
    step_id=NUMBER,
    seqs=st.lists(sequences(), max_size=5).map(tuple),
    zero_pages=NUMBERS,
    copies=st.lists(st.tuples(NUMBER, NUMBER), max_size=8).map(tuple),
)


@given(PLANS)
def test_a_plan_comes_back_without_its_sampling(plan: StepPlan) -> None:
    plain = tuple(dataclasses.replace(seq, sampling=SamplingParams()) for seq in plan.seqs)
    assert decode_plan(encode_plan(plan)) == dataclasses.replace(plan, seqs=plain)


@given(PLANS, st.data())
def test_bytes_that_were_cut_or_lengthened_are_refused(plan: StepPlan, data: st.DataObject) -> None:
    whole = encode_plan(plan)
    short = whole[: data.draw(st.integers(0, len(whole) - 1))]
    for wrong in (short, whole + b"\0", bytes([9]) + whole[1:]):
        with pytest.raises(ValueError, match=r"a step plan|codec"):
            decode_plan(wrong)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_plan_or_refused(data: bytes) -> None:
    try:
        decode_plan(data)
    except ValueError:
        return
    assert data[0] == 1
