"""Tensors and parameters of the Open Inference Protocol as requests, and texts as tensors. Pure."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pdserve.api import GenerateInput, SamplingInput
from pdserve.errors import InvalidRequest, UnsupportedFeature
from pdserve.rpc.oip.v2 import open_inference_pb2 as pb

TEXT_IN, TEXT_OUT, FINISH = "text_input", "text_output", "finish_reason"
MAX_TEXTS = 64
MODEL_VERSION = "1"
_LENGTH = struct.Struct("<I")


def texts(request: pb.ModelInferRequest) -> list[str]:
    """The prompts of a request. Raises InvalidRequest or UnsupportedFeature naming the tensor."""
    if len(request.inputs) != 1 or request.inputs[0].name != TEXT_IN:
        raise InvalidRequest.field("inputs", f"send one tensor, {TEXT_IN}, of BYTES.")
    tensor = request.inputs[0]
    if tensor.datatype != "BYTES":
        raise UnsupportedFeature.field(f"inputs.{TEXT_IN}.datatype", "must be BYTES.")
    if request.raw_input_contents:
        if len(request.raw_input_contents) != 1 or tensor.HasField("contents"):
            raise InvalidRequest.field("raw_input_contents", "needs one entry for each input, or none.")
        found = _unpacked(request.raw_input_contents[0])
    else:
        found = list(tensor.contents.bytes_contents)
    _check_shape(tensor.shape, len(found))
    try:
        return [text.decode() for text in found]
    except UnicodeDecodeError:
        raise InvalidRequest.field(f"inputs.{TEXT_IN}", "texts must be UTF-8.") from None


def _check_shape(shape: Sequence[int], count: int) -> None:
    size = 1
    for side in shape:
        size *= side
    if not shape or any(side < 1 for side in shape) or size != count:
        raise InvalidRequest.field(f"inputs.{TEXT_IN}.shape", f"does not fit the {count} texts sent.")


def _unpacked(data: bytes) -> list[bytes]:
    """BYTES elements: each a length of four bytes, little-endian, and so many bytes."""
    out: list[bytes] = []
    at = 0
    while at < len(data):
        if len(out) == MAX_TEXTS:
            raise InvalidRequest.field("raw_input_contents", f"may hold {MAX_TEXTS} texts at most.")
        if at + _LENGTH.size > len(data):
            raise _broken()
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + length > len(data):
            raise _broken()
        out.append(data[at : at + length])
        at += length
    return out


def _broken() -> InvalidRequest:
    return InvalidRequest.field("raw_input_contents", "is not a tensor of BYTES: lengths do not add up.")


def packed(values: Sequence[str]) -> bytes:
    """Texts as the raw contents of a BYTES tensor."""
    return b"".join(_LENGTH.pack(len(data)) + data for data in (value.encode() for value in values))


# ---- parameters ---------------------------------------------------------------------------------------


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest.field(f"parameters.{name}", "must be a number.")
    return float(value)


def _integer(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest.field(f"parameters.{name}", "must be a whole number.")
    return value


def _whole(value: Any, name: str) -> int:
    if _integer(value, name) < 0:
        raise InvalidRequest.field(f"parameters.{name}", "must be a whole number of at least 0.")
    return int(value)


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest.field(f"parameters.{name}", "must be true or false.")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest.field(f"parameters.{name}", "must be a text.")
    return value


_SAMPLING: Mapping[str, Callable[[Any, str], Any]] = {
    "temperature": _number, "top_k": _whole, "top_p": _number, "min_p": _number, "typical_p": _number,
    "seed": _whole, "max_tokens": _whole, "min_tokens": _whole, "ignore_eos": _flag,
    "repetition_penalty": _number, "presence_penalty": _number, "frequency_penalty": _number,
}  # fmt: skip
_PLAIN: Mapping[str, Callable[[Any, str], Any]] = {
    "priority": _integer,
    "deadline_s": _number,
    "no_prefix_cache": _flag,
}
_IGNORED = frozenset({"triton_enable_empty_final_response"})
"""What Triton's client adds by itself; every stream of ours ends with a final response."""


def asked(request: pb.ModelInferRequest, prompt: str) -> GenerateInput:
    """A request for generation of one text. Raises InvalidRequest, or UnsupportedFeature by name."""
    plain: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    for name, parameter in request.parameters.items():
        which = parameter.WhichOneof("parameter_choice")
        value = None if which is None else getattr(parameter, which)
        if name == "stop":
            plain["stop"] = (_text(value, name),)
        elif name in _SAMPLING:
            sampling[name] = _SAMPLING[name](value, name)
        elif name in _PLAIN:
            plain[name] = _PLAIN[name](value, name)
        elif name not in _IGNORED:
            raise UnsupportedFeature.field(f"parameters.{name}"[:200], "is not known here; leave it out.")
    return GenerateInput(
        model=request.model_name,
        prompt=prompt,
        sampling=dataclasses.replace(SamplingInput(), **sampling),
        client_request_id=request.id,
        **plain,
    )


def response(
    request: pb.ModelInferRequest, made: Sequence[str], finishes: Sequence[str]
) -> pb.ModelInferResponse:
    """Texts as the outputs that the request asks for; all of them if it names none. Raises InvalidRequest for
    one that is not known."""
    known = {TEXT_OUT: made, FINISH: finishes}
    wanted = [output.name for output in request.outputs] or [TEXT_OUT]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise InvalidRequest.field("outputs", f"there are {TEXT_OUT} and {FINISH} only.")
    tensor = pb.ModelInferResponse.InferOutputTensor
    tensors = [tensor(name=name, datatype="BYTES", shape=[len(made)]) for name in wanted]
    return pb.ModelInferResponse(
        model_name=request.model_name,
        model_version=MODEL_VERSION,
        id=request.id,
        outputs=tensors,
        raw_output_contents=[packed(known[name]) for name in wanted],
    )
