"""Hostile requests to every call that clients have: none ends an engine, leaks, or tells of our insides.

A real router and two real workers of a tiny model. 300 cases a call; 10,000 with the marker `full`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, Phase, given, settings

from pdserve.rpc.access import RULES, Access
from pdserve.rpc.status import error_from_trailers
from pdserve.rpc.v1 import inference_pb2 as pb
from tests.support.edge_kit import Edge, stub_on
from tests.support.grpc_methods import our_methods, path_of
from tests.support.leaks import is_label, leak_in
from tests.support.proto_fuzz import wire

METHODS = [m for m in our_methods() if RULES[path_of(m)] in (Access.CLIENT, Access.ADMIN)]
VALID: dict[str, Message] = {
    "Generate": pb.GenerateRequest(
        prompt="abc", sampling={"max_tokens": 3, "temperature": 1.0}, stop=["z"], deadline_s=5, n=1
    ),
    "Abort": pb.AbortRequest(request_id="0" * 32),
    "Explain": pb.ExplainRequest(request_id="0" * 32),
    "Tokenize": pb.TokenizeRequest(prompt="abc"),
    "Detokenize": pb.DetokenizeRequest(ids=[97, 98]),
    "Embed": pb.EmbedRequest(inputs=[pb.TextOrTokens(text="abc")], deadline_s=5),
    "Score": pb.ScoreRequest(
        prompt=pb.TextOrTokens(text="ab"), continuations=[pb.TextOrTokens(text="c")], deadline_s=5
    ),
}
CALL_S = 20.0
LITTLE_S = 1.0
MAX_EVENTS = 6
"""Read of a stream before it is cancelled: long ones are hostile enough by their beginning."""
NEVER = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED)
GROWTH_BYTES = 200 << 20


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    made = Edge.start(tmp_path_factory.mktemp("edge"))
    yield made
    made.stack.stop()


def send(edge: Edge, channel: grpc.Channel, method: MethodDescriptor, data: bytes) -> None:
    """One case: it is answered, or refused with an error that may be shown."""
    call = channel.unary_stream(path_of(method))(data, metadata=edge.of("admin"), timeout=CALL_S)
    try:
        for count, _ in enumerate(call):
            if count == MAX_EVENTS:
                call.cancel()
                return
    except grpc.RpcError:
        check(call, hurried=asks_for_little_time(method, data))


def asks_for_little_time(method: MethodDescriptor, data: bytes) -> bool:
    """Whether a case's own deadline may well be over before it is answered."""
    try:
        message = GetMessageClass(method.input_type).FromString(data)
    except DecodeError:
        return False
    return 0 < getattr(message, "deadline_s", 0.0) < LITTLE_S


def check(call: Any, *, hurried: bool) -> None:
    """An error as it reaches a client."""
    code, text = call.code(), call.details() or ""
    assert code not in NEVER or (hurried and code is grpc.StatusCode.DEADLINE_EXCEEDED), (code, text)
    error = error_from_trailers(code, call.trailing_metadata(), text)
    assert is_label(error.label)
    for shown in (text, error.message, *(v.description for v in error.violations)):
        assert leak_in(shown) == ""


def processes(edge: Edge) -> list[psutil.Process]:
    return [psutil.Process(p.pid) for p in (edge.stack.router, *edge.stack.workers.values())]


def bombard(edge: Edge, method: MethodDescriptor, cases: int) -> None:
    """Sends so many cases of one call, then looks at everything that must still be well."""
    name = method.name
    valid = VALID[name].SerializeToString() if name in VALID else b""
    with edge.channel() as channel:

        @settings(
            max_examples=cases, deadline=None, database=None, derandomize=True,
            phases=(Phase.generate,), suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(wire(GetMessageClass(method.input_type), valid))
        def case(data: bytes) -> None:
            send(edge, channel, method, data)

        before = [process.memory_info().rss for process in processes(edge)]
        case()
        for process, size in zip(processes(edge), before, strict=True):
            assert process.memory_info().rss - size < GROWTH_BYTES, process.name()
        edge.stack.until_idle()
        request = pb.GenerateRequest(prompt="still there?", sampling={"max_tokens": 2, "ignore_eos": True})
        events = list(stub_on(channel).Generate(request, metadata=edge.of("shop"), timeout=60))
        assert events[-1].end.usage.completion_tokens == 2
    assert edge.stack.router.poll() is None
    assert all(worker.poll() is None for worker in edge.stack.workers.values())
    assert "Traceback" not in edge.log.read_text()


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_300_cases_harm_nothing(edge: Edge, method: MethodDescriptor) -> None:
    bombard(edge, method, 300)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_10000_cases_harm_nothing(edge: Edge, method: MethodDescriptor) -> None:
    bombard(edge, method, 10_000)
