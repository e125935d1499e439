"""Units, Compose file and docs for plain machines start the same, confined, and give it time to drain."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.plain import (
    COMPOSE,
    UNITS,
    Unit,
    compose_command,
    documented_commands,
    services,
    unit,
    units,
    variables,
)

RAY = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/etc/pdserve/ray_token"}
FORKS = {"GRPC_ENABLE_FORK_SUPPORT": "0"}
PAIRS = {
    "pdserve-ray-head": "ray-head",
    "pdserve-ray-node": "ray-node",
    "pdserve-router": "router",
    "pdserve-fleet": "fleet",
}
CONFINED = {
    "User": "pdserve",
    "NoNewPrivileges": "yes",
    "CapabilityBoundingSet": "",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "PrivateTmp": "yes",
    "UMask": "0077",
    "EnvironmentFile": "/etc/pdserve/pdserve.env",
    "KillMode": "mixed",
}
SERVICE_KEYS = {
    *("image", "network_mode", "user", "read_only", "tmpfs", "cap_drop", "security_opt", "init", "restart"),
    *("ulimits", "logging", "profiles", "command", "entrypoint", "environment", "env_file", "volumes"),
    *("shm_size", "stop_grace_period", "healthcheck", "depends_on", "pre_stop"),
}


def drain_s(command: list[str]) -> float:
    """How long a command may drain."""
    return max(
        [float(word.split("=")[1]) for word in command if word.startswith("--drain-timeout-s=")] + [0.0]
    )


@pytest.mark.parametrize(("name", "service"), PAIRS.items())
def test_compose_starts_what_systemd_starts(name: str, service: str) -> None:
    found = services()[service]
    assert compose_command(found) == unit(name).command
    environment = {"pdserve-ray-head": RAY | FORKS, "pdserve-router": {}}.get(name, RAY)
    assert found.get("environment", {}) == environment
    own = unit(name).environment
    assert {key: own[key] for key in own if key in RAY | FORKS} == environment


def test_every_unit_has_a_service_and_the_docs_say_the_same() -> None:
    assert [found.name for found in units()] == sorted(PAIRS)
    assert set(services()) == {*PAIRS.values(), "up"}
    order = ("pdserve-ray-head", "pdserve-router", "pdserve-ray-node", "pdserve-fleet")
    assert documented_commands() == [unit(name).command for name in order]


@pytest.mark.parametrize("found", units(), ids=lambda found: found.name)
def test_a_unit_is_confined_and_its_variables_are_explained(found: Unit) -> None:
    assert {name: found.one(name) for name in CONFINED} == CONFINED
    assert float(found.one("TimeoutStopSec")) >= drain_s(found.command) + 30
    used = set(re.findall(r"\$\{(\w+)\}", " ".join(found.command)))
    assert used <= set(variables())
    assert not any(name.startswith("PDSERVE_") for name in used), "pdserve refuses settings that it lacks"
    for stop in found.settings.get("ExecStop", []):
        (limit,) = re.findall(r"--timeout-s (\d+)", stop)
        assert float(found.one("TimeoutStopSec")) >= float(limit) + 60, "Ray's own end comes after the drain"


def test_what_a_unit_starts_after_is_there() -> None:
    names = {found.name for found in units()}
    text = "\n".join(path.read_text() for path in UNITS.glob("*.service"))
    assert set(re.findall(r"(pdserve-[\w-]+)\.service", text)) <= names
    fleet = unit("pdserve-fleet").one("After")
    assert "pdserve-ray-head.service" in fleet, "so it is stopped, and drained, before Ray is"


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    """Where there is a systemd to ask; without one its sections are looked at."""
    for path in UNITS.glob("*.service"):
        text = re.sub(r"/opt/pdserve/bin/\w+", "/bin/true", path.read_text())
        (tmp_path / path.name).write_text(text)
        assert re.findall(r"^\[(\w+)\]$", text, re.MULTILINE) == ["Unit", "Service", "Install"]
    if analyze := shutil.which("systemd-analyze"):
        command = [analyze, "verify", *map(str, sorted(tmp_path.glob("*.service")))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", services())
def test_a_service_is_confined(name: str) -> None:
    service = services()[name]
    assert set(service) <= SERVICE_KEYS
    assert service["user"] == "10001:10001", "the image's"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert [str(mount).partition(":")[0] for mount in service["tmpfs"]] == ["/tmp"]  # type: ignore[attr-defined]
    assert all(str(volume).endswith(":ro") for volume in service.get("volumes", []))  # type: ignore[attr-defined]
    grace = float(str(service["stop_grace_period"]).removesuffix("s"))
    assert grace >= drain_s(compose_command(service)) + 30
    assert service["profiles"], "nothing starts unasked"
    assert "ports" not in service, "the network is the host's"


def test_compose_names_what_it_has() -> None:
    found = services()
    assert {profile for service in found.values() for profile in service["profiles"]} == {  # type: ignore[attr-defined]
        "laptop", "head", "node",
    }  # fmt: skip
    (waits,) = [service["depends_on"] for service in found.values() if "depends_on" in service]
    assert set(waits) <= set(found)  # type: ignore[call-overload]
    assert "healthcheck" in found["ray-head"], "the fleet waits for it"
    parsed = yaml.safe_load(COMPOSE.read_text())
    assert set(parsed) - {key for key in parsed if key.startswith("x-")} == {"name", "services"}
    used = set(re.findall(r"\$\{(\w+)", COMPOSE.read_text()))
    assert used <= {*variables(), "IMAGE", "CONFIG", "MODELS"}
    assert len(re.findall(r"\$\{\w+:-[^}]+\}", COMPOSE.read_text())) == len(
        re.findall(r"\$\{", COMPOSE.read_text())
    )
