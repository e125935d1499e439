"""`pdserve certs` as an operator meets it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509

from pdserve.cli.certs import run
from pdserve.errors import ConfigError
from pdserve.tls import TlsSource
from tests.support.certs import Certs


def certs_command(directory: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pdserve.cli", "certs", str(directory), *flags],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_the_command_makes_files_that_serve(tmp_path: Path) -> None:
    done = certs_command(tmp_path / "c", "--hosts", "node-1.example, 10.1.2.3,::1", "--days", "7")
    assert done.returncode == 0, done.stderr
    assert "keep it away" in done.stdout
    source = Certs(tmp_path / "c").source()
    for host in ("node-1.example", "10.1.2.3", "[::1]", "pdserve.internal"):
        assert host.strip("[]") in source.current().names or host == "[::1]"
    source.check_serves("10.1.2.3")


def test_an_authority_that_is_there_is_used_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certs = Certs(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    run(tmp_path, ("10.0.0.9",), 1)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert before.keys() == after.keys()
    assert {name for name in after if after[name] == before[name]} == {"ca.crt", "ca.key"}
    assert "the authority that was there" in capsys.readouterr().out
    certs.source().check_serves("10.0.0.9")


@pytest.mark.parametrize("lost", ["ca.crt", "ca.key"])
def test_half_an_authority_is_not_overwritten(tmp_path: Path, lost: str) -> None:
    Certs(tmp_path)
    (tmp_path / lost).unlink()
    with pytest.raises(ConfigError, match="half of an authority"):
        run(tmp_path, ("localhost",), 1)


def test_an_authority_that_is_not_ours_is_refused_in_words(tmp_path: Path) -> None:
    Certs(tmp_path)
    (tmp_path / "ca.key").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="can not be read"):
        run(tmp_path, ("localhost",), 1)


def test_a_directory_that_can_not_be_had_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="directory can not be used"):
        run(tmp_path / "file", ("localhost",), 1)


def test_certificates_say_what_they_may_be_used_for(tmp_path: Path) -> None:
    Certs(tmp_path)
    usages = {}
    for name in ("node", "client"):
        cert = x509.load_pem_x509_certificate((tmp_path / f"{name}.crt").read_bytes())
        extended = cert.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        usages[name] = {usage._name for usage in extended}
        assert not cert.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert usages == {"node": {"clientAuth", "serverAuth"}, "client": {"clientAuth"}}


class _OfRoot:
    """What stat says of a file, but for its owner."""

    def __init__(self, info: os.stat_result) -> None:
        self.st_mode, self.st_size, self.st_ino = info.st_mode, info.st_size, info.st_ino
        self.st_mtime_ns, self.st_uid = info.st_mtime_ns, 0


@pytest.mark.parametrize(("mode", "taken"), [(0o440, True), (0o640, True), (0o460, False), (0o444, False)])
def test_a_key_of_root_may_be_read_by_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, taken: bool
) -> None:
    """As Kubernetes mounts a secret for a user that is not root."""
    certs = Certs(tmp_path)
    (tmp_path / "node.key").chmod(mode)
    real = os.stat
    monkeypatch.setattr(os, "stat", lambda path: _OfRoot(real(path)))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    if taken:
        assert TlsSource(certs.files())
        return
    with pytest.raises(ConfigError, match="tls_key: others"):
        TlsSource(certs.files())
