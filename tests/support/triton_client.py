"""Triton's own client against a server: a program of its own, as its messages have the names of ours.

    python -m tests.support.triton_client HOST:PORT PROMPT MAX_TOKENS

Prints one JSON object.
"""

from __future__ import annotations

import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException


def texts(*values: str) -> Any:
    """A BYTES tensor of texts."""
    tensor = triton.InferInput("text_input", [len(values)], "BYTES")
    tensor.set_data_from_numpy(np.array([value.encode() for value in values], dtype=np.object_))
    return tensor


def streamed(client: Any, model: str, prompt: str, parameters: dict[str, Any]) -> tuple[list[str], bool]:
    """The parts of one streamed answer, and whether the last is marked as the final one."""
    found: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: found.put(error or result))
    client.async_stream_infer(model, [texts(prompt)], parameters=parameters)
    parts, final = [], False
    while not final:
        result = found.get(timeout=60)
        if isinstance(result, InferenceServerException):
            raise result
        parts.append(result.as_numpy("text_output")[0].decode())
        final = result.get_response().parameters["triton_final_response"].bool_param
    client.stop_stream()
    return parts, final


def refused(client: Any, model: str, parameters: dict[str, Any]) -> str:
    """What the server says to parameters it does not take."""
    try:
        client.infer(model, [texts("x")], parameters=parameters)
    except InferenceServerException as error:
        return str(error)
    return ""


def main(address: str, prompt: str, max_tokens: str) -> None:
    client = triton.InferenceServerClient(address)
    model = client.get_model_metadata("").name
    asked = {"max_tokens": int(max_tokens), "temperature": 0.0, "ignore_eos": True}
    outputs = [triton.InferRequestedOutput("text_output"), triton.InferRequestedOutput("finish_reason")]
    both = client.infer(model, [texts(prompt, prompt)], parameters=asked, outputs=outputs, request_id="a")
    parts, final = streamed(client, model, prompt, asked)
    print(json.dumps({
        "live": client.is_server_live(), "ready": client.is_server_ready(),
        "model_ready": client.is_model_ready(model), "other_ready": client.is_model_ready("other"),
        "server": client.get_server_metadata().name, "model": model, "id": both.get_response().id,
        "texts": [text.decode() for text in both.as_numpy("text_output")],
        "finish": [text.decode() for text in both.as_numpy("finish_reason")],
        "parts": parts, "final": final, "refused": refused(client, model, {"best_before": 3}),
    }))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
