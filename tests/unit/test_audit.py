"""The audit log: a line for each call however it ends, in a file that is private, or in the log."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import ConfigError, PermissionRefused
from pdserve.rpc.v1 import inference_pb2 as pb
from router.audit import AuditLog
from router.caller import Caller

OPS = Caller(tenant="ops", key_id="0123")


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "ok"),
        (PermissionRefused("no"), "permission_refused"),
        (asyncio.CancelledError(), "cancelled"),
        (KeyError("/secret"), "internal"),
    ],
)
def test_every_end_is_recorded(tmp_path: Path, error: BaseException | None, outcome: str) -> None:
    log = AuditLog(str(tmp_path / "audit"), now=lambda: 12.5)

    def call() -> None:
        with log.call("RebalanceExperts", "10.0.0.7") as entry:
            entry.caller = OPS
            entry.told(pb.RebalanceExpertsRequest(worker_id="w\n1"))
            if error is not None:
                raise error

    if error is None:
        call()
    else:
        with pytest.raises(type(error)):
            call()
    assert lines(tmp_path / "audit") == [
        {
            "time": 12.5, "action": "RebalanceExperts", "key_id": "0123", "tenant": "ops",
            "peer": "10.0.0.7", "arguments": {"worker_id": "w\n1"}, "outcome": outcome,
        }
    ]  # fmt: skip


def test_only_listed_arguments_are_kept(tmp_path: Path) -> None:
    log = AuditLog(str(tmp_path / "audit"))
    with log.call("Generate", "") as entry:
        entry.told(pb.GenerateRequest(prompt="a secret"))
    assert "secret" not in (tmp_path / "audit").read_text()


def test_a_file_that_is_moved_away_is_made_anew(tmp_path: Path) -> None:
    file = tmp_path / "audit"
    log = AuditLog(str(file))
    for count in range(2):
        log.keys_changed(frozenset({f"k{count}"}), frozenset())
        file.rename(tmp_path / f"old{count}")
    assert [lines(tmp_path / f"old{n}")[0]["arguments"]["added"] for n in range(2)] == ["k0", "k1"]
    assert (tmp_path / "old1").stat().st_mode & 0o777 == 0o600


def test_a_place_that_can_not_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path / "no" / "audit", tmp_path, tmp_path / "link"):
        with pytest.raises(ConfigError, match="audit_log") as caught:
            AuditLog(str(path))
        assert str(tmp_path) not in caught.value.message


def test_without_a_file_and_where_it_fails_the_log_has_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    AuditLog().keys_changed(frozenset({"one"}), frozenset())
    assert '"added": "one"' in caplog.text
    (tmp_path / "a").mkdir()
    log = AuditLog(str(tmp_path / "a" / "audit"))
    (tmp_path / "a" / "audit").unlink()
    (tmp_path / "a").rmdir()
    log.keys_changed(frozenset({"two"}), frozenset())
    assert '"added": "two"' in caplog.text
