"""Hostile requests to the calls of other systems that a router speaks: as `test_edge_fuzz`, of its own.

A real router and two real workers of a tiny model. 300 cases a call; 10,000 with the marker `full`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from pdserve.rpc.access import RULES, Access
from pdserve.rpc.oip.v2 import open_inference_pb2 as oip
from tests.support.bombard import attack_as_client
from tests.support.edge_kit import Edge
from tests.support.grpc_methods import neighbour_methods, path_of

METHODS = [m for m in neighbour_methods() if RULES[path_of(m)] in (Access.CLIENT, Access.ADMIN)]
VALID: dict[str, Message] = {
    "Generate": vllm.GenerateRequest(
        request_id="r", tokenized={"input_ids": [97, 98]}, sampling_params={"max_tokens": 3}, stream=True
    ),
    "Embed": vllm.EmbedRequest(request_id="r", tokenized={"input_ids": [97, 98]}),
    "Abort": vllm.AbortRequest(request_ids=["r"]),
    "ModelInfer": oip.ModelInferRequest(
        model_name="model",
        inputs=[
            {"name": "text_input", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [b"ab"]}}
        ],
    ),
}


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    made = Edge.start(tmp_path_factory.mktemp("edge"))
    yield made
    made.stack.stop()


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_300_cases_harm_nothing(edge: Edge, method: MethodDescriptor) -> None:
    attack_as_client(edge, method, 300, VALID.get(method.name))


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_10000_cases_harm_nothing(edge: Edge, method: MethodDescriptor) -> None:
    attack_as_client(edge, method, 10_000, VALID.get(method.name))
