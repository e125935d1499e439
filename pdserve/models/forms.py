"""Directories with a model in several forms, one for each role of a worker.

What lives here: which folder a role loads. What does not: writing them (`pdserve.calibrate.write`).
"""

from __future__ import annotations

from pathlib import Path

from pdserve.errors import ModelError
from pdserve.models.json_file import read_object

FORMS = "forms.json"
ROLES = ("prefill", "decode", "aggregated")


def folders_of(directory: Path) -> dict[str, Path]:
    """The model's folder by role; nothing where the directory has one form only.

    Raises ModelError for a list of forms that is not usable.
    """
    if not (directory / FORMS).is_file():
        return {}
    values = read_object(directory / FORMS)
    roles = values.get("roles")
    if values.get("version") != 1 or not isinstance(roles, dict):
        raise ModelError(f"{FORMS} is not usable: it is of another version, or names no roles.")
    found: dict[str, Path] = {}
    for role in ROLES:
        name = roles.get(role)
        if not isinstance(name, str) or Path(name).name != name or not (directory / name).is_dir():
            raise ModelError(f"{FORMS} is not usable: it names no folder for the role {role}.")
        found[role] = directory / name
    return found
