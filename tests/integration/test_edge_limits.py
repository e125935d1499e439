"""The limits of what clients may send, each at its bound and past it, at a real router with real workers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from pdserve.rpc.status import error_from_trailers
from pdserve.rpc.v1 import common_pb2
from pdserve.rpc.v1 import inference_pb2 as pb
from tests.support.byte_model import END_ID, VOCAB
from tests.support.edge_kit import CONTEXT, Edge, stub_on
from tests.support.grpc_methods import Metadata
from tests.support.leaks import leak_in

Stub = Any
STRING = '{"type": "string"}'
INVALID, LONG, UNSUPPORTED = "invalid_request", "prompt_too_long", "unsupported"


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    made = Edge.start(tmp_path_factory.mktemp("edge"))
    yield made
    made.stack.stop()


@pytest.fixture
def stub(edge: Edge) -> Iterator[Stub]:
    with edge.channel() as channel:
        yield stub_on(channel)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A limit: what is still taken (None: nothing of the kind), what is not, and how the refusal names it."""

    good: dict[str, Any] | None = None
    bad: dict[str, Any]
    label: str = INVALID
    field: str


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling": {"max_tokens": 1, **fields}}


def biases(count: int, value: float = 1.0) -> list[dict[str, Any]]:
    return [{"token_id": i % VOCAB, "bias": value} for i in range(count)]


def number(name: str, good: float, *bad: float) -> list[Row]:
    """Rows of a number of sampling: besides what is out of its bounds, nothing that is not finite."""
    wrong = (*bad, math.nan, math.inf, -math.inf)
    return [
        Row(good=sampling(**{name: good}), bad=sampling(**{name: value}), field=f"sampling.{name}")
        for value in wrong
    ]


def schema(text: str, size: int = 0) -> dict[str, Any]:
    """A JSON schema for the answer. size: its bytes, with space behind it."""
    return sampling(grammar={"kind": common_pb2.GRAMMAR_KIND_JSON_SCHEMA, "text": text.ljust(size)})


def nested(depth: int) -> str:
    """A schema of so many objects, one in the other."""
    return '{"items": ' * (depth - 1) + "{}" + "}" * (depth - 1)


ROWS: list[Row] = [
    Row(good={"stop": ["z"] * 16}, bad={"stop": ["z"] * 17}, field="stop"),
    Row(good={"stop": ["é" * 128]}, bad={"stop": ["é" * 128 + "x"]}, field="stop"),
    Row(bad={"stop": [""]}, field="stop"),
    Row(bad=sampling(logit_bias=biases(1025)), field="sampling.logit_bias"),
    Row(
        good=sampling(logit_bias=biases(VOCAB)), bad=sampling(logit_bias=biases(2) * 2),
        field="sampling.logit_bias",
    ),
    Row(
        good=sampling(logit_bias=biases(1, 100.0)), bad=sampling(logit_bias=biases(1, 100.1)),
        field="sampling.logit_bias",
    ),
    Row(bad=sampling(logit_bias=biases(1, math.nan)), field="sampling.logit_bias"),
    Row(
        good=sampling(logit_bias=[{"token_id": VOCAB - 1, "bias": 1}]),
        bad=sampling(logit_bias=[{"token_id": VOCAB, "bias": 1}]), field="sampling.logit_bias",
    ),
    Row(good={"n": 8}, bad={"n": 9}, field="n"),
    Row(good={"n": 1, "best_of": 8}, bad={"n": 1, "best_of": 9}, field="best_of"),
    Row(good={"n": 2, "beam_width": 8}, bad={"beam_width": 9}, field="beam_width"),
    Row(bad={"beam_width": 2, "length_penalty": math.nan}, field="length_penalty"),
    Row(good={"prompt_logprobs": 20}, bad={"prompt_logprobs": 21}, field="prompt_logprobs"),
    Row(
        good=schema(STRING, size=64 << 10),
        bad=schema(STRING, size=(64 << 10) + 1),
        field="sampling.grammar",
    ),
    Row(good=schema(nested(64)), bad=schema(nested(65)), field="sampling.grammar"),
    Row(bad=schema("{"), field="sampling.grammar"),
    Row(good={"deadline_s": 600.0}, bad={"deadline_s": 600.1}, field="deadline_s"),
    Row(bad={"deadline_s": math.inf}, field="deadline_s"),
    Row(bad={"deadline_s": math.nan}, field="deadline_s"),
    Row(bad={"deadline_s": -1.0}, field="deadline_s"),
    *number("temperature", 100.0, -0.1, 100.1),
    *number("top_p", 1.0, 0.0, 1.1),
    *number("min_p", 0.0, 1.0, -0.1),
    *number("typical_p", 1.0, 0.0, 1.1),
    *number("repetition_penalty", 10.0, 0.0, 10.1),
    *number("presence_penalty", -2.0, -2.1, 2.1),
    *number("frequency_penalty", 2.0, -2.1, 2.1),
    Row(good=sampling(top_k=VOCAB), bad=sampling(top_k=VOCAB + 1), field="sampling.top_k"),
    Row(good=sampling(logprobs=20), bad=sampling(logprobs=21), field="sampling.logprobs"),
    Row(bad=sampling(max_tokens=0), field="sampling.max_tokens"),
    Row(
        good=sampling(stop_token_ids=[VOCAB - 1] * 64), bad=sampling(stop_token_ids=[1] * 65),
        field="sampling.stop_token_ids",
    ),
    Row(bad=sampling(stop_token_ids=[VOCAB]), field="sampling.stop_token_ids"),
    Row(
        good=sampling(bad_words=[{"ids": [1]}] * 64), bad=sampling(bad_words=[{"ids": [1]}] * 65),
        field="sampling.bad_words",
    ),
    Row(
        good=sampling(bad_words=[{"ids": [1] * 16}]), bad=sampling(bad_words=[{"ids": [1] * 17}]),
        field="sampling.bad_words",
    ),
    Row(good={"priority": -100}, bad={"priority": -101}, field="priority"),
    Row(
        good={"client_request_id": "é" * 64}, bad={"client_request_id": "é" * 64 + "x"},
        field="client_request_id",
    ),
    Row(good={"trace_id": "0a" * 16}, bad={"trace_id": "0A" * 16}, field="trace_id"),
    Row(bad={"resume_window_s": 1.0}, label=UNSUPPORTED, field="resume_window_s"),
    Row(bad={"prompt": ""}, field="prompt"),
    Row(bad={"tokens": {}}, field="tokens"),
    Row(bad={"chat": {}}, field="chat.messages"),
    Row(
        good={"chat": {"messages": [{"role": "user", "content": ""}]}},
        bad={"chat": {"messages": [{"role": "root", "content": "a"}]}}, field="chat.messages.role",
    ),
    Row(bad={"chat": {"messages": [{"role": "user"}] * 1025}}, field="chat.messages"),
    Row(good={"tokens": {"ids": [VOCAB - 1]}}, bad={"tokens": {"ids": [VOCAB]}}, field="tokens"),
    Row(good={"tokens": {"ids": [0]}}, bad={"tokens": {"ids": [2**32 - 1]}}, field="tokens"),
    Row(good={"prompt": "x" * (CONTEXT - 1)}, bad={"prompt": "x" * CONTEXT}, label=LONG, field=""),
    Row(
        good={"tokens": {"ids": [1] * (CONTEXT - 1)}}, bad={"tokens": {"ids": [1] * CONTEXT}},
        label=LONG, field="",
    ),
]  # fmt: skip


def request(**fields: Any) -> pb.GenerateRequest:
    """One token, unless the row says otherwise."""
    prompt = {} if {"prompt", "tokens", "chat"} & fields.keys() else {"prompt": "abc"}
    return pb.GenerateRequest(**{**prompt, **sampling(), **fields})


def generate(stub: Stub, metadata: Metadata, message: pb.GenerateRequest) -> pb.End:
    return list(stub.Generate(message, metadata=metadata, timeout=60))[-1].end


def refusal(stub: Stub, metadata: Metadata, message: pb.GenerateRequest) -> Any:
    """The error that a request is refused with, as a client sees it."""
    with pytest.raises(grpc.RpcError) as caught:
        generate(stub, metadata, message)
    error: Any = caught.value
    assert leak_in(error.details()) == ""
    return error_from_trailers(error.code(), error.trailing_metadata(), error.details())


def name_of(row: Row) -> str:
    return f"{row.field or 'context'}-{ROWS.index(row)}"


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_a_limit_holds_and_what_keeps_it_is_taken(edge: Edge, stub: Stub, row: Row) -> None:
    error = refusal(stub, edge.of("shop"), request(**row.bad))
    assert error.label == row.label
    assert [violation.field for violation in error.violations] == ([row.field] if row.field else [])
    assert error.message.endswith(".")
    if row.good is not None:
        assert generate(stub, edge.of("shop"), request(**row.good)).usage.completion_tokens >= 1


def test_a_message_may_have_4_mb(edge: Edge, stub: Stub) -> None:
    limit = 4 << 20
    room = 2 * limit - request(prompt="x" * limit).ByteSize()
    assert refusal(stub, edge.of("shop"), request(prompt="x" * room)).label == LONG
    error = refusal(stub, edge.of("shop"), request(prompt="x" * (room + 1)))
    assert (error.label, "4 MB" in error.message) == (INVALID, True)


def test_metadata_may_have_8_kb(edge: Edge, stub: Stub) -> None:
    def status(size: int) -> grpc.StatusCode:
        call = stub.GetModel.future(
            pb.GetModelRequest(), metadata=(*edge.of("shop"), ("x-large", "y" * size)), timeout=30
        )
        code: grpc.StatusCode = call.code()
        return code

    assert status(7000) is grpc.StatusCode.OK
    assert status(8 << 10) is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_special_tokens_in_what_users_write_stay_text(edge: Edge, stub: Stub) -> None:
    text = "<|end|>"
    plain = stub.Tokenize(pb.TokenizeRequest(prompt=text), metadata=edge.of("shop"), timeout=30)
    assert list(plain.ids) == list(text.encode())
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=text)])
    told = stub.Tokenize(pb.TokenizeRequest(chat=chat), metadata=edge.of("shop"), timeout=30)
    assert END_ID not in told.ids
    assert text.encode() in bytes(told.ids)
    assert generate(stub, edge.of("shop"), request(prompt=text)).usage.prompt_tokens == len(text)


def test_a_deadline_ends_the_request_and_leaves_nothing(edge: Edge, stub: Stub) -> None:
    long = request(prompt="count", sampling={"max_tokens": 450, "ignore_eos": True}, deadline_s=0.05)
    assert refusal(stub, edge.of("shop"), long).label == "deadline_expired"
    edge.stack.until_idle()
