"""One choice on its way to the client: chunks, log-probabilities with their bytes, stop texts, its end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from pdserve.api import Chunk, GenerateInput, SamplingInput
from pdserve.types import FinishReason, ModelLimits, Role, TokenLogprob
from router.model import ServedModel
from router.output import Output
from router.validate import Target, check_fields, check_prompt
from tests.support.byte_model import CONTEXT, END_ID, VOCAB, byte_bundle
from tests.support.router_kit import FakeWorker

MODEL = ServedModel(byte_bundle(), FakeWorker("d", Role.DECODE).record, ThreadPoolExecutor(1))


def output(*, stop: tuple[str, ...] = (), min_tokens: int = 0, choice: int = 0, **source: Any) -> Output:
    limits = ModelLimits(vocab_size=VOCAB, max_context=CONTEXT, end_token_ids=(END_ID,), bos_token_id=None)
    target = Target(model="bytes", limits=limits)
    given = GenerateInput(prompt="x", stop=stop, sampling=SamplingInput(stop_token_ids=(90,)), **source)
    request = check_prompt(check_fields(given, target, seed=1), (120,), target)
    return Output(request, MODEL.text(stop, min_tokens), MODEL.spelled, choice=choice)


def pushed(out: Output, data: bytes) -> Chunk:
    for byte in data:
        out.push(byte, None)
    return out.take()


def test_tokens_that_came_together_are_one_chunk() -> None:
    out = output(choice=2)
    assert pushed(out, b"ab") == Chunk(index=0, token_ids=(97, 98), text="ab", choice=2)
    assert not out.waits
    assert pushed(out, b"c").index == 2


def test_log_probabilities_bring_the_bytes_of_their_tokens() -> None:
    out = output()
    first, second = "é".encode()
    other = TokenLogprob(token_id=END_ID, logprob=-2.0)
    out.push(first, TokenLogprob(token_id=first, logprob=-0.5, top=(other,)))
    out.push(second, TokenLogprob(token_id=second, logprob=-0.25))
    chunk = out.take()
    assert chunk.text == "é"
    assert [entry.token for entry in chunk.logprobs] == [b"\xc3", b"\xa9"]
    assert chunk.logprobs[0].top == (replace(other, token=b"<|end|>"),)
    assert out.end(FinishReason.LENGTH).cumulative_logprob == -0.75


def test_the_end_says_which_stop_text_matched() -> None:
    out = output(stop=("xyz", "cd"))
    assert pushed(out, b"abcd").text == "ab"
    assert out.stopped
    end = out.end(FinishReason.STOP)
    assert (end.stop_text, end.stop_token_id, end.completion_tokens) == ("cd", None, 4)


def test_the_end_says_which_token_ended_it() -> None:
    for token_id in (END_ID, 90):
        out = output()
        out.push(97, None)
        out.push(token_id, None)
        assert out.end(FinishReason.STOP).stop_token_id == token_id
        assert out.end(FinishReason.LENGTH).stop_token_id is None


def test_stop_texts_count_from_min_tokens_on() -> None:
    out = output(stop=("b",), min_tokens=3)
    assert pushed(out, b"abb").text == "abb"
    assert not out.stopped
    assert pushed(out, b"ab").text == "a"
    assert out.stopped


def test_a_stop_text_ends_no_text_that_is_not_wanted() -> None:
    out = output(stop=("b",), no_text=True)
    assert pushed(out, b"ab").text == ""
    assert out.stopped
