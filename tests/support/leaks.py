"""Whether a text for clients tells what it must not: paths, addresses, or the insides of a program."""

from __future__ import annotations

import re

from pdserve.errors import BY_LABEL

_LEAKS = {
    "a path": (
        r"(?<![\w<])/(?:home|usr|tmp|var|etc|root|opt|work|proc|dev|run|lib|srv|mnt|nix|sys)\b"
        r"|\w\.(?:py|so|cpp|pyx)\b|site-packages|[A-Z]:\\\w"
    ),
    "an address": r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\[[0-9a-fA-F:]*::[0-9a-fA-F:]*\]|\b(?:localhost|unix):",
    "an object": (
        r"<[\w.]+ object|<class |<function |<bound |\bat 0x|\b0x[0-9a-fA-F]{6,}|Traceback|\w+Error\b|"
        r"\w+Exception\b|NoneType|KeyError|_pb2|"
        r"\b(?:pdserve|router|kvtransfer|grpc|google|torch|asyncio|starlette|uvicorn|fastapi|pydantic)\.[a-z_]"
    ),
    "a secret": r"pds_[0-9a-f]{12}_|eyJ[\w-]{10}|\b[0-9a-f]{64}\b",
}
_PATTERNS = {name: re.compile(pattern) for name, pattern in _LEAKS.items()}


def leak_in(text: str) -> str:
    """What a text tells that it must not, with the place; "" if nothing."""
    for name, pattern in _PATTERNS.items():
        match = pattern.search(text)
        if match is not None:
            start = max(0, match.start() - 40)
            return f"{name}: …{text[start : match.end() + 40]}…"
    return ""


def is_label(name: str) -> bool:
    """Whether an error's label is one of the closed set."""
    return name in BY_LABEL
