"""Embed and Score through a router and worker processes: transformers' figures, whichever worker computes.

A prefill, an aggregated and a decode worker of a tiny model; tests that lose workers come last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
import torch

from pdserve.api import Embeddings, EmbedInput, ScoreInput, Scores
from pdserve.errors import InvalidRequest
from pdserve.rpc import convert
from pdserve.rpc.fleet_auth import authenticated
from pdserve.rpc.status import error_from_rpc
from pdserve.rpc.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2_grpc
from pdserve.types import Pooling, Role
from tests.support import tiny_models
from tests.support.stack import LIMIT_S, Stack, channel_to, usable

MODEL = tiny_models.qwen3()
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tiny_models.save(MODEL, tmp_path_factory.mktemp("tiny"))
    roles = {Role.PREFILL: 1, Role.AGGREGATED: 1, Role.DECODE: 1}
    made = Stack.start(roles, model=str(folder), num_pages=80, prefill_chunk_tokens=32, token_budget=64)
    yield made
    made.stop()


def call(stack: Stack, method: str, request: Any) -> Any:
    with channel_to(stack.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        return getattr(stub, method)(request, timeout=LIMIT_S)


def embed(stack: Stack, **ask: Any) -> Embeddings:
    return convert.embeddings_from_pb(call(stack, "Embed", convert.embed_to_pb(EmbedInput(**ask))))


def score(stack: Stack, **ask: Any) -> Scores:
    return convert.scores_from_pb(call(stack, "Score", convert.score_to_pb(ScoreInput(**ask))))


def tokens(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, tiny_models.VOCAB, (length,), generator=generator).tolist())


def hidden(text: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        states: torch.Tensor = MODEL.model(torch.tensor([text]), use_cache=False).last_hidden_state[0]
    return states


def logprobs(prompt: tuple[int, ...], rest: tuple[int, ...]) -> list[float]:
    """Of the rest's tokens behind the prompt."""
    states = hidden(prompt + rest)[len(prompt) - 1 : -1]
    with torch.inference_mode():
        rows = torch.log_softmax(MODEL.lm_head(states).double(), dim=-1)
    return [float(row[token]) for row, token in zip(rows, rest, strict=True)]


def steps_of(stack: Stack) -> dict[str, int]:
    """Steps that each worker has run."""
    found = {}
    for worker in stack.status().workers:
        if worker.suspect:
            continue
        with channel_to(worker.record.peer.control) as channel:
            stub = authenticated(cluster_pb2_grpc.WorkerServiceStub(channel), bytes.fromhex(stack.secret))
            state = convert.worker_state_from_pb(
                stub.GetWorkerStatus(cluster_pb2.GetWorkerStatusRequest(), timeout=LIMIT_S)
            )
        found[worker.record.peer.worker_id] = state.counters.get("steps", 0)
    return found


@pytest.mark.parametrize("pooling", Pooling)
def test_vectors_are_the_means_and_last_of_last_hidden_states(stack: Stack, pooling: Pooling) -> None:
    texts = [tokens(n, n) for n in (1, 3, 31, 32, 33, 150, 400)]
    found = embed(stack, inputs=(*texts, "w1 w2 w3"), pooling=pooling, no_normalise=True)
    assert found.usage.prompt_tokens == sum(map(len, texts)) + 3
    for text, vector in zip([*texts, (1, 2, 3)], found.vectors, strict=True):
        states = hidden(text)
        expected = states[-1] if pooling is Pooling.LAST else states.mean(0)
        assert (torch.tensor(vector) - expected).norm() <= TOLERANCE * expected.norm()
    unit = embed(stack, inputs=(texts[3],), pooling=pooling).vectors[0]
    own = torch.tensor(found.vectors[3])
    assert math.isclose(math.sqrt(sum(v * v for v in unit)), 1.0, rel_tol=1e-5)
    assert torch.allclose(torch.tensor(unit), own / own.norm(), atol=1e-6)


def test_scores_are_sums_of_log_probabilities_and_share_the_prompt(stack: Stack) -> None:
    prompt = tokens(100, 5)
    rests = [tokens(n, n + 50) for n in (1, 2, 40, 7)]
    found = score(stack, prompt=prompt, continuations=tuple(rests))
    for rest, each in zip(rests, found.scores, strict=True):
        assert [token.token_id for token in each.tokens] == list(rest)
        assert [token.logprob for token in each.tokens] == pytest.approx(
            logprobs(prompt, rest), abs=TOLERANCE
        )
        assert each.logprob == pytest.approx(sum(token.logprob for token in each.tokens), abs=1e-9)
        assert all(token.token for token in each.tokens)
    assert found.usage.prompt_tokens == sum(100 + len(rest) for rest in rests)
    assert found.usage.cached_tokens == 3 * 96  # all but the first found the prompt's full pages
    again = score(stack, prompt=prompt, continuations=(rests[2],)).scores[0]
    assert again == found.scores[2]  # bit for bit, alone and in other company


def test_texts_are_tokenised_by_themselves(stack: Stack) -> None:
    found = score(stack, prompt="w5 w6", continuations=("w7 w8",)).scores[0]
    assert [token.token_id for token in found.tokens] == [7, 8]
    assert [token.logprob for token in found.tokens] == pytest.approx(logprobs((5, 6), (7, 8)), abs=TOLERANCE)


def test_a_generation_gives_its_prompts_log_probabilities_first(stack: Stack) -> None:
    prompt = tokens(75, 30)
    with stack.client() as client:
        plain = client.generate(token_ids=prompt, max_tokens=5, ignore_eos=True).result()
        asked = client.generate(token_ids=prompt, max_tokens=5, ignore_eos=True, prompt_logprobs=2, echo=True)
        found = asked.result()
        several = client.generate(token_ids=prompt, max_tokens=3, ignore_eos=True, n=2, prompt_logprobs=0)
        short = client.generate(token_ids=(3,), max_tokens=1, prompt_logprobs=1).result().prompt
        assert found.token_ids == plain.token_ids
        assert found.prompt is not None
        first, *rest = found.prompt.logprobs
        assert (first.token_id, first.logprob, first.top) == (prompt[0], 0.0, ())
        assert [each.token_id for each in rest] == list(prompt[1:])
        expected = logprobs(prompt[:1], prompt[1:])
        assert [each.logprob for each in rest] == pytest.approx(expected, abs=TOLERANCE)
        assert all(len(each.top) == 2 and each.top[0].logprob >= each.top[1].logprob for each in rest)
        info = several.result().prompt
        assert info is not None
        assert [each.logprob for each in info.logprobs] == [each.logprob for each in found.prompt.logprobs]
        assert short is not None
        assert [each.token_id for each in short.logprobs] == [3]
        with pytest.raises(InvalidRequest, match="prompt_logprobs"):
            client.generate(token_ids=prompt, prompt_logprobs=21).result()
    stack.until_idle()


def test_it_runs_beside_generation_which_it_does_not_change(stack: Stack) -> None:
    prompt = tokens(60, 8)
    with stack.client() as client, ThreadPoolExecutor(4) as pool:
        before = client.generate(token_ids=prompt, max_tokens=20, ignore_eos=True).result()
        many = [pool.submit(embed, stack, inputs=tuple(tokens(90, i + j) for j in range(8))) for i in (0, 9)]
        during = client.generate(token_ids=prompt, max_tokens=20, ignore_eos=True).result()
        assert all(len(each.result().vectors) == 8 for each in many)
    assert during.token_ids == before.token_ids
    stack.until_idle()


LIMIT = tiny_models.VOCAB


@pytest.mark.parametrize(
    ("ask", "label", "field"),
    [
        ({"inputs": ()}, "invalid_request", "inputs"),
        ({"inputs": ((1,),) * 65}, "invalid_request", "inputs"),
        ({"inputs": ("",)}, "invalid_request", "inputs"),
        ({"inputs": ((),)}, "invalid_request", "inputs"),
        ({"inputs": ((1, LIMIT),)}, "invalid_request", "inputs"),
        ({"inputs": ((1,) * 600,)}, "prompt_too_long", "inputs"),
        ({"inputs": ((1,),), "deadline_s": -1.0}, "invalid_request", "deadline_s"),
        ({"inputs": ((1,),), "deadline_s": float("nan")}, "invalid_request", "deadline_s"),
        ({"inputs": ((1,),), "model": "another"}, "unknown_model", "model"),
        ({"prompt": (), "continuations": ((1,),)}, "invalid_request", "prompt"),
        ({"prompt": (1,), "continuations": ()}, "invalid_request", "continuations"),
        ({"prompt": (1,), "continuations": ((2,),) * 65}, "invalid_request", "continuations"),
        ({"prompt": (1,), "continuations": ((2,), ())}, "invalid_request", "continuations"),
        ({"prompt": (1,) * 500, "continuations": ((2,) * 13,)}, "prompt_too_long", "continuations"),
    ],
)
def test_what_can_not_be_computed_is_refused_by_name(
    stack: Stack, ask: dict[str, Any], label: str, field: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        embed(stack, **ask) if "inputs" in ask else score(stack, **ask)
    error = error_from_rpc(caught.value)
    assert error.label == label
    assert field in error.message


def test_a_deadline_ends_it(stack: Stack) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        embed(stack, inputs=tuple(tokens(400, i) for i in range(64)), deadline_s=0.001)
    assert error_from_rpc(caught.value).label == "deadline_expired"
    stack.until_idle()


def test_prefill_workers_come_first_and_any_other_takes_over(stack: Stack) -> None:
    """Also where a worker dies that the router still counts on: the call is made once more elsewhere."""
    text = tokens(70, 21)
    expected = embed(stack, inputs=(text,)).vectors
    for name in ("prefill-0", "aggregated-0", "decode-0"):
        before = steps_of(stack)
        assert embed(stack, inputs=(text,)).vectors == expected
        after = steps_of(stack)
        assert [worker for worker in after if after[worker] > before[worker]] == [name]
        if name != "decode-0":
            stack.kill(name)
            assert embed(stack, inputs=(text,)).vectors == expected
    assert usable(stack.status()) == ["decode-0"]
    stack.until_idle()
