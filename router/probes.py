"""Answers for those who watch over a router's process and have no client certificate: `/livez` and `/readyz`.

They lie on the port of the metrics and say what gRPC's health service says. What is not here: when a router
is ready (`hub`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Mapping
from http import HTTPStatus

from pdserve.obs.port import Page

ANSWER_TIMEOUT_S = 2.0
"""A process whose event loop does nothing for so long does not live."""


class Probes:
    """What the probes are told. Made in the router's event loop; the pages are asked for on other threads."""

    def __init__(self) -> None:
        self.ready = False
        """Whether requests have a path and the router takes them. Set by the router alone."""
        self._loop = asyncio.get_running_loop()

    def pages(self) -> Mapping[str, Callable[[], Page]]:
        """By path, for the port of the metrics."""
        return {"/livez": self._livez, "/readyz": self._readyz}

    def _livez(self) -> Page:
        answer = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
        try:
            answer.result(ANSWER_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            answer.cancel()
            return Page(body=b"the event loop does not answer\n", status=HTTPStatus.SERVICE_UNAVAILABLE)
        return Page(body=b"ok\n")

    def _readyz(self) -> Page:
        if self.ready:
            return Page(body=b"ok\n")
        body = b"no path for requests yet, or draining; pdserve status says more\n"
        return Page(body=body, status=HTTPStatus.SERVICE_UNAVAILABLE)
