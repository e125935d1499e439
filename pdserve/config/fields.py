"""How a configuration field is declared: default, help, unit, limits, and how text becomes its value.

A component's configuration is a frozen dataclass whose fields are made with `setting`. What does not live
here: where values come from (`resolve`) and any component's own fields.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pdserve.errors import ConfigError

_KEY = "pdserve"
_SIZE_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "k": 2**10, "m": 2**20, "g": 2**30}
_SIZE_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9}
SIZE_PATTERN = r"^ *([0-9]+[.]?[0-9]*|[.][0-9]+) *([kKmMgG]([iI]?[bB])?|[bB])? *$"
"""A size as people write it. Also for JSON schemas, whose readers know no flags."""
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldInfo:
    """What is known about a field besides its type.

    help: one sentence. unit: of the value, empty for a name or a switch. choices: the only values allowed.
    minimum, maximum: bounds, both included. secret: never printed. hidden: set by code, never by an operator.
    """

    help: str
    unit: str = ""
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    secret: bool = False
    hidden: bool = False


def setting(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    unit: str = "",
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    secret: bool = False,
    hidden: bool = False,
) -> Any:
    """Declares a dataclass field with its documentation; see FieldInfo for the arguments."""
    info = FieldInfo(
        help=help,
        unit=unit,
        choices=choices,
        minimum=minimum,
        maximum=maximum,
        secret=secret,
        hidden=hidden,
    )
    return dataclasses.field(default=default, repr=not secret, metadata={_KEY: info})


def info_of(field: dataclasses.Field[Any]) -> FieldInfo:
    """The declaration of a field; an empty one for a field made without `setting`."""
    info: FieldInfo = field.metadata.get(_KEY) or FieldInfo(help="")
    return info


def field_types(cls: type[Any]) -> Mapping[str, Any]:
    """Name to resolved type of each field of a dataclass."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def parse(name: str, kind: Any, info: FieldInfo, raw: object) -> Any:
    """Turns what a file, the environment or a flag holds into a value of type `kind`.

    Raises ConfigError naming the field.
    """
    try:
        value = _convert(kind, info, raw)
    except ValueError as err:
        raise ConfigError(f"{name}: {err}") from None
    check(name, info, value)
    return value


def check(name: str, info: FieldInfo, value: object) -> None:
    """Raises ConfigError naming the field if the value is outside its choices or bounds."""
    items = value if isinstance(value, tuple) else () if value is None else (value,)
    if info.choices and any(str(item) not in info.choices for item in items):
        raise ConfigError(f"{name}: must be one of {', '.join(info.choices)}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if value != value or (info.minimum is not None and value < info.minimum):
        raise ConfigError(f"{name}: must be at least {_number(info.minimum)}")
    if info.maximum is not None and value > info.maximum:
        raise ConfigError(f"{name}: must be at most {_number(info.maximum)}")


def parse_size(text: str) -> int:
    """Bytes from a text such as "1.5GiB", "512M" or "4096". Raises ValueError."""
    found = re.fullmatch(SIZE_PATTERN, text.strip())
    try:
        if found:
            return int(float(found[1]) * _SIZE_UNITS[(found[2] or "").lower()])
    except OverflowError:
        pass
    raise ValueError("must be a size such as 512MiB or 1.5GiB")


def show(value: object, info: FieldInfo) -> str:
    """A value as a person reads it."""
    if info.secret and value:
        return "(set)"
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value)
    if info.unit == "bytes" and isinstance(value, int):
        return _show_size(value)
    return str(value)


def _show_size(value: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= factor and value % factor == 0:
            return f"{value // factor}{unit}"
    return str(value)


def _number(value: float | None) -> str:
    return f"{value:g}" if value is not None else "a number"


def _convert(kind: Any, info: FieldInfo, raw: object) -> Any:
    if isinstance(kind, types.UnionType):
        if raw is None or (isinstance(raw, str) and raw.strip().lower() in {"auto", ""}):
            return None
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    if typing.get_origin(kind) is tuple:
        return _list(typing.get_args(kind)[0], info, raw)
    if kind is int and info.unit == "bytes" and isinstance(raw, str):
        return parse_size(raw)
    return _scalar(kind)(raw)


def _list(kind: Any, info: FieldInfo, raw: object) -> tuple[Any, ...]:
    items = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(items, list | tuple):
        raise ValueError("must be a list")
    stripped = [item.strip() if isinstance(item, str) else item for item in items]
    return tuple(_convert(kind, info, item) for item in stripped if item != "")


def _scalar(kind: Any) -> Callable[[object], Any]:
    if kind is bool:
        return _bool
    if kind is int:
        return _int
    if kind is float:
        return _float
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return lambda raw: _enum(kind, raw)
    return _str


def _bool(raw: object) -> bool:
    text = str(raw).strip().lower()
    if text not in _TRUE | _FALSE:
        raise ValueError("must be true or false")
    return text in _TRUE


def _int(raw: object) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int | str):
        raise ValueError("must be a whole number")
    try:
        return int(raw)
    except ValueError:
        raise ValueError("must be a whole number") from None


def _float(raw: object) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise ValueError("must be a number")
    try:
        return float(raw)
    except ValueError:
        raise ValueError("must be a number") from None


def _enum(kind: type[StrEnum], raw: object) -> StrEnum:
    try:
        return kind(str(raw))
    except ValueError:
        raise ValueError(f"must be one of {', '.join(kind)}") from None


def _str(raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError("must be text")
    return raw
