"""Every token's bytes are those that the decoder makes of it, whatever the tokenizer's origin."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.errors import UnsupportedFeature
from pdserve.structured.vocabulary import answer_tokens, load_vocabulary
from pdserve.tokenizer.bundle import TokenizerBundle
from pdserve.tokenizer.encode import Tokenizer
from pdserve.tokenizer.from_dir import load_bundle_from_dir
from pdserve.tokenizer.from_gguf import load_bundle_from_gguf
from pdserve.tokenizer.incremental import IncrementalDecoder
from tests.support.byte_model import byte_bundle
from tests.support.grammar_kit import default_bundle
from tests.support.tokenizer_files import write_bytes_gguf, write_directory, write_pieces_gguf


def _bundle(origin: str, folder: Path) -> TokenizerBundle:
    match origin:
        case "gguf bytes":
            return load_bundle_from_gguf(write_bytes_gguf(folder / "m.gguf"))
        case "gguf pieces":
            return load_bundle_from_gguf(write_pieces_gguf(folder / "m.gguf"))
        case "json bytes":
            return load_bundle_from_dir(write_directory(folder / "m"))
        case "json pieces":
            return load_bundle_from_dir(write_directory(folder / "m", kind="pieces"))
        case _:
            return default_bundle()


@pytest.mark.parametrize("origin", ["gguf bytes", "gguf pieces", "json bytes", "json pieces", "default"])
def test_every_tokens_bytes_are_what_the_decoder_makes_of_it(origin: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(_bundle(origin, tmp_path))
    tokens = answer_tokens(tokenizer)
    assert len(tokens) == tokenizer.bundle.vocab_size
    letter = max(i for i, token in enumerate(tokens) if token == b"a")  # not the byte 0x61
    for token_id, spelled in enumerate(tokens):
        decoder = IncrementalDecoder(tokenizer)
        pieces = [decoder.push(each) for each in (letter, token_id, letter)] + [decoder.finish()]
        ends = token_id in tokenizer.bundle.end_token_ids
        if not ends:
            assert "".join(pieces) == b"".join((b"a", spelled, b"a")).decode("utf-8", "replace"), token_id
    assert load_vocabulary(tokenizer).vocab_size == len(tokens)


def test_special_and_end_tokens_are_no_part_of_an_answer() -> None:
    tokens = answer_tokens(Tokenizer(byte_bundle()))
    assert tokens[256:] == [b"", b""]
    assert tokens[:256] == [bytes([byte]) for byte in range(256)]


def test_a_model_without_end_tokens_is_told_by_name() -> None:
    bundle = replace(byte_bundle(), end_token_ids=())
    with pytest.raises(UnsupportedFeature, match=r"sampling\.grammar: .*no end token"):
        load_vocabulary(Tokenizer(bundle))
