"""Hostile messages at a running router and its workers, and the look at both afterwards.

What lives here: sending cases of one call, and what must be true of every answer and of all processes after.
What does not: how messages are made (`proto_fuzz`), which calls are meant.
"""

from __future__ import annotations

from typing import Any

import grpc
import psutil
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, Phase, given, settings

from pdserve.rpc.status import DETAILS_KEY, error_from_trailers
from pdserve.rpc.v1 import inference_pb2 as pb
from tests.support.edge_kit import Edge, stub_on
from tests.support.grpc_methods import Metadata, path_of
from tests.support.leaks import is_label, leak_in
from tests.support.proto_fuzz import wire

CALL_S = 20.0
MAX_EVENTS = 6
"""Read of a stream before it is cancelled: long ones are hostile enough by their beginning."""
NEVER = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
GROWTH_BYTES = 100 << 20


def bombard(
    edge: Edge, address: str, method: MethodDescriptor, metadata: Metadata, cases: int, valid: bytes = b""
) -> None:
    """Sends so many cases of one call. valid: a message that is in order."""
    with grpc.insecure_channel(address) as channel:

        @settings(
            max_examples=cases, deadline=None, database=None, derandomize=True,
            phases=(Phase.generate,), suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(wire(GetMessageClass(method.input_type), valid))
        def case(data: bytes) -> None:
            _send(channel, path_of(method), metadata, data)

        before = [process.memory_info().rss for process in _processes(edge)]
        case()
        for process, size in zip(_processes(edge), before, strict=True):
            assert process.memory_info().rss - size < GROWTH_BYTES, process.name()


def attack_as_client(edge: Edge, method: MethodDescriptor, cases: int, valid: Message | None) -> None:
    """Sends them to the router with an admin's key; everything is well afterwards. valid: see `bombard`."""
    data = b"" if valid is None else valid.SerializeToString()
    bombard(edge, edge.stack.address, method, edge.of("admin"), cases, data)
    still_serves(edge)


def _send(channel: grpc.Channel, path: str, metadata: Metadata, data: bytes) -> None:
    """One case: it is answered, or refused with an error that may be shown."""
    call = channel.stream_stream(path)(iter([data]), metadata=metadata, timeout=CALL_S)
    try:
        for count, _ in enumerate(call):
            if count == MAX_EVENTS:
                call.cancel()
                return
    except grpc.RpcError:
        _check(call)


def _check(call: Any) -> None:
    """An error as it reaches a client."""
    code, text = call.code(), call.details() or ""
    assert code not in NEVER, (code, text)
    told = DETAILS_KEY in dict(call.trailing_metadata() or ())
    assert told or code is not grpc.StatusCode.DEADLINE_EXCEEDED, "no answer at all"
    error = error_from_trailers(code, call.trailing_metadata(), text)
    assert is_label(error.label)
    for shown in (text, error.message, *(v.description for v in error.violations)):
        assert leak_in(shown) == ""


def _processes(edge: Edge) -> list[psutil.Process]:
    return [psutil.Process(p.pid) for p in (edge.stack.router, *edge.stack.workers.values())]


def all_alive(edge: Edge) -> None:
    """No process has ended, no page is held, nothing unexpected was logged."""
    assert edge.stack.router.poll() is None
    assert all(worker.poll() is None for worker in edge.stack.workers.values())
    edge.stack.until_idle()
    assert "Traceback" not in edge.log.read_text()


def still_serves(edge: Edge) -> None:
    """A request goes through, and everything is well."""
    with edge.channel() as channel:
        request = pb.GenerateRequest(prompt="still there?", sampling={"max_tokens": 2, "ignore_eos": True})
        events = list(stub_on(channel).Generate(request, metadata=edge.of("shop"), timeout=60))
    assert events[-1].end.usage.completion_tokens == 2
    all_alive(edge)
