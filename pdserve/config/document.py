"""The reference page of all settings, written from their declarations."""

from __future__ import annotations

import dataclasses
from typing import Any

from pdserve.config.fields import FieldInfo, field_types, info_of, show
from pdserve.config.resolve import variable

_HEAD = """# Configuration

Written by `scripts/gen_config_docs.py` from the code; do not edit.

Each value comes from the first of these that has it: the flag, the environment variable, the file given
with `--config FILE` (or `PDSERVE_CONFIG`), the default. The file is TOML. Unknown keys and unknown
`PDSERVE_` variables are refused. `pdserve config show` prints the result and where each value came from.
"""


def page(components: list[tuple[str, str, type[Any]]]) -> str:
    """Markdown for (title, section, configuration class) of each component."""
    return _HEAD + "".join(_component(*component) for component in components)


def _component(title: str, section: str, cls: type[Any]) -> str:
    place = f"in the table `[{section}]`" if section else "at the top, outside any table"
    kinds = field_types(cls)
    rows = [
        _row(field, kinds[field.name], section)
        for field in dataclasses.fields(cls)
        if not info_of(field).hidden
    ]
    head = "| key | flag | variable | default | unit | meaning |\n|---|---|---|---|---|---|\n"
    return f"\n## {title}\n\nKeys stand {place} of the file.\n\n{head}" + "".join(rows)


def _row(field: dataclasses.Field[Any], kind: Any, section: str) -> str:
    info = info_of(field)
    flag = "--" + field.name.replace("_", "-")
    flags = f"`{flag}` `--no-{flag[2:]}`" if kind is bool else f"`{flag}`"
    default = "required" if field.default is dataclasses.MISSING else show(field.default, info)
    cells = [
        f"`{field.name}`", flags, f"`{variable(section, field.name)}`", default or "(empty)",
        info.unit or "-", info.help + _limits(info),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |\n"


def _limits(info: FieldInfo) -> str:
    if info.choices:
        return f" One of {', '.join(info.choices)}."
    low, high = info.minimum, info.maximum
    if low is not None and high is not None:
        return f" {low:g} to {high:g}."
    if not low:
        return ""
    return f" At least {show(int(low), info) if info.unit == 'bytes' else f'{low:g}'}."
