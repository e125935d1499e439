"""Contracts of other systems that a router speaks too, each over the same hub as its own.

oip: the Open Inference Protocol v2, as KServe's and Triton's clients speak it. vllm: the contract between
gateways and vLLM's engines. Both are only loaded where they are asked for.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    import grpc.aio

    from router.hub import Hub


def add_to(server: grpc.aio.Server, hub: Hub, protocols: tuple[str, ...]) -> list[str]:
    """Has a server speak these protocols; returns full names of their services. Raises ConfigError where the
    package of one is missing."""
    names = []
    if "oip" in protocols:
        from pdserve.rpc.oip.v2 import open_inference_pb2_grpc
        from router.neighbours import open_inference

        servicer = open_inference.OpenInferenceServicer(hub)
        open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
        names.append(open_inference.SERVICE)
    if "vllm" in protocols:
        if importlib.util.find_spec("smg_grpc_proto") is None:
            raise ConfigError("protocols: vllm needs a package: pip install 'pdserve[neighbours]'")
        from router.neighbours import vllm_engine

        vllm_engine.add_to(server, hub)
        names.append(vllm_engine.SERVICE)
    return names
