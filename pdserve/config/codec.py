"""A configuration dataclass as JSON and back, for handing it to another process without pickle."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, TypeVar

from pdserve.config.fields import field_types, info_of, parse
from pdserve.errors import ConfigError

T = TypeVar("T")


def to_json(config: Any) -> str:
    """The fields of a flat configuration dataclass as one JSON object, secrets included."""
    return json.dumps({field.name: getattr(config, field.name) for field in dataclasses.fields(config)})


def from_json(cls: type[T], text: str) -> T:
    """The inverse of `to_json`. Raises ConfigError for bad JSON, unknown or missing fields, wrong values."""
    try:
        raw = json.loads(text)
    except ValueError:
        raise ConfigError("the configuration is not valid JSON") from None
    if not isinstance(raw, dict):
        raise ConfigError("the configuration must be a JSON object")
    return from_mapping(cls, raw)


def from_mapping(cls: type[T], raw: dict[str, object]) -> T:
    """Builds a configuration from plain values. Raises ConfigError naming the field."""
    kinds = field_types(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(raw) - set(fields))
    if unknown:
        raise ConfigError(f"{unknown[0]}: no such setting")
    missing = [name for name, field in fields.items() if name not in raw and not _has_default(field)]
    if missing:
        raise ConfigError(f"{missing[0]}: is required")
    values = {name: parse(name, kinds[name], info_of(fields[name]), value) for name, value in raw.items()}
    return cls(**values)


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
