"""A tokenizer bundle from one GGUF file.

Here: which metadata means what. Not here: reading the file (`gguf_metadata`), the tokenizer (`gguf_build`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import processors

from pdserve.errors import ModelError
from pdserve.tokenizer.bundle import TokenizerBundle
from pdserve.tokenizer.gguf_build import build_tokenizer
from pdserve.tokenizer.gguf_metadata import read_gguf_metadata

_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def load_bundle_from_gguf(path: str | Path) -> TokenizerBundle:
    """Reads a GGUF file's tokenizer, template and limits. Raises ModelError."""
    return bundle_from_metadata(read_gguf_metadata(path), fallback_name=Path(path).stem)


def bundle_from_metadata(meta: Mapping[str, Any], *, fallback_name: str) -> TokenizerBundle:
    """The bundle that a GGUF file's metadata describes. Raises ModelError."""
    tokens = meta.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise ModelError("The GGUF file has no tokenizer: it lacks a list of tokens.")
    ids = {name: _token_id(meta, f"{key}_token_id", len(tokens)) for name, key in _NAMES.items()}
    texts = {name: tokens[i] for name, i in ids.items() if i is not None}
    ends = [_token_id(meta, key, len(tokens)) for key in _END_KEYS]
    add_bos = _adds_bos(meta) and ids["bos_token"] is not None
    bundle = TokenizerBundle(
        tokenizer_json=_tokenizer_json(tokens, meta, add_bos),
        chat_template=_template(meta),
        special_tokens=tuple(texts.items()),
        bos_token_id=ids["bos_token"],
        add_bos=add_bos,
        end_token_ids=tuple(sorted({i for i in ends if i is not None})),
        vocab_size=_count(meta, "vocab_size", len(tokens)),
        max_context=_count(meta, "context_length", None),
        model_name=str(meta.get("general.name") or fallback_name)[:256],
    )
    bundle.validate()
    return bundle


def _tokenizer_json(tokens: list[str], meta: Mapping[str, Any], add_bos: bool) -> bytes:
    try:
        tokenizer = build_tokenizer(tokens, meta)
        ends = [("bos", add_bos), ("eos", meta.get("tokenizer.ggml.add_eos_token") is True)]
        found = {n: _token_id(meta, f"{n}_token_id", len(tokens)) for n, wanted in ends if wanted}
        special = [(tokens[i], i) for i in found.values() if i is not None]
        before = [tokens[i] for n, i in found.items() if n == "bos" and i is not None]
        after = [tokens[i] for n, i in found.items() if n == "eos" and i is not None]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], pair=None, special_tokens=special
        )
        return str(tokenizer.to_str()).encode()
    except ModelError:
        raise
    except (TypeError, ValueError, OverflowError):
        raise ModelError("The GGUF file's tokenizer is damaged: its parts do not fit together.") from None


def _adds_bos(meta: Mapping[str, Any]) -> bool:
    # Files from before the flag existed: SentencePiece vocabularies start with BOS, byte-level ones do not.
    flag = meta.get("tokenizer.ggml.add_bos_token")
    return flag if isinstance(flag, bool) else meta.get("tokenizer.ggml.model") == "llama"


def _token_id(meta: Mapping[str, Any], key: str, num_tokens: int) -> int | None:
    value = meta.get(f"tokenizer.ggml.{key}")
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < num_tokens:
        raise ModelError("The GGUF file's tokenizer is damaged: a special token is outside the vocabulary.")
    return value


def _count(meta: Mapping[str, Any], key: str, default: int | None) -> int:
    value = meta.get(f"{meta.get('general.architecture')}.{key}", default)
    if type(value) is not int or value < 1:
        raise ModelError("The GGUF file lacks its architecture's context length or vocabulary size.")
    return value


def _template(meta: Mapping[str, Any]) -> str | None:
    template = meta.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelError("The GGUF file's chat template is not a text.")
    return template or None
