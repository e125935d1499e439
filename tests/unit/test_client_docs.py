"""Every snippet of docs/client.md runs as it stands, against a fake server."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from pdserve.client import GenerateOptions
from pdserve.client.testing import FakeServer
from tests.support.certs import Certs

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "client.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
PLAIN, SECURE = "127.0.0.1:50051", "router.example:50051"


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    return Certs(tmp_path_factory.mktemp("certs"))


@pytest.fixture
def servers(certs: Certs) -> Iterator[dict[str, str]]:
    """Addresses of a plain server and of one with mutual TLS."""
    node = [(certs.directory / f"node.{end}").read_bytes() for end in ("key", "crt")]
    authority = (certs.directory / "ca.crt").read_bytes()
    tls = grpc.ssl_server_credentials([(node[0], node[1])], authority, True)
    with FakeServer() as plain, FakeServer(credentials=tls) as secure:
        yield {PLAIN: plain.address, SECURE: secure.address}


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippets_run(
    snippet: str,
    servers: dict[str, str],
    certs: Certs,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(certs.directory)
    for named, real in servers.items():
        snippet = snippet.replace(named, real)
    file = tmp_path / "snippet.py"
    file.write_text(snippet)
    runpy.run_path(str(file))


def test_every_option_is_in_the_table() -> None:
    table = TEXT[TEXT.index("## Options") : TEXT.index("## Chats")]
    assert set(GenerateOptions.__annotations__) - set(re.findall(r"`(\w+)`", table)) == {"resume_window_s"}
    assert len(SNIPPETS) >= 11
