"""The tokenizer bundle: reading model files, the wire form, and what hostile bytes do to both."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import ModelError
from pdserve.tokenizer import Tokenizer, TokenizerBundle, load_bundle_from_dir, load_bundle_from_gguf
from tests.support.tokenizer_files import CHATML, write_bytes_gguf, write_directory, write_pieces_gguf


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bundles")


@pytest.fixture(scope="module")
def bundle(folder: Path) -> TokenizerBundle:
    return load_bundle_from_gguf(write_bytes_gguf(folder / "bytes.gguf"))


def test_wire_form_round_trips_and_the_digest_names_the_content(bundle: TokenizerBundle) -> None:
    again = TokenizerBundle.from_bytes(bundle.to_bytes())
    assert again == bundle
    assert again.digest == bundle.digest
    assert len(bundle.digest) == 64
    other = dataclasses.replace(bundle, chat_template="{{ 1 }}")
    assert other.digest != bundle.digest


def test_bundle_of_a_gguf_file_has_its_limits_and_tokens(bundle: TokenizerBundle) -> None:
    assert bundle.chat_template == CHATML
    assert dict(bundle.special_tokens)["eos_token"] == "<|im_end|>"
    assert bundle.special_token("bos_token") == "<|im_start|>"
    assert (bundle.bos_token_id, bundle.add_bos, bundle.end_token_ids) == (1, False, (2,))
    assert bundle.max_context == 512
    assert bundle.vocab_size == Tokenizer(bundle).encode_chat([{"role": "user", "content": ""}])[0] + 1204


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": True},
        {"vocab_size": 0},
        {"vocab_size": 1e9},
        {"max_context": -1},
        {"add_bos": 1},
        {"end_token_ids": [10**9]},
        {"end_token_ids": "12"},
        {"special_tokens": [["bos_token"]]},
        {"special_tokens": {"bos_token": "<s>"}},
        {"bos_token_id": "1"},
        {"chat_template": "x" * 300_000},
        {"chat_template": "\ud800"},
        {"model_name": ""},
        {"extra": 1},
    ],
)
def test_wrong_fields_are_refused(bundle: TokenizerBundle, change: dict[str, object]) -> None:
    raw = bundle.to_bytes()
    magic, version, header_len, _ = struct.unpack_from("<4sIII", raw)
    header = json.loads(raw[16 : 16 + header_len])
    text = json.dumps({**header, **change}).encode()
    body = raw[16 + header_len :]
    with pytest.raises(ModelError):
        TokenizerBundle.from_bytes(struct.pack("<4sIII", magic, version, len(text), len(body)) + text + body)


@given(st.binary(max_size=200))
def test_garbage_is_a_model_error(data: bytes) -> None:
    with pytest.raises(ModelError):
        TokenizerBundle.from_bytes(data)


@given(st.data())
@settings(max_examples=60)
def test_damaged_bundles_never_do_worse_than_a_model_error(
    bundle: TokenizerBundle, data: st.DataObject
) -> None:
    raw = bytearray(bundle.to_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        # Half of the damage goes to the prefix and header, which are a small part of the bytes.
        limit = data.draw(st.sampled_from([600, len(raw) - 1]))
        raw[data.draw(st.integers(0, limit))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([0, 0, 1, 1000]))
    with contextlib.suppress(ModelError):
        Tokenizer(TokenizerBundle.from_bytes(bytes(raw[: len(raw) - cut])))


def test_a_tokenizer_that_is_not_one_is_refused(bundle: TokenizerBundle) -> None:
    for content in (b"", b"{}", b"[]", b"\xff", b'{"model": {"type": "BPE"}}'):
        with pytest.raises(ModelError):
            Tokenizer(dataclasses.replace(bundle, tokenizer_json=content))


@pytest.mark.parametrize(
    "decoder", [{"type": "CTC", "pad_token": "", "word_delimiter_token": "|", "cleanup": True}]
)
def test_a_decoder_that_can_not_be_followed_is_refused(bundle: TokenizerBundle, decoder: object) -> None:
    content = {**json.loads(bundle.tokenizer_json), "decoder": decoder}
    with pytest.raises(ModelError, match="decoder"):
        Tokenizer(dataclasses.replace(bundle, tokenizer_json=json.dumps(content).encode()))


def test_directory_bundle_follows_its_files(folder: Path) -> None:
    path = write_directory(folder / "model")
    bundle = load_bundle_from_dir(path)
    assert bundle.model_name == "model"
    assert bundle.add_bos
    assert bundle.end_token_ids == (json.loads((path / "config.json").read_text())["eos_token_id"],)
    (path / "generation_config.json").write_text('{"eos_token_id": [7, 3]}')
    (path / "chat_template.jinja").write_text("{{ 'from the file' }}")
    again = load_bundle_from_dir(path)
    assert again.end_token_ids == (3, 7)
    assert again.chat_template == "{{ 'from the file' }}"


def test_directory_with_a_list_of_templates_takes_the_default(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    bundle = load_bundle_from_dir(write_directory(folder / "named", chat_template=named))
    assert bundle.chat_template == "d"


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [None, b"", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_damaged_directories_are_refused_with_a_sentence(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    path = write_directory(tmp_path / "model")
    if content is None:
        (path / name).unlink()
        if name == "tokenizer_config.json":  # the one file a model can do without
            assert load_bundle_from_dir(path).chat_template is None
            return
    else:
        (path / name).write_bytes(content)
    with pytest.raises(ModelError) as caught:
        load_bundle_from_dir(path)
    assert str(tmp_path) not in caught.value.message


def test_truncated_gguf_files_are_refused(tmp_path: Path) -> None:
    whole = write_pieces_gguf(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in (0, 3, 4, 20, 24, 40, 100, 5_000, 20_000):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError) as caught:
            load_bundle_from_gguf(path)
        assert str(tmp_path) not in caught.value.message


def test_huge_sizes_in_a_gguf_file_are_refused_without_allocating(tmp_path: Path) -> None:
    path = tmp_path / "huge.gguf"
    for num_keys, rest in (
        (2**63, b""),
        (1, struct.pack("<Q", 2**62)),
        (1, struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 4, 2**61)),
        (1, struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 9, 2**20)),
        (1, struct.pack("<Q", 1) + b"k" + struct.pack("<I", 77)),
    ):
        path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, num_keys) + rest)
        with pytest.raises(ModelError):
            load_bundle_from_gguf(path)


def test_flipped_bits_in_a_gguf_file_never_do_worse_than_a_model_error(tmp_path: Path) -> None:
    whole = write_bytes_gguf(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "flipped.gguf"
    refused = 0
    for n in range(120):
        damaged = bytearray(whole)
        damaged[4 + (n * 97) % min(len(whole) - 4, 60_000)] ^= 1 << (n % 8)
        path.write_bytes(damaged)
        try:
            Tokenizer(load_bundle_from_gguf(path))
        except ModelError:
            refused += 1
    assert refused > 0
