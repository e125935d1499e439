"""TLS everywhere: a router, a prefill and a decode worker with certificates, pages by tcp.

The ports are walked, so that none is forgotten; certificates are replaced while requests run.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pdserve.client import AsyncClient, Client, GenerateOptions, Result
from pdserve.errors import ConfigError, Unavailable
from pdserve.types import Role
from tests.support.certs import Certs
from tests.support.stack import Stack, channel_to, usable

PROMPT = "The history of the lighthouse begins with " + "a fire on a hill, and " * 12
WAIT_S = 20.0


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    return Certs(tmp_path_factory.mktemp("certs"))


@pytest.fixture(scope="module")
def stack(certs: Certs) -> Iterator[Stack]:
    made = Stack.start({Role.PREFILL: 1, Role.DECODE: 1}, certs=certs, transports=("tcp",))
    yield made
    made.stop()


def generate(client: Client) -> Result:
    """One answer without a prefix hit."""
    options: GenerateOptions = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    return client.generate(PROMPT, no_prefix_cache=True, **options).result()


def ask(client: Client) -> tuple[int, ...]:
    """The tokens of one answer; its ledger shows that the pages came by tcp."""
    result = generate(client)
    assert result.ledger.transfer.path == "tcp"
    assert result.ledger.transfer.pages > 0
    assert result.ledger.decode_computed_prompt_tokens == 0
    return result.token_ids


def listening(process: int) -> set[int]:
    """TCP ports of a process and its children."""
    found = psutil.Process(process)
    connections = [c for p in (found, *found.children(recursive=True)) for c in p.net_connections("tcp")]
    return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}


def shown(port: int, certs: Certs, name: str = "client") -> str:
    """Serial number of the certificate at a port, for a client with that certificate."""
    identity = certs.source(name).current()
    context = ssl.create_default_context(cadata=identity.ca.decode())
    context.load_cert_chain(certs.files(name).cert, certs.files(name).key)
    context.set_alpn_protocols(["h2"])
    raw = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
    with context.wrap_socket(raw, server_hostname="127.0.0.1") as sock:
        return str((sock.getpeercert() or {})["serialNumber"])


def answers_plainly(port: int) -> bool:
    """Whether a port says anything to somebody without TLS: an HTTP/2 preface, then a line."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
    with sock, contextlib.suppress(ConnectionError):
        sock.sendall(PREFACE + b"GET / HTTP/1.0\r\n\r\n")
        return sock.recv(1) not in {b"", ALERT}
    return False


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9)
ALERT = b"\x15"
"""How a TLS record begins that only says what is wrong."""


def takes_strangers(port: int) -> bool:
    """Whether a port says anything to a TLS client without a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    raw = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
    with raw, contextlib.suppress(OSError), context.wrap_socket(raw) as sock:
        sock.sendall(PREFACE)
        return sock.recv(1) != b""
    return False


def metrics_port(stack: Stack) -> int:
    """The one that talks to anybody, by design: found by asking for the metrics."""
    return next(port for port in listening(stack.router.pid) if answers_plainly(port))


# ---- requests ----------------------------------------------------------------------------------------


async def test_the_asyncio_client_takes_certificates_too(stack: Stack, certs: Certs) -> None:
    async with AsyncClient(stack.address, **certs.settings("client")) as client:
        assert (await client.generate("Hello", max_tokens=4).result()).text


@pytest.mark.parametrize("by", ["flags", "environment"])
def test_the_commands_take_certificates(stack: Stack, certs: Certs, by: str) -> None:
    settings = certs.settings("client")
    flags = [text for name, path in settings.items() for text in ("--" + name.replace("_", "-"), path)]
    variables = {f"PDSERVE_{name.upper()}": path for name, path in settings.items()}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pdserve.cli", "generate", "Hello", "--address", stack.address),
            *("--max-tokens", "4", "--json", *(flags if by == "flags" else [])),
        ],
        capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, **(variables if by == "environment" else {})},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["usage"]["completion_tokens"] == 4


def test_clients_without_a_good_certificate_are_not_served(stack: Stack, certs: Certs) -> None:
    foreign = Certs(certs.directory.parent / f"{certs.directory.name}-foreign")
    mixed = foreign.settings("client", tls_ca=certs.settings()["tls_ca"])
    with Client(stack.address) as plain, pytest.raises(Unavailable):
        plain.get_status()
    with Client(stack.address, **foreign.settings("client")) as other, pytest.raises(Unavailable):
        other.get_status()
    with pytest.raises(ConfigError, match="not signed by"):
        Client(stack.address, **mixed)
    renamed = certs.settings("client", tls_server_name="another.name")
    with Client(stack.address, **renamed) as elsewhere, pytest.raises(Unavailable):
        elsewhere.get_status()


# ---- ports -------------------------------------------------------------------------------------------


def test_no_port_but_the_metrics_talks_without_our_certificates(stack: Stack, certs: Certs) -> None:
    ports = {name: listening(process.pid) for name, process in stack.workers.items()}
    ports["router"] = listening(stack.router.pid) - {metrics_port(stack)}
    assert {name: len(found) for name, found in ports.items()} == {"prefill-0": 2, "decode-0": 1, "router": 1}
    for name, found in ports.items():
        for port in found:
            assert not answers_plainly(port), name
            assert not takes_strangers(port), name
            assert shown(port, certs), name


# ---- rotation ----------------------------------------------------------------------------------------


def test_certificates_are_replaced_while_requests_run_and_none_fails(stack: Stack, certs: Certs) -> None:
    ports = [
        *(port for process in stack.workers.values() for port in listening(process.pid)),
        *(listening(stack.router.pid) - {metrics_port(stack)}),
    ]
    before = [shown(port, certs) for port in ports]
    failures: list[BaseException] = []
    answers: list[tuple[int, ...]] = []
    enough, over = threading.Semaphore(0), threading.Event()

    def serve(client: Client) -> None:
        try:
            while not over.is_set():
                answers.append(ask(client))
                enough.release()
        except BaseException as error:
            failures.append(error)
            enough.release()

    with stack.client() as client:
        threads = [threading.Thread(target=serve, args=(client,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(2):
            assert enough.acquire(timeout=WAIT_S)
            certs.rotate()
            for _ in range(3):
                assert enough.acquire(timeout=WAIT_S)
        over.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert len(set(answers)) == 1
    after = [shown(port, certs) for port in ports]
    assert not set(before) & set(after)
    with channel_to(stack.address, certs), stack.client() as fresh:
        assert ask(fresh) == answers[0]
    stack.until_idle()


def test_handed_over_tokens_are_the_aggregated_ones_before_and_after_a_worker_comes_with_new_certificates(
    stack: Stack, certs: Certs
) -> None:
    with stack.client() as client:
        handed_over = ask(client)
    stack.kill("prefill-0")
    stack.until(lambda status: usable(status) == ["decode-0"])
    with stack.client() as client:
        alone = generate(client)  # decode does both phases
    assert alone.ledger.decode_computed_prompt_tokens == alone.usage.prompt_tokens
    assert alone.token_ids == handed_over
    certs.rotate()
    stack.launch("prefill-0", Role.PREFILL)
    stack.wait_started("prefill-0")
    stack.until(lambda status: len(usable(status)) == 2)
    with stack.client() as client:
        assert ask(client) == handed_over
    stack.until_idle()


# ---- starting ----------------------------------------------------------------------------------------


def test_a_router_with_bad_certificates_says_so_and_does_not_start(certs: Certs, tmp_path: Path) -> None:
    key = tmp_path / "open.key"
    key.write_bytes((certs.directory / "node.key").read_bytes())
    key.chmod(0o644)
    files = certs.settings(tls_key=str(key))
    flags = [text for name, path in files.items() for text in ("--" + name.replace("_", "-"), path)]
    done = subprocess.run(
        [sys.executable, "-m", "pdserve.cli", "router", "--port", "0", "--no-metrics", *flags],
        capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PDSERVE_FLEET_SECRET": "00" * 32},
    )  # fmt: skip
    assert done.returncode == 2
    assert "tls_key: others can read" in done.stderr
    assert str(tmp_path) not in done.stderr
