"""What the files for plain machines start: commands out of systemd's units, Compose's services and the docs.

What lives here: reading them. What does not: what they must say (tests/rules), starting them (tests/deploy).
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tests.support.source_tree import ROOT

UNITS = ROOT / "deploy" / "systemd"
COMPOSE = ROOT / "deploy" / "compose.yaml"
DOCS = ROOT / "docs" / "deploy.md"
PROGRAMS = "/opt/pdserve/bin/"
CONFIG = "/etc/pdserve"


@dataclass
class Unit:
    """A unit file: its settings by name, each with all its values in order, and comments left out."""

    name: str
    settings: dict[str, list[str]] = field(default_factory=dict)

    def one(self, name: str) -> str:
        """The only value of a setting."""
        (value,) = self.settings[name]
        return value

    @property
    def command(self) -> list[str]:
        """What it starts, variables as they are, the program without its folder."""
        words = shlex.split(self.one("ExecStart"))
        assert words[0].startswith(PROGRAMS), "by its whole path: systemd has no other"
        return [words[0].removeprefix(PROGRAMS), *words[1:]]

    @property
    def stop_command(self) -> list[str]:
        """What it runs before it is stopped, the program without its folder."""
        words = shlex.split(self.one("ExecStop"))
        return [words[0].removeprefix(PROGRAMS), *words[1:]]

    @property
    def environment(self) -> dict[str, str]:
        """Its own variables, without those of pdserve.env."""
        pairs = [pair for line in self.settings.get("Environment", []) for pair in shlex.split(line)]
        return dict(pair.split("=", 1) for pair in pairs)


def unit(name: str) -> Unit:
    """Of deploy/systemd, by its name without ".service"."""
    found = Unit(name)
    text = re.sub(r"\\\n\s*", "", (UNITS / f"{name}.service").read_text())
    for line in text.splitlines():
        if "=" in line and not line.startswith(("#", "[")):
            key, _, value = line.partition("=")
            found.settings.setdefault(key, []).append(value)
    return found


def units() -> list[Unit]:
    """All of deploy/systemd."""
    return [unit(path.stem) for path in sorted(UNITS.glob("*.service"))]


def variables() -> dict[str, str]:
    """Of pdserve.env."""
    lines = (UNITS / "pdserve.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def services() -> dict[str, dict[str, object]]:
    """Compose's services, with what they merge in."""
    parsed = yaml.safe_load(COMPOSE.read_text())
    found: dict[str, dict[str, object]] = parsed["services"]
    return found


def compose_command(service: dict[str, object]) -> list[str]:
    """What a service starts, with plain variables in place of those with defaults."""
    program, command = service.get("entrypoint", ["pdserve"]), service["command"]
    assert isinstance(program, list)
    assert isinstance(command, list)
    return [re.sub(r"\$\{(\w+):-[^}]*\}", r"${\1}", word) for word in (*program, *command)]


def documented_commands() -> list[list[str]]:
    """The commands of docs/deploy.md, "A few plain machines", that start something."""
    text = DOCS.read_text().partition("## A few plain machines")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    return [shlex.split(line) for line in lines if re.match(r"(ray start|pdserve (router|fleet)) ", line)]


def filled(words: list[str], values: dict[str, str], config: Path) -> list[str]:
    """A command with values for its variables, and its configuration in another folder."""
    found = [re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], word) for word in words]
    return [word.replace(CONFIG, str(config)) for word in found]
