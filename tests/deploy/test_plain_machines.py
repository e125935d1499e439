"""What systemd's units start, started: a head and a node on machines of their own, a router, the fleet.

Where no machines can be made both are the one we are on, and need other ports; all else is as written.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pdserve.kernels import prebuilt
from pdserve.kernels.build import built
from tests.support.certs import Certs
from tests.support.machines import Host, available, machine, python_environment, two_machines
from tests.support.plain import CONFIG, Unit, filled, unit, variables
from tests.support.raycluster import free_ports, until
from tests.support.source_tree import ROOT


def own_address() -> str:
    """Where Ray sees this machine, which takes no loopback address for a node; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect(("192.0.2.1", 80))
        except OSError:
            return "127.0.0.1"
        address: str = asked.getsockname()[0]
        return address


HEAD, NODE = ("10.77.0.1", "10.77.0.2") if available() else (own_address(),) * 2
START_S, END_S = 180.0, 60.0
ON_HEAD = {"NODE_ADDRESS": HEAD, "HEAD_ADDRESS": HEAD, "PREFILL_HERE": "1", "DECODE_HERE": "0"}
ON_NODE = {"NODE_ADDRESS": NODE, "HEAD_ADDRESS": HEAD, "PREFILL_HERE": "0", "DECODE_HERE": "1"}


@dataclass
class Fleet:
    """Two machines, what was started on them, and the folder that stands for /etc/pdserve.

    ports: other ones than the files name, where both machines share loopback.
    """

    head: Host
    node: Host
    config: Path
    logs: Path
    ports: dict[str, str]
    running: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def start(self, name: str, on: Host, values: dict[str, str]) -> None:
        """Starts what a unit does, with the variables of its machine."""
        found = unit(name)
        command = [self._ports(word) for word in filled(found.command, variables() | values, self.config)]
        self.running[name] = on.start(command, self._environ(found), self._log(name))

    def end(self, name: str, on: Host) -> int:
        """Stops it as systemd would; returns its exit code."""
        process = self.running.pop(name)
        on.terminate(process)
        return process.wait(END_S)

    def stop_command(self, name: str, on: Host) -> str:
        """What a unit's own command for its end prints."""
        found = unit(name)
        return on.run(found.stop_command, self._environ(found))

    def ask(self, *command: str) -> str:
        """What a client command prints, run on the head's machine with a client's certificate."""
        certs = self.config / "client"
        files = {"ca": "ca.crt", "cert": "client.crt", "key": "client.key"}
        tls = [f"--tls-{name}={certs / file}" for name, file in files.items()]
        address = self._ports(f"--address={HEAD}:50051")
        return self.head.run(["pdserve", *command, address, *tls], self._environ(unit("pdserve-router")))

    def scale(self, line: str) -> str:
        """What a line for a shell prints, a variable before the program, run on the head's machine."""
        variable, program, *words = map(self._ports, line.replace(CONFIG, str(self.config)).split())
        name, _, value = variable.partition("=")
        return self.head.run([Path(program).name, *words], python_environment() | {name: value})

    def until_said(self, name: str, words: str) -> None:
        """Returns when a program's log has these words. Raises AssertionError with all logs' ends."""
        running = self.running[name]
        until(lambda: words in self._log(name).read_text() or running.poll() is not None, self._told, START_S)
        assert words in self._log(name).read_text(), self._told()

    def _log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def _told(self) -> str:
        logs = sorted(self.logs.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in logs)

    def _ports(self, word: str) -> str:
        return re.sub(r"\b\d{4,5}\b", lambda match: self.ports.get(match[0], match[0]), word)

    def _environ(self, found: Unit) -> dict[str, str]:
        own = {name: value.replace(CONFIG, str(self.config)) for name, value in found.environment.items()}
        # Our own cache: its libraries are there already.
        return {**own, **python_environment(), "XDG_CACHE_HOME": str(Path.home() / ".cache")}


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Both machines with their files, and the three commands given."""
    for name in ("kernels", "page-mover", "dequant"):
        built(prebuilt.SOURCES[name], name)
    # Not below /tmp, which the machines have of their own.
    folder = Path(tempfile.mkdtemp(prefix="pdserve-plain-", dir="/var/tmp"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        if available():
            head, node = stack.enter_context(two_machines(HEAD, NODE))
        else:
            head, node = stack.enter_context(machine()), stack.enter_context(machine())
        made = Fleet(head, node, write_files(folder / "etc"), folder, {} if available() else other_ports())
        made.start("pdserve-ray-head", head, ON_HEAD)
        made.start("pdserve-router", head, ON_HEAD)
        made.until_said("pdserve-ray-head", "Ray runtime started")
        made.start("pdserve-ray-node", node, ON_NODE)
        made.start("pdserve-fleet", head, ON_HEAD)
        made.until_said("pdserve-fleet", "ready after")
        yield made


def other_ports() -> dict[str, str]:
    """For two machines that are one: free ports in place of those that others must know, any for the rest."""
    known = ("6379", "10001", "50051")
    rest = ("6380", "6381", "10002", "19999", "8000", "9464", "9466")
    return dict.fromkeys(rest, "0") | {
        port: str(free) for port, free in zip(known, free_ports(3), strict=True)
    }


def write_files(config: Path) -> Path:
    """Secrets and certificates as docs/deploy.md has them made."""
    (config / "tls").mkdir(parents=True)
    Certs(config / "client", (HEAD, NODE, "localhost"))
    for name in ("ca.crt", "node.crt", "node.key"):
        shutil.copy2(config / "client" / name, config / "tls" / name)
    for name in ("secret", "ray_token"):
        (config / name).touch(mode=0o600)
        (config / name).write_text(secrets.token_hex(32) + "\n")
    return config


def test_a_request_goes_over_both_machines(fleet: Fleet) -> None:
    said = fleet.ask("generate", "The capital of France is", "--max-tokens=4", "--temperature=0", "--json")
    answer = json.loads(said)
    assert "Paris" in answer["text"]
    assert answer["transfer"]["pages"] == 1
    if available():
        assert answer["transfer"]["path"] == "tcp", "two machines share no memory"
    records = [worker["record"] for worker in json.loads(fleet.ask("status", "--json"))["workers"]]
    hosts = {record["role"]: record["peer"]["control"].partition(":")[0] for record in records}
    assert hosts == {"prefill": HEAD, "decode": NODE}, "each where its machine has room for it"


def test_an_administrator_scales_with_the_token_alone(fleet: Fleet) -> None:
    """The command of docs/deploy.md, for the number there is: a shell has nothing of a unit's environment."""
    page = (ROOT / "docs" / "deploy.md").read_text("utf-8")
    (line,) = re.findall(r"^ *(RAY_AUTH_TOKEN_PATH=.* scale decode .*)$", page, re.MULTILINE)
    assert fleet.scale(line.replace("10.0.0.5", HEAD).replace(" 3 ", " 1 ")) == "1 decode serving\n"


def test_it_ends_as_systemd_ends_it(fleet: Fleet) -> None:
    """The fleet first, then Ray: nothing is left on either machine."""
    assert fleet.end("pdserve-fleet", fleet.head) == 0
    assert "stopped" in (fleet.logs / "pdserve-fleet.log").read_text()
    assert fleet.end("pdserve-router", fleet.head) == 0
    assert "no worker is left on the node" in fleet.stop_command("pdserve-ray-node", fleet.node)
    fleet.end("pdserve-ray-node", fleet.node)
    fleet.end("pdserve-ray-head", fleet.head)
    until(lambda: not fleet.head.left() and not fleet.node.left(), "all processes to end")
