"""Incremental decoding: pieces add up to the full decode, and no piece is ever taken back."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.tokenizer import IncrementalDecoder, Tokenizer, load_bundle_from_dir, load_bundle_from_gguf
from tests.support.tokenizer_files import (
    naughty_strings,
    write_bytes_gguf,
    write_directory,
    write_pieces_gguf,
)

SPM_DECODER = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 3, "stop": 0},
    ],
}
DECODERS = {
    "metaspace": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
    "metaspace-never": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": False},
    "none": None,
    "strip-three": SPM_DECODER,
    "strip-each": {"type": "Strip", "content": " ", "start": 1, "stop": 2},
}


def _made(folder: Path, kind: str) -> Tokenizer:
    if kind == "gpt2":
        return Tokenizer(load_bundle_from_gguf(write_bytes_gguf(folder / "m.gguf")))
    if kind == "older":
        return Tokenizer(load_bundle_from_dir(write_directory(folder / "m", kind="pieces")))
    spaces = kind != "spm-no-prefix"
    bundle = load_bundle_from_gguf(write_pieces_gguf(folder / "m.gguf", space_prefix=spaces))
    if kind in DECODERS:
        content = {**json.loads(bundle.tokenizer_json), "decoder": DECODERS[kind]}
        bundle = dataclasses.replace(bundle, tokenizer_json=json.dumps(content).encode())
    return Tokenizer(bundle)


@pytest.fixture(scope="module", params=["gpt2", "older", "spm", "spm-no-prefix", *DECODERS])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return _made(tmp_path_factory.mktemp("decoder"), request.param)


def pieces(tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool = True) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
    return [*(decoder.push(i) for i in ids), decoder.finish()]


def check(tokenizer: Tokenizer, ids: Sequence[int]) -> None:
    for skip in (True, False):
        assert "".join(pieces(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_naughty_strings_add_up(tokenizer: Tokenizer) -> None:
    for text in naughty_strings():
        check(tokenizer, tokenizer.encode(text))


def test_whole_characters_only(tokenizer: Tokenizer) -> None:
    for text in naughty_strings():
        if "\ufffd" not in text:
            out = pieces(tokenizer, tokenizer.encode(text))
            expected = tokenizer.decode(tokenizer.encode(text))
            assert "".join(out).count("\ufffd") == expected.count("\ufffd")
            for n in range(len(out)):  # what is out is always a beginning of what will be
                assert expected.startswith("".join(out[:n]))


@given(data=st.data())
@settings(max_examples=120)
def test_any_ids_add_up(tokenizer: Tokenizer, data: st.DataObject) -> None:
    # The low ids hold the special tokens and, in SentencePiece vocabularies, the bytes.
    ids = st.one_of(st.integers(0, 300), st.integers(0, tokenizer.bundle.vocab_size + 5))
    check(tokenizer, data.draw(st.lists(ids, max_size=40)))


def test_random_bytes_add_up(tokenizer: Tokenizer) -> None:
    chance = random.Random(7)
    for _ in range(200):
        raw = bytearray("aé日🙂\x00".encode() * 2)
        raw[chance.randrange(len(raw))] = chance.randrange(256)
        check(tokenizer, [3 + byte for byte in raw])


def test_a_character_split_over_tokens_comes_out_whole_and_at_once(tmp_path: Path) -> None:
    gpt2 = _made(tmp_path, "gpt2")
    ids = gpt2.encode("🙂") if len(gpt2.encode("🙂")) > 1 else gpt2.encode("\U0001f9ff")
    assert len(ids) > 1
    out = pieces(gpt2, ids)
    assert out[:-2] == [""] * (len(ids) - 1)
    assert len(out[-2]) == 1


def test_an_unfinished_character_becomes_a_replacement_only_at_the_end(tmp_path: Path) -> None:
    gpt2 = _made(tmp_path, "gpt2")
    decoder = IncrementalDecoder(gpt2)
    first = gpt2.encode("\U0001f9ff")[0]
    assert decoder.push(first) == ""
    assert decoder.finish() == "\ufffd"


def test_special_tokens_are_left_out_unless_asked_for(tokenizer: Tokenizer) -> None:
    ids = [2, *tokenizer.encode("x"), 2]
    shown = tokenizer.token_text(2)
    assert shown is not None
    assert shown not in "".join(pieces(tokenizer, ids))
    assert "".join(pieces(tokenizer, ids, skip=False)).count(shown) == 2


def test_work_per_token_does_not_grow_with_the_stream(tmp_path: Path) -> None:
    """Counts calls instead of time: each token is looked up once, however long the stream is."""
    tokenizer = _made(tmp_path, "spm")
    seen: list[int] = []
    looked_up = tokenizer.token_text
    tokenizer.token_text = lambda i: seen.append(i) or looked_up(i)  # type: ignore[method-assign,func-returns-value]
    decoder = IncrementalDecoder(tokenizer)
    ids = [3 + (n % 256) for n in range(5_000)]  # one run of bytes: nothing can come out before its end
    for i in ids:
        decoder.push(i)
    assert len(decoder.finish()) > 0
    assert len(seen) == len(ids)


def test_bytes_of_tokens_add_up_to_the_text(tmp_path: Path) -> None:
    for kind in ("gpt2", "older", "spm"):
        (tmp_path / kind).mkdir()
        tokenizer = _made(tmp_path / kind, kind)
        text = "the cat 🐈 and the Straße, naïve"
        found = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text)))
        assert found.decode().endswith(text), kind  # what the model wants before it is spelled too


def test_bytes_of_a_part_of_a_character_are_exact(tmp_path: Path) -> None:
    for kind in ("gpt2", "spm"):
        (tmp_path / kind).mkdir()
        tokenizer = _made(tmp_path / kind, kind)
        parts = [tokenizer.token_bytes(i) for i in tokenizer.encode("🐈")]
        assert b"".join(parts).endswith("🐈".encode())
        assert parts[-1] in (b"\x88", b"\x90\x88"), kind
        assert tokenizer.token_bytes(10**6) == b""
