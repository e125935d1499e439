"""Every method of every service of ours, from the descriptors, and a call of one without stubs."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil

import grpc
from google.protobuf.descriptor import MethodDescriptor
from smg_grpc_proto.generated import vllm_engine_pb2

from pdserve.rpc import v1
from pdserve.rpc.oip.v2 import open_inference_pb2

Metadata = tuple[tuple[str, str], ...]


def our_methods() -> list[MethodDescriptor]:
    """All of them, whatever the module they are generated into."""
    names = [info.name for info in pkgutil.iter_modules(v1.__path__) if info.name.endswith("_pb2")]
    modules = [importlib.import_module(f"pdserve.rpc.v1.{name}") for name in names]
    services = [service for m in modules for service in m.DESCRIPTOR.services_by_name.values()]
    return [method for service in services for method in service.methods]


def neighbour_methods() -> list[MethodDescriptor]:
    """Those of other systems' contracts that a router speaks where it is asked to."""
    services = (
        open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"],
        vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"],
    )
    return [method for service in services for method in service.methods]


def path_of(method: MethodDescriptor) -> str:
    """Its name on the wire."""
    return f"/{method.containing_service.full_name}/{method.name}"


def status_of(
    address: str, path: str, metadata: Metadata = (), message: bytes = b""
) -> tuple[grpc.StatusCode, str]:
    """How a call with one message ends, of any kind of method: status and text."""
    with grpc.insecure_channel(address) as channel:
        answers = channel.stream_stream(path)(iter([message]), metadata=metadata, timeout=30)
        with contextlib.suppress(grpc.RpcError):
            list(answers)
        return answers.code(), answers.details() or ""
