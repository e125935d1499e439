"""A client that reads nothing: what waits for it is bounded, and it does not keep its place. A server that
can not start says so."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from pdserve.api import Admitted, Chunk
from pdserve.errors import ConfigError
from router.http import server
from tests.support.http_kit import served
from tests.support.router_kit import fleet

CHUNK = 1 << 18
CHUNKS = 1000
BODY = b'{"prompt": "once", "stream": true}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
REQUEST = HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
KERNEL_BYTES = 32 << 20
"""More than the kernel keeps for both ends of a connection, and far less than the stream has."""


async def test_a_reader_that_stops_is_cut_off_and_little_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "STALLED_S", 0.3)
    made, closed = 0, asyncio.Event()

    async def endless(*asked: Any) -> AsyncIterator[Admitted | Chunk]:
        nonlocal made
        try:
            yield Admitted(request_id="a1", client_request_id="", prompt_tokens=1)
            for made in range(1, CHUNKS + 1):
                await asyncio.to_thread(int)  # the next token comes from elsewhere
                yield Chunk(index=made - 1, token_ids=(97,), text="x" * CHUNK)
        finally:
            closed.set()

    async with served() as api:
        api.fleet.router.hub.generate = endless  # type: ignore[method-assign,assignment]
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", int(api.url.rpartition(":")[2])))
            await loop.sock_sendall(client, REQUEST)
            async with asyncio.timeout(30):
                await closed.wait()
        assert 0 < made * CHUNK < KERNEL_BYTES
        assert (await api.http.get("/health")).status_code == 200


async def test_a_server_that_can_not_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(config: uvicorn.Config) -> None:
        raise RuntimeError("something is missing")

    monkeypatch.setattr(uvicorn.Config, "load", broken)
    async with asyncio.timeout(30):
        with pytest.raises(ConfigError, match="http"):
            async with fleet(http=True):
                pass
