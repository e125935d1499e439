"""Hostile bodies to every route: no 500, no path, address or object in what is said; then it still serves.

300 cases a route; 10,000 with the marker `full`. What generates ends after three tokens.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.byte_model import text_of
from tests.support.http_kit import Served
from tests.support.http_thread import serving
from tests.support.leaks import is_label, leak_in

CHAT: Any = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": "x", "reasoning": "y"},
    {"role": "user", "content": "go on"},
]
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "model": "bytes", "prompt": "once", "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "n": 2,
        "stop": ["z"], "logit_bias": {"3": 1.0}, "logprobs": 1, "echo": True, "seed": 3, "top_k": 4,
        "stream_options": None, "stop_token_ids": [4], "bad_words": ["no"], "min_tokens": 1, "user": "me",
    },
    "/v1/chat/completions": {
        "messages": CHAT, "max_completion_tokens": 4, "tools": TOOLS, "tool_choice": "auto",
        "response_format": {"type": "text"}, "logprobs": True, "top_logprobs": 2, "stream": True,
        "stream_options": {"include_usage": True}, "chat_template_kwargs": {"enable_thinking": False},
    },
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        "max_output_tokens": 4, "instructions": "i", "text": {"format": {"type": "text"}},
        "metadata": {"a": "b"}, "stream": True,
    },
    "/v1/messages": {
        "model": "bytes", "messages": CHAT[1:2], "max_tokens": 4, "system": [{"type": "text", "text": "s"}],
        "stop_sequences": ["z"], "tools": [{"name": "f", "input_schema": {"type": "object"}}], "top_k": 3,
    },
    "/v1/messages/count_tokens": {"model": "bytes", "messages": CHAT[3:]},
    "/v1/embeddings": {"input": ["once"], "encoding_format": "float", "dimensions": 8},
    "/tokenize": {"prompt": "once", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"tokens": [97, 98]},
}  # fmt: skip
NAMES = (
    "model",
    "prompt",
    "messages",
    "role",
    "content",
    "type",
    "text",
    "tools",
    "x",
    "",
    "__class__",
    "\u202e",
)
SCALARS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, -(2**70), 10**300, 0.5, -0.0, 1e308, 5e-324, "", "a",
    "\x00", "é" * 300, "\U0001f600" * 200, "{{ 7*7 }}", "<|end|>", "%s%n", "x" * 9000, "user", "tool", "text",
)  # fmt: skip
JSON_VALUES = st.recursive(
    st.sampled_from(SCALARS) | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=8,
)
ROUTES = sorted(VALID)


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[httpx2.Client, Served]]:
    with serving(ends_at=3) as made:
        yield made


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a body."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places(value[key])


def bend(body: Any, values: list[Any], draw: random.Random) -> Any:
    """A body with some of its values replaced, dropped or added."""
    for value in values:
        found = list(places(body))
        if not found:
            break
        container, key = draw.choice(found)
        how = draw.randrange(4)
        if how == 0 and isinstance(container, dict):
            container[draw.choice(NAMES)] = value
        elif how == 1 and isinstance(container, dict):
            del container[key]
        else:
            container[key] = value
    return body


def bodies(path: str) -> st.SearchStrategy[bytes]:
    """Bent JSON, bent bytes, and noise."""
    raw = json.dumps(VALID[path]).encode()

    def spoilt(cut: int, noise: bytes) -> bytes:
        at = cut % len(raw)
        return raw[:at] + noise + raw[at + len(noise) :]

    bent = st.builds(
        lambda values, draw: json.dumps(bend(copy.deepcopy(VALID[path]), values, draw)).encode(),
        st.lists(JSON_VALUES, min_size=1, max_size=3),
        st.randoms(use_true_random=False),
    )
    return st.one_of(bent, bent, bent, st.builds(spoilt, st.integers(0), st.binary(max_size=6)), st.binary())


def check(answer: httpx2.Response) -> None:
    """It was carried out, or refused with an error that may be shown."""
    assert answer.status_code < 500 or answer.status_code == 503, answer.text  # scripted workers do not embed
    if answer.status_code == 200:
        return
    told = answer.json()
    error = told["error"]
    assert error["message"], told
    assert "code" not in error or is_label(error["code"]), told
    assert not leak_in(error["message"]), told


def many(count: int) -> Callable[[Any], Any]:
    return settings(
        max_examples=count, deadline=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


def bombard(running: tuple[httpx2.Client, Served], path: str, count: int) -> None:
    client, api = running

    @many(count)
    @given(bodies(path))
    def case(raw: bytes) -> None:
        check(client.post(path, content=raw, headers={"content-type": "application/json"}))

    case()
    asked = {"prompt": "once", "max_tokens": 3, "ignore_eos": True}
    assert client.post("/v1/completions", json=asked).json()["choices"][0]["text"] == text_of("once", 3)
    assert api.fleet.router.hub.status().running == 0


@pytest.mark.parametrize("path", ROUTES)
def test_300_bodies_harm_nothing(running: tuple[httpx2.Client, Served], path: str) -> None:
    bombard(running, path, 300)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", ROUTES)
def test_10000_bodies_harm_nothing(running: tuple[httpx2.Client, Served], path: str) -> None:
    bombard(running, path, 10_000)


def by_the_page(running: tuple[httpx2.Client, Served], count: int) -> int:
    """Requests that schemathesis makes out of our OpenAPI page; how many operations it found."""
    _, api = running
    schema = schemathesis.openapi.from_url(f"{api.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    for operation in operations:

        @many(count)
        @given(operation.as_strategy())
        def case(made: schemathesis.Case) -> None:
            answer = made.call(base_url=api.url)
            assert answer.status_code != 500, made.as_curl_command()

        case()
    return len(operations)


def test_what_the_openapi_page_allows_is_never_a_500(running: tuple[httpx2.Client, Served]) -> None:
    assert by_the_page(running, 10) >= len(ROUTES)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_much_of_what_the_openapi_page_allows(running: tuple[httpx2.Client, Served]) -> None:
    by_the_page(running, 500)
