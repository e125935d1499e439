"""API keys: made, kept as hashes, shown, expired, revoked; and files that must not be used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.errors import ConfigError, Overloaded, Unauthenticated
from router.auth.authenticator import Authenticator, Headers
from router.auth.keys import KeyEntry, format_keys, make_key, parse_keys
from router.caller import ANONYMOUS, Caller
from router.config import RouterConfig
from tests.support.leaks import leak_in

NOW = 1_800_000_000.0


def make(tenant: str = "shop", *, admin: bool = False, lives_s: float | None = None) -> tuple[str, KeyEntry]:
    return make_key(tenant, admin=admin, note="", lives_s=lives_s, now=NOW)


def key_file(directory: Path, *entries: KeyEntry) -> Path:
    """A new file, put in place at once, as pdserve keys does."""
    file, new = directory / "keys", directory / "new"
    new.touch(mode=0o600)
    new.write_bytes(format_keys(entries))
    os.replace(new, file)
    return file


def bearer(key: str) -> Headers:
    return [("Authorization", f"Bearer {key}")]


class ManualClock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds


def authenticator(clock: ManualClock | None = None, **settings: object) -> tuple[Authenticator, list[str]]:
    """One, and the reasons of its refusals."""
    reasons: list[str] = []
    config = RouterConfig(**settings)  # type: ignore[arg-type]
    return Authenticator(config, count=reasons.append, now=lambda: NOW, clock=clock or ManualClock()), reasons


def test_without_settings_everybody_is_anonymous() -> None:
    auth, reasons = authenticator()
    assert not auth.required
    assert auth.check([]) is auth.check(bearer("x")) is ANONYMOUS
    assert reasons == []


def test_a_key_says_whose_it_is_and_the_file_does_not_hold_it(tmp_path: Path) -> None:
    (shop, entry), (ops, other) = make(), make("ops", admin=True)
    file = key_file(tmp_path, entry, other)
    auth, reasons = authenticator(api_key_file=str(file))
    assert auth.required
    assert auth.check(bearer(shop)) == Caller(tenant="shop", key_id=entry.id, admin=False)
    assert auth.check([("x-api-key", ops)]) == Caller(tenant="ops", key_id=other.id, admin=True)
    assert auth.check([("X-Api-Key", ops.encode())]).tenant == "ops"
    assert reasons == []
    for key in (shop, ops):
        assert key.rpartition("_")[2] not in file.read_text()
    assert make()[1].hash != make()[1].hash


def test_what_is_no_valid_key_is_refused_and_the_message_does_not_say_why(tmp_path: Path) -> None:
    key, entry = make()
    late, expired = make(lives_s=10)
    file = key_file(tmp_path, entry, replace(expired, expires=NOW))
    auth, reasons = authenticator(api_key_file=str(file))
    unknown, _ = make()
    cases: list[tuple[Headers, str]] = [
        ([], "missing"),
        ([("authorization", f"Basic {key}")], "malformed"),
        ([("authorization", "Bearer ")], "malformed"),
        ([("authorization", f"Bearer {key}"), ("x-api-key", unknown)], "malformed"),
        (bearer("pds_" + "é" * 20), "malformed"),
        (bearer("p" * 9000), "malformed"),
        (bearer(key[:-1]), "malformed"),
        (bearer("some other key"), "unknown_key"),
        (bearer(unknown), "unknown_key"),
        (bearer(key[:17] + unknown[17:]), "wrong_secret"),
        (bearer(late), "expired"),
    ]
    texts = set()
    for headers, reason in cases:
        with pytest.raises(Unauthenticated) as caught:
            auth.check(headers)
        assert reasons.pop() == reason
        assert leak_in(caught.value.message) == ""
        if reason not in ("missing", "expired"):
            texts.add(caught.value.message)
    assert len(texts) == 1


def test_a_replaced_file_counts_at_once_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (one, first), (two, second) = make("one"), make("two")
    file = key_file(tmp_path, first)
    changes: list[tuple[frozenset[str], frozenset[str]]] = []
    auth = Authenticator(
        RouterConfig(api_key_file=str(file)),
        keys_changed=lambda added, removed: changes.append((added, removed)),
        now=lambda: NOW,
    )
    assert auth.check(bearer(one)).tenant == "one"
    key_file(tmp_path, second)
    assert auth.check(bearer(two)).tenant == "two"
    with pytest.raises(Unauthenticated):
        auth.check(bearer(one))
    assert changes == [(frozenset({second.id}), frozenset({first.id}))]
    for broken in (b"{", b"\xff\xfe", b'{"id": 1}\n', format_keys([first, first]), b"[" * 100_000):
        file.write_bytes(broken)
        assert auth.check(bearer(two)).tenant == "two"
        assert "stays" in caplog.text
        caplog.clear()
    file.unlink()
    assert auth.check(bearer(two)).tenant == "two"
    key_file(tmp_path, first)
    assert auth.check(bearer(one)).tenant == "one"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_a_file_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    file = key_file(tmp_path, make()[1])
    file.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600") as caught:
        authenticator(api_key_file=str(file))
    assert str(tmp_path) not in caught.value.message


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(ConfigError, match="api_key_file") as caught:
            authenticator(api_key_file=str(path))
        assert str(tmp_path) not in caught.value.message
    with pytest.raises(ConfigError, match="line 2"):
        parse_keys(b"# made by hand\nsecret-in-the-clear\n")


def test_somebody_elses_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = key_file(tmp_path, make()[1])
    owner = file.stat().st_uid
    if owner == 0:
        os.chown(file, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match="somebody else"):
        authenticator(api_key_file=str(file))


def test_one_key_is_enough_for_a_start_and_never_shown() -> None:
    auth, reasons = authenticator(api_key="correct horse battery")
    assert auth.check(bearer("correct horse battery")) == Caller(key_id="api-key")
    for wrong in ("correct horse batter", "correct horse battery2", "x" * 40):
        with pytest.raises(Unauthenticated):
            auth.check(bearer(wrong))
    assert reasons == ["unknown_key"] * 3
    assert "horse" not in repr(RouterConfig(api_key="correct horse battery"))
    with pytest.raises(ConfigError, match="16 characters"):
        authenticator(api_key="short")


def test_guesses_are_bounded_by_address_and_time_gives_them_back(tmp_path: Path) -> None:
    key, entry = make()
    clock = ManualClock()
    auth, reasons = authenticator(
        clock, api_key_file=str(key_file(tmp_path, entry)), auth_failures_per_minute=6
    )
    for _ in range(6):
        with pytest.raises(Unauthenticated):
            auth.check(bearer("guess"), "ipv4:192.0.2.7:4001")
    with pytest.raises(Overloaded) as caught:
        auth.check(bearer(key), "ipv4:192.0.2.7:4002")
    assert caught.value.retry_after_s == pytest.approx(10)
    assert reasons[-1] == "throttled"
    assert auth.check(bearer(key), "ipv4:192.0.2.8:4001").tenant == "shop", "another address"
    with pytest.raises(Unauthenticated):
        auth.check([], "ipv4:192.0.2.7:4002")
    clock.seconds += 11
    assert auth.check(bearer(key), "192.0.2.7").tenant == "shop"


def test_addresses_of_one_network_count_together_and_the_table_is_bounded(tmp_path: Path) -> None:
    key, entry = make()
    auth, _ = authenticator(api_key_file=str(key_file(tmp_path, entry)), auth_failures_per_minute=1)
    with pytest.raises(Unauthenticated):
        auth.check(bearer("guess"), "ipv6:[2001:db8::1]:4001")
    with pytest.raises(Overloaded):
        auth.check(bearer(key), "ipv6:%5B2001:db8::ffff%5D:4001")
    for number in range(5000):
        with pytest.raises(Unauthenticated):
            auth.check(bearer("guess"), f"ipv4:10.0.{number // 250}.{number % 250}:1")
    assert auth.check(bearer(key), "ipv6:[2001:db8::1]:4001").tenant == "shop", "forgotten"
    assert len(auth._throttle._seen) <= 4096


# ---- the command ----------------------------------------------------------------------------------------


def keys(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pdserve.cli", "keys", *arguments],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_the_command_adds_lists_and_revokes(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    added = keys("add", "--file", str(file), "--tenant", "shop", "--expires", "30d", "--note", "till [red]3")
    assert added.returncode == 0, added.stderr
    key = added.stdout.split()[0]
    admin = json.loads(keys("add", "--file", str(file), "--tenant", "ops", "--admin", "--json").stdout)
    assert file.stat().st_mode & 0o777 == 0o600
    auth = Authenticator(RouterConfig(api_key_file=str(file)))
    assert (auth.check(bearer(key)).tenant, auth.check(bearer(key)).admin) == ("shop", False)
    assert auth.check(bearer(admin["key"])).admin
    table, plain = keys("list", "--file", str(file)), keys("list", "--file", str(file), "--json")
    listed = json.loads(plain.stdout)
    assert [entry["tenant"] for entry in listed] == ["shop", "ops"]
    assert "till [red]3" in table.stdout
    for text in (table.stdout, plain.stdout):
        assert key.rpartition("_")[2] not in text
        assert "hash" not in text
    assert keys("revoke", listed[0]["id"], "--file", str(file)).returncode == 0
    with pytest.raises(Unauthenticated):
        auth.check(bearer(key))
    assert auth.check(bearer(admin["key"])).tenant == "ops"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("add", "--tenant", "a b"), "tenant"),
        (("add", "--tenant", "a", "--expires", "soon"), "expires"),
        (("revoke", "0123456789ab"), "api_key_file"),
        (("list",), "api_key_file"),
    ],
)
def test_the_command_says_what_is_wrong(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    done = keys(*arguments, "--file", str(tmp_path / "keys"))
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_the_one_key_is_hidden_where_settings_are_shown() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pdserve.cli", "config", "show"],
        env={**os.environ, "PDSERVE_API_KEY": "correct-horse-battery"},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "horse" not in done.stdout
    assert any(line.split()[:2] == ["api_key", "(set)"] for line in done.stdout.splitlines())
