"""One precedence for every component: file < environment < flag, with the origin of each value kept."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pdserve.config.fields import field_types, info_of, parse
from pdserve.errors import ConfigError

T = TypeVar("T")

ENV_PREFIX = "PDSERVE_"
SECTIONS = ("router",)
"""Components with a table of their own in the file; the keys outside any table belong to `pdserve up`."""
OTHER_VARIABLES = (
    "PDSERVE_CONFIG", "PDSERVE_FLEET_SECRET", "PDSERVE_API_KEY", "PDSERVE_API_KEY_FILE",
    "PDSERVE_KERNEL_ISA", "PDSERVE_TEST_", "PDSERVE_BENCH_",
)  # fmt: skip
"""Variables that are no settings. A name that ends in an underscore stands for all that begin with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved(Generic[T]):
    """A configuration and where each value came from: "default", "file", a variable's name, or a flag."""

    config: T
    origins: Mapping[str, str]


def resolve(
    cls: type[T],
    *,
    section: str = "",
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Resolved[T]:
    """Builds a component's configuration.

    section: its table in the file, and its part of the variables' names. environ: the whole environment.
    flags: by field name; None means the flag was not given.
    Raises ConfigError naming the field or variable for unknown keys and wrong values.
    """
    layers = [
        *_file_layer(file, section),
        *_environ_layer(cls, section, environ or {}),
        *((name, _flag(name), value) for name, value in (flags or {}).items() if value is not None),
    ]
    kinds = field_types(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    origins = dict.fromkeys(fields, "default")
    for name, origin, raw in layers:
        if name not in fields or info_of(fields[name]).hidden:
            raise ConfigError(f"{name}: no such setting (from {origin})")
        values[name] = parse(name, kinds[name], info_of(fields[name]), raw)
        origins[name] = origin
    missing = [f.name for f in fields.values() if f.default is dataclasses.MISSING and f.name not in values]
    if missing:
        raise ConfigError(f"{missing[0]}: is required; give {_flag(missing[0])}")
    return Resolved(config=cls(**values), origins=origins)


def variable(section: str, name: str) -> str:
    """The environment variable of a setting."""
    return ENV_PREFIX + (f"{section}_{name}" if section else name).upper()


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _file_layer(file: Path | None, section: str) -> list[tuple[str, str, object]]:
    if file is None:
        return []
    content = _read(file)
    for key, value in content.items():
        if isinstance(value, dict) and key not in SECTIONS:
            raise ConfigError(f"{key}: no such section in the configuration file")
    table = content.get(section, {}) if section else content
    return [(key, "file", value) for key, value in table.items() if not isinstance(value, dict)]


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except OSError:
        raise ConfigError("config: the configuration file can not be read") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as err:
        raise ConfigError(f"config: the configuration file is not valid TOML: {err}") from None


def _environ_layer(cls: type[Any], section: str, environ: Mapping[str, str]) -> list[tuple[str, str, object]]:
    known = {variable(section, field.name): field.name for field in dataclasses.fields(cls)}
    layer: list[tuple[str, str, object]] = []
    for name, raw in sorted(environ.items()):
        if name in known:
            layer.append((known[name], name, raw))
        elif name.startswith(ENV_PREFIX) and not section and not _foreign(name):
            raise ConfigError(f"{name}: no such setting")
    return layer


def _foreign(name: str) -> bool:
    others = (*OTHER_VARIABLES, *(f"{ENV_PREFIX}{section.upper()}_" for section in SECTIONS))
    return any(name == other or (other.endswith("_") and name.startswith(other)) for other in others)
