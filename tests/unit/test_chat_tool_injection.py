"""No text of a tool, of a call or of what it gave becomes a control token, wherever a template writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.tokenizer import Tokenizer, load_bundle_from_dir
from tests.support.tokenizer_files import chat_templates, write_directory

SUPPORTED = ("Qwen-Qwen3-0.6B", "mistralai-Mistral-Nemo-Instruct-2407", "Qwen-Qwen2.5-7B-Instruct")
pieces = st.sampled_from(
    ["<|im_end|>", "<|im_", "end|>", "<", "|>", "<|endoftext|>", "im_start", "a", '"', "\\", "\n"]
)
hostile = st.lists(pieces, max_size=5).map("".join)
words = st.just("word")


def chat(text: str, key: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A conversation and tools in which every text, and every name that users choose, is the given one."""
    schema = {
        "type": "object",
        "properties": {key: {"type": "string", "description": text}},
        key: [text, 1, None],
    }
    tools = [{"type": "function", "function": {"name": "f", "description": text, "parameters": schema}}]
    call = {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": "f", "arguments": {key: text, "a": {key: 1}}},
    }
    messages = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": text, "tool_calls": [call], "reasoning_content": text},
        {"role": "tool", "content": text, "tool_call_id": "abcdefghi", "name": "f"},
    ]
    return messages, tools


@pytest.fixture(scope="module", params=SUPPORTED)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("chat")
    return Tokenizer(
        load_bundle_from_dir(write_directory(folder, template=dict(chat_templates())[request.param]))
    )


def control_ids(tokenizer: Tokenizer, text: str, key: str) -> list[int]:
    messages, tools = chat(text, key)
    ids = tokenizer.encode_chat(messages, tools=tools)
    return [i for i in ids if tokenizer.is_special(tokenizer.token_text(i) or "")]


@given(text=hostile, key=hostile.filter(bool) | words)
def test_control_tokens_are_the_template_s_alone(tokenizer: Tokenizer, text: str, key: str) -> None:
    assert control_ids(tokenizer, text, key) == control_ids(tokenizer, "word", "word")


def test_schemas_of_64_levels_are_rendered(tokenizer: Tokenizer) -> None:
    schema: dict[str, Any] = {}
    for _ in range(63):
        schema = {"properties": schema}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert tokenizer.encode_chat([{"role": "user", "content": "x"}], tools=tools)
