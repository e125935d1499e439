"""Command-line options made from declared settings, so that a setting is written down once."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from pdserve.config import Resolved, resolve
from pdserve.config.fields import FieldInfo, field_types, info_of, show
from pdserve.config.resolve import variable

T = TypeVar("T")
Command = Callable[..., None]

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", envvar="PDSERVE_CONFIG", help="TOML file with settings.", dir_okay=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def settings_of(cls: type[T], section: str = "") -> Callable[[Callable[..., None]], Command]:
    """Decorator: a function of (resolved: Resolved[cls], config: Path | None, …) into a typer command.

    Each setting becomes an option; `--config` is added. Further parameters of the function stay as they are.
    """

    def decorate(function: Callable[..., None]) -> Command:
        names = [field.name for field in dataclasses.fields(cls) if not info_of(field).hidden]  # type: ignore[arg-type]

        def command(config: Path | None, **values: Any) -> None:
            flags = {name: values.pop(name) for name in names}
            resolved: Resolved[T] = resolve(
                cls, section=section, file=config, environ=os.environ, flags=flags
            )
            function(resolved, config, **values)

        command.__name__ = function.__name__
        command.__doc__ = function.__doc__
        _set_signature(command, [*_options(cls, section), _config_parameter(), *_others(function)])
        return command

    return decorate


def _options(cls: type[Any], section: str) -> list[inspect.Parameter]:
    kinds = field_types(cls)
    return [
        _parameter(field.name, _annotation(field, kinds[field.name], section))
        for field in dataclasses.fields(cls)
        if not info_of(field).hidden
    ]


def _annotation(field: dataclasses.Field[Any], kind: Any, section: str) -> Any:
    info, flag = info_of(field), "--" + field.name.replace("_", "-")
    text = f"{info.help} [default: {show(field.default, info) or 'none'}; {variable(section, field.name)}]"
    if kind is bool:
        return Annotated[bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", help=text, show_default=False)]
    return Annotated[str | None, typer.Option(flag, help=text, show_default=False, metavar=_metavar(info))]


def _metavar(info: FieldInfo) -> str:
    if info.choices:
        return "|".join(info.choices)
    return {"bytes": "SIZE", "seconds": "SECONDS"}.get(info.unit, "N" if info.minimum is not None else "TEXT")


def _config_parameter() -> inspect.Parameter:
    return _parameter("config", ConfigFile)


def _others(function: Callable[..., None]) -> list[inspect.Parameter]:
    parameters = list(inspect.signature(function, eval_str=True).parameters.values())[2:]
    return [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _set_signature(command: Any, parameters: list[inspect.Parameter]) -> None:
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
