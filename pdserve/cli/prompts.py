"""A file of requests: one JSON object a line, checked before anything is sent."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.errors import InvalidRequest

_INPUTS = ("prompt", "messages", "token_ids")
_KEYS = {*_INPUTS, "id", "max_tokens"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLine:
    """One request of a file. Exactly one of prompt, messages and token_ids is set. id: any JSON value."""

    id: Any = None
    prompt: str | None = None
    messages: list[dict[str, str]] | None = None
    token_ids: list[int] | None = None
    max_tokens: int | None = None


def read_prompts(file: Path) -> list[PromptLine]:
    """All requests of a file; blank lines are skipped. Raises InvalidRequest naming the line."""
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise InvalidRequest.field("prompts", "the file can not be read as UTF-8 text.") from None
    return [_parse(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _parse(number: int, line: str) -> PromptLine:
    where = f"prompts line {number}"
    try:
        raw = json.loads(line)
    except ValueError:
        raise InvalidRequest.field(where, "not valid JSON.") from None
    if not isinstance(raw, dict):
        raise InvalidRequest.field(where, "must be a JSON object.")
    if unknown := sorted(set(raw) - _KEYS):
        raise InvalidRequest.field(where, f"unknown key {unknown[0]!r}.")
    if sum(name in raw for name in _INPUTS) != 1:
        raise InvalidRequest.field(where, "give exactly one of prompt, messages and token_ids.")
    for name, good in _CHECKS.items():
        if name in raw and not good(raw[name]):
            raise InvalidRequest.field(where, f"{name} has a wrong type.")
    return PromptLine(**raw)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"role", "content"}
        and all(isinstance(text, str) for text in value.values())
    )


_CHECKS = {
    "prompt": lambda value: isinstance(value, str),
    "messages": lambda value: isinstance(value, list) and all(map(_is_message, value)),
    "token_ids": lambda value: isinstance(value, list) and all(map(_is_int, value)),
    "max_tokens": _is_int,
}
