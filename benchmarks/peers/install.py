"""Installs a peer into its own venv, once. Output goes to a log beside the venv; progress to a callback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.peers.specs import Engine

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "benchmarks" / ".peers"
_CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
Progress = Callable[[str], None]


class PeerError(Exception):
    """A peer can not be used; the message says why in one sentence, without paths or hosts."""


def interpreter(engine: Engine) -> Path:
    """The peer's own Python."""
    return PEERS / engine.name / "bin" / "python"


def install(engine: Engine, progress: Progress) -> None:
    """Makes the venv unless it is there in this version already. Raises PeerError."""
    stamp = PEERS / engine.name / ".installed"
    wanted = "\n".join(engine.requirements)
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    PEERS.mkdir(parents=True, exist_ok=True)
    log = PEERS / f"{engine.name}.install.log"
    log.write_text("")
    progress(f"{engine.name}: making its venv")
    step(engine.name, [sys.executable, "-m", "venv", str(PEERS / engine.name)], log)
    pip = [str(interpreter(engine)), "-m", "pip", "--disable-pip-version-check"]
    limits = _install_torch(engine, pip, log, progress) if engine.needs_torch else []
    note = f" ({engine.note})" if engine.note else ""
    progress(f"{engine.name}: installing {', '.join(engine.requirements)}{note}")
    step(engine.name, [*pip, "install", *limits, *engine.requirements], log, env=engine.build_env)
    if engine.drop:
        step(engine.name, [*pip, "uninstall", "-y", *engine.drop], log)
    stamp.write_text(wanted)


def _install_torch(engine: Engine, pip: Sequence[str], log: Path, progress: Progress) -> list[str]:
    """The CPU build of the torch we use ourselves; the default build would bring gigabytes of CUDA.

    Returns the pip arguments that keep it in place.
    """
    pins = (ROOT / "constraints.txt").read_text()
    version = re.findall(r"^torch==(\S+)", pins, re.MULTILINE)[0]
    progress(f"{engine.name}: installing torch {version}, CPU build")
    try:
        step(engine.name, [*pip, "install", f"torch=={version}+cpu"], log)
    except PeerError:
        step(engine.name, [*pip, "install", "--index-url", _CPU_TORCH_INDEX, f"torch=={version}+cpu"], log)
    constraints = PEERS / f"{engine.name}.constraints.txt"
    constraints.write_text(f"torch=={version}+cpu\n")
    return ["-c", str(constraints)]


def step(name: str, command: Sequence[str], log: Path, *, env: Mapping[str, str] | None = None) -> None:
    """Runs a command at low priority with its output in `log`. Raises PeerError with its last words."""
    with log.open("a") as out:
        print("$", *command, file=out, flush=True)
        done = subprocess.run(
            ["nice", "-n", "10", *command],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(env or {})},
            check=False,
        )
    if done.returncode:
        raise PeerError(f"{name}: {last_words(log)} (see {log.name} under benchmarks/.peers)")


def last_words(log: Path) -> str:
    """The last line of a log that says what went wrong, fit for a result file: no paths, no addresses."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"error|Error|ERROR|No space", line)]
    line = (errors or lines or ["it ended without a word"])[-1]
    return redact(line)[:300]


def redact(text: str) -> str:
    """Without URLs and absolute paths."""
    return re.sub(r"\w+://\S+|(?<![\w.])/[\w.+-]+(/[\w.+-]+)*/?", "…", text)
