"""What is done before any route is looked up: limits on headers and requests under way; whose trace it is.

What does not live here: bodies (`body`), and how long headers may take (`server`).
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from pdserve.errors import Overloaded, PdserveError
from pdserve.obs.tracecontext import PARENT, parent_of
from router.http.errors import HttpRefused, error_response, openai_form

MAX_HEADER_BYTES = 8192
MAX_UNDER_WAY = 2048
"""More than may ever queue and run: a bound on memory, not the queue's own."""


class Guard:
    """An application with these limits around it."""

    def __init__(self, app: ASGIApp, max_under_way: int = MAX_UNDER_WAY) -> None:
        self._app, self._max = app, max_under_way
        self._under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        refused = self._refused(scope)
        if refused is not None:
            await error_response(refused, openai_form)(scope, receive, send)
            return
        self._under_way += 1
        PARENT.set(parent_of((name.decode("latin-1"), value) for name, value in scope["headers"]))
        try:
            await self._app(scope, receive, send)
        finally:
            self._under_way -= 1

    def _refused(self, scope: Scope) -> PdserveError | None:
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if size + len(scope["raw_path"]) + len(scope["query_string"]) > MAX_HEADER_BYTES:
            return HttpRefused(431, f"The headers are larger than {MAX_HEADER_BYTES} bytes.", close=True)
        if self._under_way >= self._max:
            return Overloaded("Too many requests are under way; try again later.", retry_after_s=1.0)
        return None
