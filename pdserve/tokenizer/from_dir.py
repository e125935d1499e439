"""A tokenizer bundle from a Hugging Face directory.

Here: which file says what, and the few settings that change the tokenizer itself. Not here: anything that
runs code from the directory; only JSON and the template's text are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from pdserve.errors import ModelError
from pdserve.tokenizer.bundle import MAX_BUNDLE_BYTES, MAX_TEMPLATE_BYTES, TokenizerBundle
from pdserve.tokenizer.native import load_native

_MAX_JSON_BYTES = 16 << 20
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def load_bundle_from_dir(path: str | Path) -> TokenizerBundle:
    """Reads the tokenizer, chat template and limits. Raises ModelError if a file is missing or damaged.

    Files: tokenizer.json, tokenizer_config.json, chat_template.jinja, config.json, generation_config.json.
    What comes before a prompt (BOS) is tokenizer.json's to say; add_bos_token is for folders without it.
    """
    folder = Path(path)
    raw = _read(folder / "tokenizer.json", MAX_BUNDLE_BYTES)
    if raw is None:
        raise ModelError("The model has no tokenizer.json; convert its tokenizer with transformers first.")
    settings, config = _json(folder / "tokenizer_config.json"), _json(folder / "config.json")
    tokenizer = load_native(raw)
    texts = _special_texts(settings)
    _add_missing_tokens(tokenizer, settings, texts)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    bos = texts.get("bos_token")
    bos_id = tokenizer.token_to_id(bos) if bos else None
    bundle = TokenizerBundle(
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=_template(folder, settings),
        special_tokens=tuple(texts.items()),
        bos_token_id=bos_id,
        add_bos=bos_id is not None and tokenizer.encode("").ids[:1] == [bos_id],
        end_token_ids=_end_ids(folder, config, tokenizer, texts.get("eos_token")),
        vocab_size=_count(config, "vocab_size"),
        max_context=_count(config, "max_position_embeddings"),
        model_name=(folder.resolve().name or "model")[:256],
    )
    bundle.validate()
    return bundle


def _read(path: Path, limit: int) -> bytes | None:
    try:
        if path.stat().st_size > limit:
            raise ModelError(f"The model's {path.name} is too large.")
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError:
        raise ModelError(f"The model's {path.name} can not be read.") from None


def _json(path: Path) -> dict[str, Any]:
    raw = _read(path, _MAX_JSON_BYTES)
    if raw is None:
        return {}
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        raise ModelError(f"The model's {path.name} is not JSON.") from None
    if not isinstance(value, dict):
        raise ModelError(f"The model's {path.name} is not a JSON object.")
    return value


def _special_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _NAMES:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text:
            found[name] = text
    return found


def _add_missing_tokens(tokenizer: Tokenizer, settings: Mapping[str, Any], texts: Mapping[str, str]) -> None:
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    entries = settings.get("added_tokens_decoder") or {}
    if not isinstance(entries, dict) or len(entries) > 1 << 17:
        raise ModelError("The model's tokenizer_config.json has a bad list of added tokens.")
    for key in sorted((k for k in entries if k.isdecimal()), key=int):
        entry = entries[key]
        content = entry.get("content") if isinstance(entry, dict) else None
        if isinstance(content, str) and content and content not in known:
            flags = {name: bool(entry[name]) for name in _FLAGS if name in entry}
            tokenizer.add_tokens([AddedToken(content, **flags)])
            known.add(content)
    # A named special token is never plain text, even where the file forgot to list it.
    named = [AddedToken(text, special=True, normalized=False) for text in texts.values() if text not in known]
    tokenizer.add_special_tokens([t for t in named if tokenizer.token_to_id(t.content) is not None])


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    raw = _read(folder / "chat_template.jinja", MAX_TEMPLATE_BYTES)
    if raw is not None:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise ModelError("The model's chat_template.jinja is not UTF-8.") from None
    value = settings.get("chat_template")
    if isinstance(value, list):
        named = {e.get("name"): e.get("template") for e in value if isinstance(e, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise ModelError("The model's chat template is not a text.")
    return value or None


def _end_ids(
    folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer, eos: str | None
) -> tuple[int, ...]:
    """generation_config.json decides; then config.json; then the tokenizer's end token."""
    for source in (_json(folder / "generation_config.json"), config):
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if value is not None and all(type(i) is int for i in ids):
            return tuple(sorted(set(ids)))
    eos_id = tokenizer.token_to_id(eos) if eos else None
    return () if eos_id is None else (eos_id,)


def _count(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise ModelError(f"The model's config.json lacks {key}.")
    return value
