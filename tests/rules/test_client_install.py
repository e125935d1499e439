"""The SDK alone: the wheel in a fresh venv with grpcio and protobuf and nothing else, making a call."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("grpcio", "protobuf", "typing_extensions")  # the last by grpcio itself
CALL = """
import json, sys
from pdserve.client import AsyncClient, Client
from pdserve.client.testing import FakeServer

with FakeServer() as server, Client(server.address) as client:
    server.answer("four")
    text = client.generate("two and two").result().text
    many = [answer.result.text for answer in client.generate_many(["a", "b"])]
    tokens = client.tokenize("ab").ids
files = {n: getattr(m, "__file__", None) or "" for n, m in sys.modules.items()}
packaged = sorted({n.partition(".")[0] for n, f in files.items() if "site-packages" in f})
print(json.dumps({"text": text, "many": many, "tokens": tokens, "packaged": packaged}))
"""


def install_alone(directory: Path) -> Path:
    """A venv with the wheel and what it needs at the least, taken over from here; returns its python."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = directory.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(directory / "venv")], check=True)
    (site,) = (directory / "venv" / "lib").glob("python*/site-packages")
    for name in NEEDED:
        take_over(name, site)
    python = directory / "venv" / "bin" / "python"
    # Without --no-deps: pip itself finds that nothing else is needed, as it may not fetch anything.
    install = [str(python), "-m", "pip", "install", "--no-index", str(wheel)]
    done = subprocess.run(install, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return python


def take_over(name: str, site: Path) -> None:
    """Links an installed package's files into another site directory."""
    distribution = importlib.metadata.distribution(name)
    for file in distribution.files or ():
        source, target = Path(str(distribution.locate_file(file))), site / file
        if ".." not in file.parts and source.suffix != ".pyc":
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source)


def test_the_sdk_installs_and_works_with_grpcio_and_protobuf_alone(tmp_path: Path) -> None:
    python = install_alone(tmp_path)
    isolated = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}  # no PYTHONPATH to this tree
    run = [str(python), "-I", "-c", CALL]
    done = subprocess.run(run, cwd=tmp_path, env=isolated, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["text"], told["many"], told["tokens"]) == ("four", ["hello", "hello"], [97, 98])
    loaded = {name for name in told["packaged"] if not name.startswith("_")}
    assert loaded <= {"grpc", "google", "typing_extensions", "pdserve"}

    listed = [str(python), "-m", "pip", "list", "--format", "json"]
    there = json.loads(subprocess.run(listed, check=True, capture_output=True, text=True).stdout)
    names = {package["name"].lower().replace("-", "_") for package in there}
    assert names - {"pip", "setuptools"} == {"pdserve", "grpcio", "protobuf", "typing_extensions"}
