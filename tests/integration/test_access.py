"""Every call is denied unless the table of access allows it to whoever asks: all descriptors are walked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor

from pdserve.cli.connection import Router
from pdserve.config import ServeConfig
from pdserve.rpc.access import RULES, Access
from pdserve.rpc.fleet_auth import METADATA_KEY, fleet_token
from pdserve.rpc.guard import AccessGuard
from pdserve.rpc.server import RpcServer, ServerOptions
from tests.support.edge_kit import Edge, bearer
from tests.support.grpc_methods import neighbour_methods, our_methods, path_of, status_of
from tests.support.router_kit import SECRET

METHODS = [*our_methods(), *neighbour_methods()]
UNAUTHENTICATED, REFUSED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED
MISSING = grpc.StatusCode.UNIMPLEMENTED
DENIED = (UNAUTHENTICATED, REFUSED)
HEALTH = "/grpc.health.v1.Health/Check"


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    made = Edge.start(tmp_path_factory.mktemp("edge"), "--reflection")
    yield made
    made.stack.stop()


def addresses(edge: Edge) -> list[str]:
    """The router's and each worker's."""
    return [edge.stack.address, *(w.record.peer.control for w in edge.stack.status().workers)]


def test_every_method_has_a_rule() -> None:
    assert {path_of(method) for method in METHODS} <= set(RULES)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.full_name.removeprefix("pdserve.rpc.v1."))
def test_a_call_without_credentials_is_refused_everywhere(edge: Edge, method: MethodDescriptor) -> None:
    wrong = ((METADATA_KEY, "0" * 64),)
    access = RULES[path_of(method)]
    for address in addresses(edge):
        served = access is Access.FLEET or address == edge.stack.address
        for metadata in ((), wrong, bearer("pds_" + "0" * 12 + "_" + "x" * 43)):
            code, text = status_of(address, path_of(method), metadata)
            if served and access is Access.PUBLIC:
                assert code is grpc.StatusCode.OK
            else:
                assert code is (UNAUTHENTICATED if served else MISSING)
            assert "pds_" not in text


def test_keys_open_what_clients_may_call_and_the_token_all(edge: Edge) -> None:
    for method in METHODS:
        path = path_of(method)
        user, admin, ours = (
            status_of(edge.stack.address, path, metadata)[0]
            for metadata in (edge.of("shop"), edge.of("admin"), edge.fleet)
        )
        access = RULES[path]
        assert (user in DENIED) == (access in (Access.ADMIN, Access.FLEET)), path
        assert (admin in DENIED) == (access is Access.FLEET), path
        assert ours not in DENIED, path
        if access is Access.ADMIN:
            assert user is REFUSED
        if access is Access.FLEET:
            assert admin is UNAUTHENTICATED


def test_health_is_for_everybody_and_the_worker_has_no_clients(edge: Edge) -> None:
    for address in addresses(edge):
        assert status_of(address, HEALTH)[0] is grpc.StatusCode.OK


def test_a_client_that_sends_its_key_as_anthropics_do_is_known(edge: Edge) -> None:
    path = "/pdserve.rpc.v1.InferenceService/GetModel"
    key = edge.keys["shop"]
    assert status_of(edge.stack.address, path, (("x-api-key", key),))[0] is grpc.StatusCode.OK
    both = (("x-api-key", key), ("authorization", f"bearer {key}"))
    assert status_of(edge.stack.address, path, both)[0] is grpc.StatusCode.OK
    unlike = (("x-api-key", key), *edge.of("bank"))
    assert status_of(edge.stack.address, path, unlike)[0] is UNAUTHENTICATED
    assert status_of(edge.stack.address, path, (("authorization", f"Basic {key}"),))[0] is UNAUTHENTICATED


def test_our_commands_show_the_key_of_the_environment(edge: Edge) -> None:
    command = [sys.executable, "-m", "pdserve.cli", "status", "--address", edge.stack.address]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PDSERVE_")}
    without, with_key = (
        subprocess.run(command, env=environ | more, capture_output=True, text=True, timeout=60, check=False)
        for more in ({}, {"PDSERVE_API_KEY": edge.keys["shop"]})
    )
    assert without.returncode == 1
    assert "unauthenticated" in without.stderr
    assert with_key.returncode == 0
    assert "router" in with_key.stdout


def test_up_asks_its_router_as_a_member_of_the_fleet(edge: Edge) -> None:
    with Router.of(edge.stack.address, ServeConfig(), edge.stack.secret).client() as client:
        assert client.get_status().workers


class _New:
    """A service that somebody added and gave no rule."""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        async def answer(request: bytes, context: Any) -> bytes:
            return b"secret"

        return (
            grpc.unary_unary_rpc_method_handler(answer) if details.method == "/somebody.New/Call" else None  # type: ignore[attr-defined]
        )


async def test_a_new_service_without_a_rule_is_refused_even_to_the_fleet() -> None:
    server = RpcServer(ServerOptions(), interceptors=[AccessGuard(SECRET)])
    server.server.add_generic_rpc_handlers([_New()])  # type: ignore[list-item]
    await server.start()
    async with grpc.aio.insecure_channel(server.address) as channel:
        for metadata in ((), ((METADATA_KEY, fleet_token(SECRET)),)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/somebody.New/Call")(b"", metadata=metadata)
            assert caught.value.code() is REFUSED
    await server.stop()
