"""The components that have settings: title, section of the file, and configuration class."""

from __future__ import annotations

from typing import Any

from pdserve.config import ServeConfig
from router.config import RouterConfig

COMPONENTS: list[tuple[str, str, type[Any]]] = [
    ("pdserve up, pdserve fleet", "", ServeConfig),
    ("pdserve router", "router", RouterConfig),
]
