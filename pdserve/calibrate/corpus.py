"""Text for calibration and for measuring quality: from files to batches of token ids.

What lives here: reading texts, cutting them into sequences of bounded length and number. What does not:
models.

A file is JSON lines (each the value of "text", or "turns", or "question" and "answer", joined by newlines) or
plain text, whose paragraphs are the texts.

Legend: B sequences, T tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pdserve.errors import ConfigError
from pdserve.tokenizer.encode import Tokenizer

MAX_BYTES = 64 << 20
_FIELDS = ("text", "question", "answer", "turns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """tokens_BT: int64, filled up at the end. real_BT: which of them are of the text."""

    tokens_BT: torch.Tensor
    real_BT: torch.Tensor


def read_texts(path: Path, name: str = "calibration") -> list[str]:
    """The file's texts in order. name: of the option that named it. Raises ConfigError for one with none."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{name}: the file is larger than {MAX_BYTES >> 20} MiB")
        raw = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"{name}: the file can not be read as text in UTF-8") from None
    lines = raw.splitlines()
    if path.suffix == ".jsonl":
        texts = [text_of(line, name) for line in lines if line.strip()]
    else:
        texts = [part.strip() for part in raw.split("\n\n")]
    texts = [text for text in texts if text]
    if not texts:
        raise ConfigError(f"{name}: the file has no text")
    return texts


def text_of(line: str, name: str = "calibration") -> str:
    """The text of a JSON line, empty if it has none. Raises ConfigError for another thing."""
    try:
        value = json.loads(line)
    except ValueError:
        raise ConfigError(f"{name}: a line of the file is not JSON") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: a line of the file is not a JSON object")
    return "\n".join(piece for field in _FIELDS for piece in _pieces(value.get(field)))


def _pieces(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, str)]


def sequences(tokenizer: Tokenizer, texts: Sequence[str], *, max_tokens: int, length: int) -> list[list[int]]:
    """Token ids of the texts in order, each cut to `length`, until there are `max_tokens` in all."""
    found: list[list[int]] = []
    left = max_tokens
    for text in texts:
        ids = tokenizer.encode(text)[: min(length, left)]
        if len(ids) > 1:
            found.append(ids)
            left -= len(ids)
        if left < 2:
            break
    return found


def batches(rows: Sequence[Sequence[int]], tokens_each: int = 1024) -> Iterator[Batch]:
    """The sequences in batches of about so many tokens, those of like length together."""
    ordered = sorted(rows, key=len)
    while ordered:
        size = max(1, tokens_each // len(ordered[-1]))
        taken, ordered = ordered[-size:], ordered[:-size]
        width = len(taken[-1])
        tokens_BT = torch.zeros(len(taken), width, dtype=torch.int64)
        real_BT = torch.zeros(len(taken), width, dtype=torch.bool)
        for at, row in enumerate(taken):
            tokens_BT[at, : len(row)] = torch.tensor(row)
            real_BT[at, : len(row)] = True
        yield Batch(tokens_BT=tokens_BT, real_BT=real_BT)
