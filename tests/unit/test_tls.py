"""Certificates from files: what is refused at the start and in which words, and what happens on changes."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest

from pdserve.config import ServeConfig, WorkerConfig
from pdserve.config.tls import tls_source
from pdserve.errors import ConfigError
from pdserve.tls import TlsFiles, TlsSource
from pdserve.tls.files import FIXED_NAME
from pdserve.tls.source import covers
from pdserve.types import Role
from router.config import RouterConfig
from tests.support.certs import HOSTS, Certs


@pytest.fixture
def certs(tmp_path: Path) -> Certs:
    return Certs(tmp_path / "certs")


def refusal(certs: Certs, name: str = "node", *, serves: bool = True, **changes: str) -> str:
    """What is said about these files; it must not name paths."""
    with pytest.raises(ConfigError) as caught:
        TlsSource(certs.files(name, **changes), serves=serves)
    assert str(certs.directory) not in caught.value.message
    return caught.value.message


def test_good_files_are_taken_and_say_who_we_are(certs: Certs) -> None:
    identity = certs.source().current()
    assert set(identity.names) == {*HOSTS, FIXED_NAME}
    assert certs.source("client").current().expires > 0


def test_files_are_private_and_the_directory_too(certs: Certs) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in certs.directory.iterdir()}
    assert set(modes) == {f"{name}.{end}" for name in ("ca", "node", "client") for end in ("crt", "key")}
    assert set(modes.values()) == {0o600}
    assert certs.directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("missing", ["tls_ca", "tls_cert", "tls_key"])
def test_the_three_settings_go_together(certs: Certs, missing: str) -> None:
    settings = certs.settings() | {missing: ""}
    for make in (
        lambda: ServeConfig(**settings).resolved(),
        lambda: RouterConfig(**settings),
        lambda: WorkerConfig(worker_id="w", role=Role.DECODE, model="m", **settings),
    ):
        with pytest.raises(ConfigError, match=f"{missing}: .*go together"):
            make()


def test_without_settings_there_is_no_tls() -> None:
    assert tls_source(ServeConfig()) is None
    with pytest.raises(ConfigError, match="go together"):
        TlsFiles.of("", "", "", "a name alone")


@pytest.mark.parametrize("kind", ["ca", "cert", "key"])
def test_a_missing_file_is_named_by_its_setting(certs: Certs, kind: str) -> None:
    settings = certs.settings() | {f"tls_{kind}": str(certs.directory / "nothing")}
    with pytest.raises(ConfigError, match=f"tls_{kind}: there is no such file"):
        tls_source(ServeConfig(**settings))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o620])
def test_a_key_that_others_can_reach_is_refused(certs: Certs, mode: int) -> None:
    (certs.directory / "node.key").chmod(mode)
    message = refusal(certs)
    assert message.startswith("tls_key:")
    assert "chmod 600" in message


def test_a_key_of_another_certificate_is_refused(certs: Certs) -> None:
    assert "does not belong" in refusal(certs, tls_key=str(certs.directory / "client.key"))


def test_an_expired_certificate_is_refused(certs: Certs) -> None:
    certs.issue("old", days=-1)
    assert "expired" in refusal(certs, "old")


def test_a_certificate_of_another_authority_is_refused(certs: Certs) -> None:
    certs.issue("foreign", foreign=True)
    assert "not signed by an authority in tls_ca" in refusal(certs, "foreign")


def test_a_clients_certificate_does_not_do_for_a_node(certs: Certs) -> None:
    assert "key usage" in refusal(certs, "client")
    TlsSource(certs.files("client"), serves=False)


@pytest.mark.parametrize("name", ["ca.crt", "node.crt", "node.key"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_what_is_no_certificate_is_refused(certs: Certs, name: str, content: bytes) -> None:
    (certs.directory / name).write_bytes(content)
    assert "PEM" in refusal(certs)


def test_a_node_must_be_taken_for_the_host_it_serves_on(certs: Certs) -> None:
    source = certs.source()
    for host in ("127.0.0.1", "localhost", "[127.0.0.1]"):
        source.check_serves(host)
    with pytest.raises(ConfigError, match=r"does not cover 192\.0\.2\.7"):
        source.check_serves("192.0.2.7")
    certs.source(tls_server_name=FIXED_NAME).check_serves("192.0.2.7")


def test_a_wildcard_stands_for_one_label() -> None:
    names = ("*.workers.example", "10.0.0.1")
    assert covers(names, "w1.Workers.example")
    assert covers(names, "10.0.0.1")
    assert not covers(names, "a.b.workers.example")
    assert not covers(names, "workers.example")


def test_beyond_loopback_tls_is_enough(certs: Certs) -> None:
    assert ServeConfig(host="0.0.0.0", **certs.settings()).resolved().tls_ca
    worker = ServeConfig(ray_address="192.0.2.1:6379", **certs.settings()).worker(
        Role.DECODE, secret="00", routers=(), run_dir=""
    )
    assert worker.host == "node"
    assert WorkerConfig.from_json(worker.to_json()).tls_key == worker.tls_key


# ---- changes -----------------------------------------------------------------------------------------


def test_a_replaced_certificate_is_taken_at_the_next_use(certs: Certs) -> None:
    source = certs.source()
    version, before = source.versioned()
    assert source.versioned()[1] is before
    certs.rotate()
    after, now = source.versioned()
    assert after > version
    assert now.cert == (certs.directory / "node.crt").read_bytes() != before.cert
    assert now.server is not before.server


def test_a_half_replaced_pair_is_not_taken_until_it_is_whole(certs: Certs) -> None:
    source = certs.source()
    before = source.current()
    certs.issue("next")
    os.replace(certs.directory / "next.crt", certs.directory / "node.crt")
    assert source.current() is before
    os.replace(certs.directory / "next.key", certs.directory / "node.key")
    assert source.current().cert != before.cert


@pytest.mark.parametrize("change", ["gone", "open to all", "expired", "nonsense"])
def test_new_files_that_do_not_do_leave_the_old_ones_in_force(certs: Certs, change: str) -> None:
    source = certs.source()
    before = source.current()
    path = certs.directory / "node.key"
    if change == "gone":
        path.unlink()
    elif change == "open to all":
        path.touch()
        path.chmod(0o644)
    elif change == "expired":
        certs.issue("node", days=-1)
    else:
        path.write_bytes(b"nonsense")
    assert source.current() is before
    path.unlink(missing_ok=True)
    certs.rotate()
    assert source.current().cert != before.cert


def test_tls_contexts_speak_1_3_and_want_certificates(certs: Certs) -> None:
    identity = certs.source().current()
    for context in (identity.server, identity.client):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert context.verify_mode is ssl.CERT_REQUIRED
    assert identity.client.check_hostname
