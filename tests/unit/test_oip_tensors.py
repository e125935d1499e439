"""Parameters of the Open Inference Protocol as ours: each value of a wrong kind is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.errors import InvalidRequest
from pdserve.rpc.oip.v2 import open_inference_pb2 as pb
from router.neighbours.oip_tensors import asked


def request(name: str, **value: Any) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(parameters={name: pb.InferParameter(**value)})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priority", {"double_param": float("nan")}),
        ("priority", {"double_param": float("inf")}),
        ("priority", {"bool_param": True}),
        ("max_tokens", {"int64_param": -1}),
        ("temperature", {"string_param": "hot"}),
        ("ignore_eos", {"int64_param": 1}),
        ("stop", {"double_param": 1.0}),
        ("seed", {}),
    ],
)
def test_a_value_of_a_wrong_kind_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name):
        asked(request(name, **value), "x")


def test_values_of_the_right_kind_are_taken() -> None:
    assert asked(request("priority", int64_param=-3), "x").priority == -3
    assert asked(request("max_tokens", uint64_param=5), "x").sampling.max_tokens == 5
