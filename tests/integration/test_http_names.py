"""A refusal names the field as the client wrote it, whatever its name is within."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.http_kit import served

CHAT = [{"role": "user", "content": "hi"}]

WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/completions", {"prompt": [-1]}, "prompt", "invalid_request"),
    ("/v1/completions", {"prompt": "a", "tokens": [1]}, "tokens", "unsupported"),
    ("/v1/chat/completions", {"messages": CHAT, "input": "a"}, "input", "unsupported"),
    ("/v1/chat/completions", {"messages": CHAT, "metadata": {"a": "b"}}, "metadata", "unsupported"),
    ("/v1/responses", {}, "input", "invalid_request"),
    ("/v1/responses", {"input": []}, "input", "invalid_request"),
    ("/v1/responses", {"input": "a", "max_tokens": 1}, "max_tokens", "unsupported"),
    ("/v1/responses", {"input": "a", "max_output_tokens": 0}, "max_output_tokens", "invalid_request"),
    ("/v1/responses", {"input": "a", "previous_response_id": "x"}, "previous_response_id", "unsupported"),
    ("/v1/embeddings", {"input": ""}, "input", "invalid_request"),
    ("/v1/embeddings", {"input": None}, "input", "invalid_request"),
    ("/detokenize", {"tokens": "a"}, "tokens", "invalid_request"),
    ("/detokenize", {"tokens": [-1]}, "tokens", "invalid_request"),
]


@pytest.mark.parametrize(("path", "body", "param", "code"), WRONG)
async def test_a_refusal_names_the_field_of_the_body(
    path: str, body: dict[str, Any], param: str, code: str
) -> None:
    async with served() as api:
        answer = await api.post(path, body)
    told = answer.json()["error"]
    assert (answer.status_code, told["param"], told["code"]) == (400, param, code)
    assert told["message"].startswith(f"{param}: ")


async def test_messages_name_theirs_too() -> None:
    asked = {"model": "bytes", "messages": CHAT, "max_tokens": 1}
    async with served() as api:
        empty = await api.post("/v1/messages", {**asked, "stop_sequences": [""]})
        unknown = await api.post("/v1/messages", {**asked, "stop": ["a"]})
    assert empty.json()["error"]["message"].startswith("stop_sequences: ")
    assert unknown.json()["error"]["message"].startswith("stop: ")
