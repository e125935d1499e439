"""All that text needs to become token ids and back, as one value that travels from a worker to the routers.

Here: the bundle, its digest and its wire form. Not here: reading model files (`from_dir`, `from_gguf`) and
encoding (`encode`). A bundle that comes over the wire is checked field by field before anything uses it.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from pdserve.errors import ModelError

MAGIC = b"PDTB"
VERSION = 1
MAX_BUNDLE_BYTES = 64 << 20
"""Larger than any tokenizer in use; bounds what a router takes from a worker."""
MAX_TEMPLATE_BYTES = 256 << 10
MAX_VOCAB = 1 << 21
MAX_SPECIAL_NAMES = 64
_PREFIX = struct.Struct("<4sIII")  # magic, version, header bytes, tokenizer bytes


@dataclass(frozen=True, kw_only=True)
class TokenizerBundle:
    """A model's tokenizer, chat template and limits. Immutable; two bundles are one iff their digests are.

    tokenizer_json: UTF-8 of a `tokenizers` file. chat_template: Jinja source, or None. special_tokens: pairs
    of (template variable, text), such as ("eos_token", "</s>"). bos_token_id: None if the model has none.
    add_bos: plain prompts start with it. end_token_ids: ids that end a stream. vocab_size: rows of the
    embedding, so ids are below it. max_context: tokens.
    """

    tokenizer_json: bytes
    chat_template: str | None
    special_tokens: tuple[tuple[str, str], ...]
    bos_token_id: int | None
    add_bos: bool
    end_token_ids: tuple[int, ...]
    vocab_size: int
    max_context: int
    model_name: str

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the wire form, hex."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def special_token(self, name: str) -> str | None:
        """The text of one special token by its template variable, such as "eos_token"."""
        return dict(self.special_tokens).get(name)

    def to_bytes(self) -> bytes:
        """The wire form: a fixed prefix with lengths, a JSON header, the tokenizer's JSON."""
        header = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "tokenizer_json"}
        text = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
        return _PREFIX.pack(MAGIC, VERSION, len(text), len(self.tokenizer_json)) + text + self.tokenizer_json

    @classmethod
    def from_bytes(cls, data: bytes) -> TokenizerBundle:
        """Reads the wire form. Raises ModelError for anything `to_bytes` does not write."""
        header, tokenizer_json = _split(data)
        wanted = {f.name for f in fields(cls)} - {"tokenizer_json"}
        if set(header) != wanted:
            raise ModelError("The tokenizer bundle has unknown or missing fields: update both sides.")
        values = {name: _CHECKS[name](header[name], name) for name in wanted}
        bundle = cls(tokenizer_json=tokenizer_json, **values)
        bundle.validate()
        return bundle

    def validate(self) -> None:
        """Raises ModelError unless all fields fit together and are within limits."""
        _require(0 < self.vocab_size <= MAX_VOCAB, "vocab_size is out of range")
        _require(0 < self.max_context < 2**40, "max_context is out of range")
        _require(len(self.special_tokens) <= MAX_SPECIAL_NAMES, "too many special tokens are named")
        ids = self.end_token_ids if self.bos_token_id is None else (*self.end_token_ids, self.bos_token_id)
        _require(
            len(ids) <= 1024 and all(0 <= i < self.vocab_size for i in ids), "an id is outside the vocabulary"
        )
        _require(0 < len(self.model_name) <= 256, "model_name is empty or too long")
        template = self.chat_template or ""
        _require(
            len(template.encode("utf-8", "replace")) <= MAX_TEMPLATE_BYTES, "the chat template is too large"
        )
        _require(len(self.tokenizer_json) <= MAX_BUNDLE_BYTES, "the tokenizer is too large")


def _require(good: bool, problem: str) -> None:
    if not good:
        raise ModelError(f"The tokenizer bundle can not be used: {problem}.")


def _split(data: bytes) -> tuple[dict[str, Any], bytes]:
    _require(_PREFIX.size <= len(data) <= MAX_BUNDLE_BYTES + (1 << 20), "its length is wrong")
    magic, version, header_len, body_len = _PREFIX.unpack_from(data)
    _require(magic == MAGIC, "it is not a tokenizer bundle")
    _require(version == VERSION, "it has another version: update both sides")
    _require(len(data) == _PREFIX.size + header_len + body_len, "its lengths do not add up")
    start = _PREFIX.size + header_len
    try:
        header = json.loads(bytes(data[_PREFIX.size : start]).decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise ModelError("The tokenizer bundle can not be used: its header is not JSON.") from None
    _require(isinstance(header, dict), "its header is not an object")
    return header, bytes(data[start:])


def _no_constant(name: str) -> float:
    raise ValueError(name)


def _text(value: Any, name: str) -> str:
    _require(isinstance(value, str), f"{name} is not a text")
    _require(not any("\ud800" <= c <= "\udfff" for c in value), f"{name} is not valid Unicode")
    return str(value)


def _whole(value: Any, name: str) -> int:
    _require(type(value) is int, f"{name} is not a whole number")
    return int(value)


def _flag(value: Any, name: str) -> bool:
    _require(type(value) is bool, f"{name} is not true or false")
    return bool(value)


def _list(value: Any, name: str) -> list[Any]:
    _require(isinstance(value, list) and len(value) <= 4096, f"{name} is not a list")
    return list(value)


def _pair(value: Any, name: str) -> tuple[str, str]:
    _require(isinstance(value, list) and len(value) == 2, f"{name} is not a list of pairs")
    return _text(value[0], name), _text(value[1], name)


_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "chat_template": lambda v, n: None if v is None else _text(v, n),
    "special_tokens": lambda v, n: tuple(_pair(p, n) for p in _list(v, n)),
    "bos_token_id": lambda v, n: None if v is None else _whole(v, n),
    "add_bos": _flag,
    "end_token_ids": lambda v, n: tuple(_whole(i, n) for i in _list(v, n)),
    "vocab_size": _whole,
    "max_context": _whole,
    "model_name": _text,
}
