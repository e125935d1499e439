"""Every call between our own processes is denied without the fleet's token: the descriptors are walked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor

from pdserve.rpc.fleet_auth import METADATA_KEY, PUBLIC_SERVICES, fleet_token
from pdserve.rpc.v1 import cluster_pb2, decode_pb2, inference_pb2, prefill_pb2, transfer_pb2
from pdserve.types import Role
from tests.support.stack import Stack

MODULES = (cluster_pb2, decode_pb2, inference_pb2, prefill_pb2, transfer_pb2)
METHODS = [
    method
    for module in MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if service.full_name not in PUBLIC_SERVICES
]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    made = Stack.start({Role.AGGREGATED: 1})
    yield made
    made.stop()


def call(address: str, method: MethodDescriptor, metadata: tuple[tuple[str, str], ...]) -> grpc.StatusCode:
    """The status of an empty call."""
    with grpc.insecure_channel(address) as channel:
        path = f"/{method.containing_service.full_name}/{method.name}"
        answers = channel.stream_stream(path)(iter([b""]), metadata=metadata, timeout=20)
        with contextlib.suppress(grpc.RpcError):
            list(answers)
        return answers.code()


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.full_name.removeprefix("pdserve.rpc.v1."))
def test_internal_calls_need_the_token(stack: Stack, method: MethodDescriptor) -> None:
    with stack.client() as client:
        worker = client.get_status().workers[0].record.peer.control
    denied = grpc.StatusCode.UNAUTHENTICATED
    for address in (stack.address, worker):
        assert call(address, method, ()) is denied
        assert call(address, method, ((METADATA_KEY, "0" * 64),)) is denied
    good = ((METADATA_KEY, fleet_token(bytes.fromhex(stack.secret))),)
    assert call(worker, method, good) is not denied
