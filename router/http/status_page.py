"""The status page: its files, which hold nothing of the router, and the events that its script follows.

The files are for everybody, as a browser sends no key when it opens a page. What the page shows comes as
server-sent events, which want a key as all other routes do; the page asks for it and keeps it in its memory
only. Nothing is loaded from elsewhere, and the policy in the headers says so.
What does not live here: what is told (`status_feed`).
"""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdserve.errors import Overloaded, PdserveError
from router.http.answer import while_there
from router.http.errors import error_response, openai_form
from router.http.gateway import Gateway
from router.http.route import Handler, Route
from router.http.status_feed import StatusFeed

_FOLDER = Path(__file__).parent / "page"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


def status_routes(gateway: Gateway) -> tuple[Route, ...]:
    """The page, its two files and its events. They are no part of the API that /openapi.json describes."""
    feed = StatusFeed(gateway.hub)

    async def events(gateway: Gateway, request: Request) -> Response:
        gateway.caller(request)
        return Updates(feed, gateway, request)

    return (
        Route(path="/status", handler=_file("status.html", "text/html"), summary="The status page."),
        Route(path="/status/page.js", handler=_file("status.js", "text/javascript"), summary="Its script."),
        Route(path="/status/page.css", handler=_file("status.css", "text/css"), summary="Its style."),
        Route(path="/status/events", handler=events, summary="What it shows, every second."),
    )


def _file(name: str, media_type: str) -> Handler:
    content = (_FOLDER / name).read_bytes()

    async def handle(gateway: Gateway, request: Request) -> Response:
        return Response(content, headers=HEADERS, media_type=media_type)

    return handle


class Updates(Response):
    """Server-sent events until the client goes, the router closes, or the key is no longer good."""

    def __init__(self, feed: StatusFeed, gateway: Gateway, request: Request) -> None:
        super().__init__()
        self._feed, self._gateway, self._request = feed, gateway, request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._feed.place():
                await while_there(self._run(send), receive)
        except Overloaded as error:
            await error_response(error, openai_form)(scope, receive, send)

    async def _run(self, send: Send) -> None:
        headers = {**HEADERS, "content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        async with aclosing(self._feed.looks()) as looks:
            async for look in looks:
                if not self._still_known():
                    break
                await send({"type": "http.response.body", "body": b"data: %b\n\n" % look, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _still_known(self) -> bool:
        """Asked before each look: a page stays open for days, a key may be revoked meanwhile."""
        try:
            self._gateway.caller(self._request)
        except PdserveError:
            return False
        return True
