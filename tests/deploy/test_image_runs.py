"""The image's install steps in a clean virtual environment, and what they made, confined as containers are.

The steps are the build stage's own script. What they would fetch is taken over from here, and the compiler
only notes its calls, which for all kinds of CPU take minutes: the libraries that are loaded were compiled
for this CPU.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.kernels import prebuilt
from pdserve.kernels.build import _cpu, built, chosen_isa, source_hash
from tests.support.machines import Host, machine
from tests.support.source_tree import ROOT

EXTRAS = "worker,http,jwt,tls,otel"
COMPILER = """#!/bin/sh
case " $* " in *" -c "*) echo "$@" >> "{log}";; esac
while [ $# -gt 0 ]; do [ "$1" = -o ] && echo built > "$2"; shift; done
"""


@pytest.fixture(scope="module")
def prefix() -> Iterator[Path]:
    """What the image has in /opt/pdserve."""
    # Not below /tmp, which the machine inside has of its own.
    folder = Path(tempfile.mkdtemp(prefix="pdserve-image-", dir="/var/tmp"))
    try:
        yield install(folder)
    finally:
        shutil.rmtree(folder)


def install(folder: Path) -> Path:
    """The build stage's steps with what would be fetched taken over; returns where they installed to."""
    compiler = folder / "compiler"
    compiler.write_text(COMPILER.format(log=folder / "compiled"))
    compiler.chmod(0o755)
    target = folder / "opt"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(target)], check=True)
    (site,) = (target / "lib").glob("python*/site-packages")
    (here,) = {path for path in sys.path if path.endswith("site-packages")}
    (site / "taken-over.pth").write_text(f"{here}\n")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_CONFIG_FILE": os.devnull}
    return build(folder, environ | offline | {"CXX": str(compiler)}, EXTRAS, "0")


def build(folder: Path, environ: dict[str, str], extras: str, model: str) -> Path:
    """Runs the build stage's script on a copy of what the Dockerfile copies."""
    source, target = folder / "src", folder / "opt"
    source.mkdir()
    text = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (?!--)(.*)$", text, re.MULTILINE):
        *names, place = line.split()
        for name in names:
            copy(name, source / place)
    for part in (["torch", str(target), "cpu"], ["pdserve", str(target), extras, model]):
        command = ["deploy/docker/build.sh", *part]
        done = subprocess.run(command, cwd=source, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return target


def copy(name: str, place: Path) -> None:
    """As the Dockerfile's COPY does, less what its ignore file holds back."""
    place.mkdir(parents=True, exist_ok=True)
    if (ROOT / name).is_dir():
        ignored = shutil.ignore_patterns("__pycache__", "libraries")
        shutil.copytree(ROOT / name, place, ignore=ignored, dirs_exist_ok=True)
    else:
        shutil.copy(ROOT / name, place)


def libraries(prefix: Path) -> Path:
    (folder,) = prefix.glob("lib/python*/site-packages/pdserve/kernels/libraries")
    return folder


def test_the_steps_leave_a_copy_that_needs_nothing_of_the_source(prefix: Path) -> None:
    shutil.rmtree(prefix.parent / "src")
    told = subprocess.run(
        [prefix / "bin" / "python", "-I", "-c", "import pdserve as p, router; print(p.__file__)"],
        capture_output=True, text=True, check=True, cwd="/",
    ).stdout.split()  # fmt: skip
    assert all(path.startswith(str(prefix)) for path in told)
    wanted = {
        prebuilt.file_name(name, target, source_hash(folder))
        for name, folder in prebuilt.SOURCES.items()
        for target in prebuilt.TARGETS
    }
    assert {path.name for path in libraries(prefix).glob("*.so")} == wanted
    compiled = (prefix.parent / "compiled").read_text().splitlines()
    assert len(compiled) == sum(len(list(x.glob("*.cpp"))) for x in prebuilt.SOURCES.values()) * len(
        prebuilt.TARGETS
    )


def take_compiled(prefix: Path) -> None:
    """Puts libraries for this CPU into the places of those that the stand-in compiler left."""
    cpu = _cpu()
    best = prebuilt.candidates(chosen_isa(cpu), cpu)[0]
    for name in ("kernels", "page-mover", "dequant"):
        library = libraries(prefix) / prebuilt.file_name(name, best, source_hash(prebuilt.SOURCES[name]))
        library.write_bytes(built(prebuilt.SOURCES[name], name).read_bytes())
        library.with_suffix(".sha256").write_text(hashlib.sha256(library.read_bytes()).hexdigest() + "\n")


def image_environment(prefix: Path) -> dict[str, str]:
    """The image's variables, by its definition, and no compiler anywhere."""
    text = re.sub(r"\\\n\s*", " ", (ROOT / "deploy" / "docker" / "Dockerfile").read_text())
    environ = dict(
        pair.split("=", 1) for pair in re.findall(r"^ENV (PATH=.*)$", text, re.MULTILINE)[0].split()
    )
    return {name: value.replace("/opt/pdserve", str(prefix)) for name, value in environ.items()} | {
        "CXX": "none"
    }


@pytest.fixture
def container() -> Iterator[Host]:
    with machine() as made:
        yield made


SERVE = """
import os, subprocess, sys
up = subprocess.Popen(["pdserve", "up", "--port", "0", "--http-port", "0", "--metrics-port", "0"],
                      stdout=subprocess.PIPE, text=True)
for line in up.stdout:
    print(line, end="", flush=True)
    if line.startswith("ready on "):
        address = line.split()[2]
        command = ["pdserve", "generate", "The capital of France is", "--address", address]
        subprocess.run([*command, "--max-tokens", "4", "--temperature", "0"], check=True)
        up.terminate()
sys.exit(up.wait())
"""


def test_it_serves_without_rights_a_compiler_or_a_writable_root(prefix: Path, container: Host) -> None:
    take_compiled(prefix)
    said = container.run(["python", "-c", SERVE], image_environment(prefix))
    assert "Paris" in said
    assert "stopped; nothing is left running" in said
    assert container.left() == []
    if type(container) is not Host:
        told = container.run(["python", "-c", PROBE], image_environment(prefix))
        assert told.split() == ["10001", "read-only", "noexec"]


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_everything_fetched_and_compiled_serves(container: Host) -> None:
    """As the image is built, its extras, the default model and every kind of CPU: minutes."""
    folder = Path(tempfile.mkdtemp(prefix="pdserve-image-", dir="/var/tmp"))
    try:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        target = build(folder, environ, f"{EXTRAS},cluster", "1")
        assert "Paris" in container.run(["python", "-c", SERVE], image_environment(target))
    finally:
        shutil.rmtree(folder)


PROBE = """
import os, pathlib, subprocess
print(os.getuid())
for path in ("/usr/local/bin/new", "/etc/new", os.path.dirname(os.__file__) + "/new"):
    try:
        open(path, "w")
    except OSError as error:
        assert error.errno in (13, 30), error
    else:
        raise AssertionError(path)
print("read-only")
script = pathlib.Path("/tmp/new")
script.write_text("#!/bin/sh\\n")
script.chmod(0o755)
try:
    subprocess.run([script])
except PermissionError:
    print("noexec")
"""
