"""Hostile requests to every call that clients have: none ends an engine, leaks, or tells of our insides.

A real router and two real workers of a tiny model. 300 cases a call; 10,000 with the marker `full`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from pdserve.rpc.access import RULES, Access
from pdserve.rpc.v1 import inference_pb2 as pb
from tests.support.bombard import attack_as_client
from tests.support.edge_kit import Edge
from tests.support.grpc_methods import our_methods, path_of

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
