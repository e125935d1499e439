"""Typed reads from a model file's untrusted metadata (config.json, GGUF keys).

What lives here: the one reader that turns a wrong or missing value into a ModelError naming the field.
What does not: which fields a model has (`hf_config`, `gguf_config`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from pdserve.errors import ModelError

T = TypeVar("T")


class Fields:
    """A mapping whose values are checked as they are read. `what` names the mapping in messages."""

    def __init__(self, values: Mapping[str, Any], what: str, prefix: str = "") -> None:
        self._values = values
        self._what = what
        self._prefix = prefix

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._values.get(self._prefix + name) is not None

    def present(self, name: str) -> bool:
        """Whether the field is there, null or not."""
        return self._prefix + name in self._values

    def raw(self, name: str) -> Any:
        """The value as it is, or None."""
        return self._values.get(self._prefix + name)

    def refuse(self, name: str, why: str) -> NoReturn:
        """Raises ModelError for the field."""
        raise ModelError(f"{self._what} is not usable: {self._prefix}{name} {why}.")

    def _read(self, name: str, default: T | None) -> Any | T:
        value = self.raw(name)
        if value is None and default is None:
            self.refuse(name, "is missing")
        return default if value is None else value

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """An integer in [low, high]. Raises ModelError for anything else."""
        value = self._read(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.refuse(name, f"must be an integer from {low} to {high}")
        return int(value)

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number in [low, high]. Raises ModelError for anything else."""
        value = self._read(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(name, "must be a number")
        if not math.isfinite(value) or not low <= value <= high:
            self.refuse(name, f"must be a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false. Raises ModelError for anything else."""
        value = self._read(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "must be true or false")
        return bool(value)

    def text(self, name: str, default: str | None = None) -> str:
        """A string of at most 256 characters. Raises ModelError for anything else."""
        value = self._read(name, default)
        if not isinstance(value, str) or len(value) > 256:
            self.refuse(name, "must be a short text")
        return str(value)

    def ids(self, name: str) -> tuple[int, ...]:
        """A token id, a list of token ids, or nothing. Raises ModelError for anything else."""
        value = self.raw(name)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if len(listed) > 1024 or any(isinstance(i, bool) or not isinstance(i, int) for i in listed):
            self.refuse(name, "must be a token id or a list of token ids")
        return tuple(listed)

    def nested(self) -> bool:
        """Whether any value is itself a mapping."""
        return any(isinstance(value, dict) for value in self._values.values())

    def mapping(self, name: str) -> Fields:
        """A nested mapping (empty if missing). Raises ModelError for anything else."""
        value = self.raw(name)
        if value is not None and not isinstance(value, dict):
            self.refuse(name, "must be an object")
        return Fields(value or {}, f"{self._what} ({self._prefix}{name})")
