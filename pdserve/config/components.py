"""The components that have settings: title, section of the file, and configuration class."""

from __future__ import annotations

from typing import Any

from pdserve.config.serve import ServeConfig

COMPONENTS: list[tuple[str, str, type[Any]]] = [("pdserve up", "", ServeConfig)]
