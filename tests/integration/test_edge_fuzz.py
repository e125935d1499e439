"""Hostile requests to every call that clients have: none ends an engine, leaks, or tells of our insides.

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
from pdserve.rpc.v1 import inference_pb2 as pb
from router.service import INFERENCE
from tests.support.bombard import bombard, still_serves
from tests.support.edge_kit import Edge
from tests.support.grpc_methods import neighbour_methods, our_methods, path_of

METHODS = [
    m for m in (*our_methods(), *neighbour_methods()) if RULES[path_of(m)] in (Access.CLIENT, Access.ADMIN)
]
VLLM = "/vllm.grpc.engine.VllmEngine"
VALID: dict[str, Message] = {
    f"/{INFERENCE}/Generate": pb.GenerateRequest(
        prompt="abc", sampling={"max_tokens": 3, "temperature": 1.0}, stop=["z"], deadline_s=5, n=1
    ),
    f"/{INFERENCE}/Abort": pb.AbortRequest(request_id="0" * 32),
    f"/{INFERENCE}/Explain": pb.ExplainRequest(request_id="0" * 32),
    f"/{INFERENCE}/Tokenize": pb.TokenizeRequest(prompt="abc"),
    f"/{INFERENCE}/Detokenize": pb.DetokenizeRequest(ids=[97, 98]),
    f"/{INFERENCE}/Embed": pb.EmbedRequest(inputs=[pb.TextOrTokens(text="abc")], deadline_s=5),
    f"/{INFERENCE}/Score": pb.ScoreRequest(
        prompt=pb.TextOrTokens(text="ab"), continuations=[pb.TextOrTokens(text="c")], deadline_s=5
    ),
    f"{VLLM}/Generate": vllm.GenerateRequest(
        request_id="r", tokenized={"input_ids": [97, 98]}, sampling_params={"max_tokens": 3}, stream=True
    ),
    f"{VLLM}/Embed": vllm.EmbedRequest(request_id="r", tokenized={"input_ids": [97, 98]}),
    f"{VLLM}/Abort": vllm.AbortRequest(request_ids=["r"]),
    "/inference.GRPCInferenceService/ModelInfer": oip.ModelInferRequest(
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


def attack(edge: Edge, method: MethodDescriptor, cases: int) -> None:
    valid = VALID[path_of(method)].SerializeToString() if path_of(method) in VALID else b""
    bombard(edge, edge.stack.address, method, edge.of("admin"), cases, valid)
    still_serves(edge)


@pytest.mark.parametrize("method", METHODS, ids=path_of)
def test_300_cases_harm_nothing(edge: Edge, method: MethodDescriptor) -> None:
    attack(edge, method, 300)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("method", METHODS, ids=path_of)
def test_10000_cases_harm_nothing(edge: Edge, method: MethodDescriptor) -> None:
    attack(edge, method, 10_000)
