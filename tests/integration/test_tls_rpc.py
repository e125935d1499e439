"""gRPC with certificates that change: servers and long-lived channels follow, even to another authority."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.client import AsyncClient, Client
from pdserve.errors import ConfigError, Unavailable
from pdserve.rpc.channel import open_channel
from pdserve.rpc.credentials import Renewing, close_soon
from pdserve.rpc.server import RpcServer, ServerOptions
from pdserve.tls import TlsSource
from pdserve.tls.files import FIXED_NAME
from tests.conformance.transport_kit import Gate, proxy
from tests.support.certs import Certs


@pytest.fixture
def certs(tmp_path: Path) -> Certs:
    return Certs(tmp_path / "certs")


@asynccontextmanager
async def serving(tls: TlsSource, port: int = 0) -> AsyncIterator[RpcServer]:
    server = RpcServer(ServerOptions(tls=tls, port=port))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def healthy(channel: grpc.aio.Channel, limit_s: float = 5.0) -> bool:
    """Whether a call comes through, waiting for the connection."""
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=limit_s, wait_for_ready=True)
    except grpc.aio.AioRpcError:
        return False
    return True


async def dialled(address: str, tls: TlsSource | None, limit_s: float = 0.5) -> bool:
    channel = open_channel(address, tls=tls)
    try:
        return await healthy(channel, limit_s)
    finally:
        await channel.close()


async def test_who_is_served_and_who_is_not(certs: Certs) -> None:
    certs.issue("foreign", foreign=True)
    certs.issue("elsewhere", hosts=("192.0.2.1",))
    async with serving(certs.source()) as server:
        assert await dialled(server.address, certs.source("client"), 5.0)
        assert await dialled(server.address, certs.source("client", tls_server_name=FIXED_NAME), 5.0)
        assert not await dialled(server.address, certs.source("client", tls_server_name="another.name"))
        assert not await dialled(server.address, None)
    async with serving(certs.source("elsewhere")) as server:
        assert not await dialled(server.address, certs.source("client"))
        assert await dialled(server.address, certs.source("client", tls_server_name=FIXED_NAME), 5.0)


async def test_a_channel_with_an_expired_certificate_is_refused(certs: Certs) -> None:
    certs.issue("expired", days=-1)
    ca, cert, key = certs.files("expired").read()
    async with serving(certs.source()) as server:
        channel = grpc.aio.secure_channel(server.address, grpc.ssl_channel_credentials(ca, key, cert))
        assert not await healthy(channel, 0.5)
        await channel.close()


async def test_long_lived_channels_and_servers_follow_to_a_new_authority(
    certs: Certs, tmp_path: Path
) -> None:
    others = Certs(tmp_path / "others")
    tls = certs.source("client")
    async with serving(certs.source()) as server:
        channels = Renewing(tls, lambda: open_channel(server.address, tls=tls), close_soon)
        first = channels.current()
        assert await healthy(first)
        assert channels.current() is first
        for path in others.directory.iterdir():
            (certs.directory / path.name).write_bytes(path.read_bytes())
        assert channels.current() is not first
        assert await healthy(channels.current())
        assert await healthy(first), "a connection that exists goes on"
        assert await dialled(server.address, others.source("client"), 5.0)
        assert {*channels.all()} == {first, channels.current()}
        await asyncio.gather(*(channel.close() for channel in channels.all()))


async def test_a_handshake_may_take_a_while(certs: Certs) -> None:
    gate = Gate(1)  # nothing of the server's half until it opens: a far or busy router
    async with serving(certs.source()) as server:
        with proxy(server.address, gate) as endpoint:
            threading.Timer(1.0, gate.open.set).start()
            channel = open_channel(endpoint, tls=certs.source("client"))
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=20
            )
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            await channel.close()


async def test_beyond_loopback_tls_is_enough(certs: Certs) -> None:
    with pytest.raises(ConfigError, match="--tls-ca"):
        RpcServer(ServerOptions(host="192.0.2.1"))
    assert RpcServer(ServerOptions(host="192.0.2.1", tls=certs.source()))


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_clients_refuse_certificates_that_do_not_do(
    certs: Certs, kind: type[Client] | type[AsyncClient]
) -> None:
    with pytest.raises(ConfigError, match=r"tls_key: .*go together"):
        kind("127.0.0.1:1", **(certs.settings("client") | {"tls_key": ""}))
    (certs.directory / "client.key").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        kind("127.0.0.1:1", **certs.settings("client"))


async def test_a_client_whose_tls_does_not_fit_gets_a_typed_error(certs: Certs) -> None:
    async with serving(certs.source()) as server:
        wrong = certs.settings("client", tls_server_name="another.name")
        async with AsyncClient(server.address, **wrong) as client:
            with pytest.raises(Unavailable, match="certificate"):
                await client.get_status()
