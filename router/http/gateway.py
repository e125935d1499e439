"""What routes work with: the hub, who calls, and the names that the model is served under."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from starlette.requests import Request

from pdserve.api import ModelInfo
from pdserve.errors import UnknownModel
from router.caller import Caller
from router.hub import Hub

Authenticate = Callable[[Iterable[tuple[str, str]], str], Caller]
"""Who sent these headers, from this address. Raises Unauthenticated, or Overloaded for guesses."""


class Gateway:
    """One router as its HTTP routes see it."""

    def __init__(self, hub: Hub, aliases: tuple[str, ...], authenticate: Authenticate) -> None:
        """aliases: names that requests may ask for beside the model's own; the first is the usual one."""
        self.hub = hub
        self.started_s = int(time.time())
        self._aliases, self._authenticate = aliases, authenticate

    def caller(self, request: Request) -> Caller:
        """Who sent it. Raises Unauthenticated."""
        return self._authenticate(request.headers.items(), request.client.host if request.client else "")

    def info(self) -> ModelInfo:
        """The model. Raises Unavailable before a worker has registered."""
        return self.hub.model_info()

    def names(self) -> tuple[str, ...]:
        """All names the model is served under. Raises Unavailable before a worker has registered."""
        return tuple(dict.fromkeys((*self._aliases, self.info().model)))

    def name(self, asked: str | None) -> str:
        """The name to answer with: the one asked for. Raises UnknownModel."""
        names = self.names()
        if asked and asked not in names:
            raise UnknownModel(
                "model: this server does not serve that model; GET /v1/models lists what it does."
            )
        return asked or names[0]

    def label(self, request: Request, user: str | None = None) -> str:
        """The client's own label for a request: its X-Request-Id, else the user it names."""
        return request.headers.get("x-request-id") or user or ""
