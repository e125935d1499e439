"""Tokenization against transformers: prompts, chats and decoded text are the same, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.tokenizer import Tokenizer, load_bundle_from_dir, load_bundle_from_gguf
from tests.support.tokenizer_files import (
    INST,
    corpus,
    naughty_strings,
    real_prompts,
    smollm2_gguf,
    write_bytes_gguf,
    write_directory,
    write_pieces_gguf,
)

transformers = pytest.importorskip("transformers")

CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hello there"}],
    [{"role": "user", "content": "  two spaces, then\n\n1. a list\n   12. indented "}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "if a < b | c > d: x_y[1] ▁ ｜"},
    ],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nbecause"},
        {"role": "user", "content": "日本語 🙂 <b>&amp;</b> \"'\\"},
    ],
    [
        {"role": "user", "content": "_"},
        {"role": "assistant", "content": "user"},
        {"role": "user", "content": "<"},
    ],
)


def _bytes(folder: Path, **settings: Any) -> Path:
    return write_bytes_gguf(folder / "m.gguf", **settings)


MODELS = {
    "smollm2": lambda _: smollm2_gguf(),
    "gguf-llama3": lambda d: _bytes(d),
    "gguf-qwen2-bos": lambda d: _bytes(d, pre="qwen2", add_bos=True),
    "gguf-gpt2": lambda d: _bytes(d, pre="gpt-2"),
    "gguf-tekken": lambda d: _bytes(d, pre="tekken"),
    "gguf-pieces": lambda d: write_pieces_gguf(d / "m.gguf"),
    "gguf-pieces-no-bos": lambda d: write_pieces_gguf(d / "m.gguf", add_bos=False),
    "dir-bytes": lambda d: write_directory(d / "m"),
    "dir-bytes-flags": lambda d: write_directory(d / "m", add_bos_token=False, add_eos_token=True),
    "dir-pieces": lambda d: write_directory(d / "m", kind="pieces", template=INST),
}


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    path = MODELS[request.param](tmp_path_factory.mktemp("oracle"))
    if path.is_dir():
        return Tokenizer(load_bundle_from_dir(path)), transformers.AutoTokenizer.from_pretrained(str(path))
    oracle = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    return Tokenizer(load_bundle_from_gguf(path)), oracle


def texts() -> list[str]:
    return [*naughty_strings(), *corpus()[:6], *real_prompts()[::8], "", " ", "\n\n1.", "  a\t b   12  "]


def test_prompts_give_the_same_ids(pair: tuple[Tokenizer, Any]) -> None:
    ours, oracle = pair
    for text in texts():
        assert ours.encode(text) == oracle.encode(text), text


def test_ids_give_the_same_text(pair: tuple[Tokenizer, Any]) -> None:
    ours, oracle = pair
    for text in texts():
        ids = oracle.encode(text)
        for cut in (ids, ids[1:], ids[:-1], ids[::-1]):
            assert ours.decode(cut) == oracle.decode(cut, skip_special_tokens=True)
            assert ours.decode(cut, skip_special_tokens=False) == oracle.decode(cut)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
def test_honest_chats_give_the_same_ids(
    pair: tuple[Tokenizer, Any], chat: list[dict[str, str]], prompt: bool
) -> None:
    ours, oracle = pair
    expected = oracle.apply_chat_template(
        chat, add_generation_prompt=prompt, tokenize=True, return_dict=False
    )
    assert ours.encode_chat(chat, add_generation_prompt=prompt) == expected


def test_naughty_chats_give_the_same_ids(pair: tuple[Tokenizer, Any]) -> None:
    ours, oracle = pair
    for text in naughty_strings():
        chat = [{"role": "user", "content": text}]
        assert ours.encode_chat(chat) == oracle.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False
        )
