"""What holds before a request is looked at: credentials, sizes, times, where it listens; and TLS."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import anthropic
import httpx2
import openai
import pytest

from pdserve.errors import ConfigError
from router.config import RouterConfig
from router.http import body, server
from router.main import Router
from tests.support.certs import Certs
from tests.support.http_kit import served
from tests.support.router_kit import SECRET, fleet

JSON = {"content-type": "application/json"}
HEAD = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
KEY = "a-key-of-many-letters"


async def chunks(total: int) -> AsyncIterator[bytes]:
    for _ in range(total >> 16):
        yield b" " * (1 << 16)


async def raw(url: str, data: bytes) -> bytes:
    """What comes back until the server hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(data)
    got = b""
    with contextlib.suppress(ConnectionResetError):
        async with asyncio.timeout(20):
            got = await reader.read()
    writer.close()
    return got


async def test_bodies_over_4_mb_are_refused_however_they_come() -> None:
    async with served() as api:
        whole = await api.http.post("/v1/completions", content=b" " * (5 << 20), headers=JSON)
        piecemeal = await api.http.post("/v1/completions", content=chunks(5 << 20), headers=JSON)
        declared = await raw(api.url, HEAD + b"Content-Length: 99999999\r\n\r\n")
        media = await api.http.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert whole.status_code == piecemeal.status_code == 413
    assert "4 MB" in whole.json()["error"]["message"]
    assert declared.startswith(b"HTTP/1.1 413")
    assert media.status_code == 415


async def test_large_headers_are_refused() -> None:
    async with served() as api:
        some = await api.http.get("/health", headers={"x-large": "y" * 9000})
        assert some.status_code == 431
        await raw(api.url, b"GET / HTTP/1.1\r\nx: " + b"y" * 200_000)
        assert (await api.http.get("/health")).status_code == 200


async def test_slow_senders_are_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.2)
    monkeypatch.setattr(server, "HEADER_TIMEOUT_S", 0.2)
    async with served() as api:
        half = HEAD + b"Content-Length: 9\r\n\r\n{"
        assert (await raw(api.url, half)).startswith(b"HTTP/1.1 408")
        assert await raw(api.url, b"GET /health HT") == b""
        assert await raw(api.url, b"") == b""


async def test_a_key_is_asked_for_where_one_is_configured() -> None:
    async with served(api_key=KEY) as api:
        async with api.openai(api_key=KEY) as client:
            assert (await client.completions.create(model="bytes", prompt="once", max_tokens=2)).choices
        async with api.openai(api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with api.anthropic(api_key=KEY) as good:
            asked = {"model": "bytes", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
            assert (await good.messages.create(**asked)).content  # type: ignore[call-overload]
        async with api.anthropic(api_key="wrong") as bad:
            with pytest.raises(anthropic.AuthenticationError):
                await bad.messages.create(**asked)  # type: ignore[call-overload]
        assert (await api.http.get("/health")).status_code == 200
        assert (await api.http.get("/metrics")).status_code == 401


async def test_a_port_in_use_and_an_open_address_are_said_so() -> None:
    async with fleet(http=True) as running:
        port = int(running.router.http_url.rpartition(":")[2])
        config = RouterConfig(port=0, metrics=False, http=True, http_port=port, fleet_secret=SECRET.hex())
        with pytest.raises(ConfigError, match="http_port"):
            await Router(config).start()


async def test_tls_takes_replaced_certificates(tmp_path: Path) -> None:
    certs = Certs(tmp_path)
    trust = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    trust.load_cert_chain(tmp_path / "client.crt", tmp_path / "client.key")
    async with fleet(http=True, **certs.settings()) as running:
        url = running.router.http_url
        assert url.startswith("https://")
        seen = []
        for _ in range(2):
            async with httpx2.AsyncClient(base_url=url, verify=trust) as client:
                answer = await client.get("/health")
                connection = answer.extensions["network_stream"].get_extra_info("ssl_object")
                seen.append(connection.getpeercert(binary_form=True))
            certs.rotate()
        assert seen[0] != seen[1]
        async with httpx2.AsyncClient(base_url=url) as client:
            with pytest.raises(httpx2.HTTPError):
                await client.get("/health")
