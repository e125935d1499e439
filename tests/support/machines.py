"""Machines of namespaces: network, processes, /tmp and /dev/shm of their own, a root that nothing can write.

What lives here: making them, a cable between two, running programs inside as a user without rights. That
takes root; elsewhere `Host` stands in: the machine we are on. What runs inside ends with its machine.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from pdserve.fleet.processes import end
from tests.support.kept import over_tmp
from tests.support.process_tree import command_line
from tests.support.source_tree import ROOT

UID = 10001
LIMIT_S = 120.0
_TMPFS = "mount -t tmpfs -o nosuid,nodev,noexec,mode=1777"
_UNSHARE = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
# It may read what is not for others, as the tests' files and Python may be; it may write nothing of theirs.
_DROP = (
    "setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--no-new-privs",
    "--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search", "--",
)  # fmt: skip


def _setup() -> str:
    """What a machine does first, in shell; then it only waits."""
    return "\n".join(
        (
            "set -e",
            "mount --make-rprivate /",
            *over_tmp(f"{_TMPFS},size=4g tmpfs /tmp"),
            f"{_TMPFS},size=1g tmpfs /dev/shm",
            "mount -o remount,bind,ro /",
            "ip link set lo up",
            "echo ready",
            "exec sleep infinity",
        )
    )


@functools.cache
def available() -> bool:
    """Whether machines can be made here."""
    programs = ("unshare", "nsenter", "setpriv", "ip", "mount")
    if os.geteuid() or not all(map(shutil.which, programs)):
        return False
    tried = subprocess.run([*_UNSHARE, "mount", "--make-rprivate", "/"], capture_output=True, check=False)
    return tried.returncode == 0


class Host:
    """This machine, as it is."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def start(self, command: list[str], environ: Mapping[str, str], log: Path) -> subprocess.Popen[str]:
        """A program inside, without rights. environ: all of it. log: where its output goes."""
        with log.open("w") as file:
            process = subprocess.Popen(
                [*self._enter(), *command],
                env=dict(environ), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, text=True,
                cwd="/",
            )  # fmt: skip
        self._started.append(process)
        return process

    def run(self, command: list[str], environ: Mapping[str, str]) -> str:
        """The output of a program inside. Raises AssertionError with it, should the program fail."""
        done = subprocess.run(
            [*self._enter(), *command],
            env=dict(environ), capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd="/",
        )  # fmt: skip
        assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
        return done.stdout

    def terminate(self, process: subprocess.Popen[str]) -> None:
        """Sends SIGTERM to a program that was started inside."""
        process.terminate()

    def left(self) -> list[str]:
        """Programs that run inside."""
        alive = [psutil.Process(process.pid) for process in self._started if process.poll() is None]
        return [" ".join(command_line(process)) for process in alive]

    def stop(self) -> None:
        """Ends everything inside."""
        for process in self._started:
            if process.poll() is None:
                end([psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)], 0.0)
            process.wait()

    def _enter(self) -> list[str]:
        return []


class Machine(Host):
    """A machine of its own."""

    def __init__(self, *, rights: bool) -> None:
        """rights: what runs inside keeps our user's. Raises AssertionError with what went wrong."""
        super().__init__()
        self._rights = rights
        self._holder = subprocess.Popen(
            [*_UNSHARE, "bash", "-c", _setup()],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._holder.stdout is not None
        said = self._holder.stdout.readline()
        assert said == "ready\n", said
        (child,) = psutil.Process(self._holder.pid).children()
        self.pid = child.pid

    def terminate(self, process: subprocess.Popen[str]) -> None:
        """Sends SIGTERM to a program that was started inside: what was started waits for it outside."""
        for child in psutil.Process(process.pid).children():
            child.terminate()

    def left(self) -> list[str]:
        """Programs that run inside, but for the machine itself."""
        space = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for process in psutil.process_iter():
            try:
                inside = os.readlink(f"/proc/{process.pid}/ns/pid") == space and process.pid != self.pid
                if inside and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline()))
            except (OSError, psutil.Error):
                continue
        return found

    def stop(self) -> None:
        """Ends everything inside: its first process takes all others along."""
        os.kill(self.pid, signal.SIGKILL)
        self._holder.wait()
        for process in self._started:
            process.wait()

    def plug(self, address: str) -> None:
        """Gives the machine's end of a cable, which is there, an address."""
        self._as_root("ip", "address", "add", f"{address}/24", "dev", "cable")
        self._as_root("ip", "link", "set", "cable", "up")

    def _as_root(self, *command: str) -> None:
        enter = ["nsenter", f"--target={self.pid}", "--net"]
        subprocess.run([*enter, *command], check=True, capture_output=True)

    def _enter(self) -> list[str]:
        return ["nsenter", f"--target={self.pid}", "--mount", "--net", "--pid", "--wdns=/tmp",
                *(() if self._rights else _DROP)]  # fmt: skip


@contextmanager
def two_machines(first: str, second: str) -> Iterator[tuple[Machine, Machine]]:
    """Two with these addresses and a cable between them; what runs inside keeps our user's rights."""
    with machine(rights=True) as one, machine(rights=True) as other:
        assert isinstance(one, Machine)
        assert isinstance(other, Machine)
        ends = ["name", "cable", "netns", str(one.pid), "type", "veth", "peer", "name", "cable"]
        command = ["ip", "link", "add", *ends, "netns", str(other.pid)]
        subprocess.run(command, check=True, capture_output=True)
        one.plug(first)
        other.plug(second)
        yield one, other


@contextmanager
def machine(*, rights: bool = False) -> Iterator[Host]:
    """One machine, or the one we are on where none can be made. rights: keep our user's inside."""
    made = Machine(rights=rights) if available() else Host()
    try:
        yield made
    finally:
        made.stop()


def python_environment() -> dict[str, str]:
    """What a program of the tests' own Python needs to start inside."""
    return {"PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
