"""Regenerates pdserve/rpc/v1 and pdserve/rpc/oip/v2 from protos/. The output is committed; with --check a
difference is an error."""

from __future__ import annotations

import filecmp
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (Path("pdserve") / "rpc" / "v1", Path("pdserve") / "rpc" / "oip" / "v2")


def main(argv: list[str]) -> int:
    """Exit code of protoc, or 1 when --check finds that the committed files differ."""
    if "--check" not in argv:
        for package in PACKAGES:
            for old in (ROOT / package).glob("*_pb2*"):
                old.unlink()
        return generate(ROOT)
    with tempfile.TemporaryDirectory() as scratch:
        code = generate(Path(scratch))
        different = [
            name for package in PACKAGES for name in differences(Path(scratch) / package, ROOT / package)
        ]
    if different:
        print(f"generated code differs, run `make proto`: {', '.join(different)}", file=sys.stderr)
    return code or bool(different)


def generate(out: Path) -> int:
    """Runs protoc with the python, pyi and grpc plugins over every proto file; returns its exit code."""
    plugins = Path(sys.executable).parent
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{ROOT / 'protos'}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}",
        f"--mypy_out=quiet:{out}",
        f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}",
        f"--mypy_grpc_out=quiet:{out}",
        *sorted(str(file) for file in (ROOT / "protos").rglob("*.proto")),
    ]
    return subprocess.run(command, check=False).returncode


def differences(fresh: Path, committed: Path) -> list[str]:
    """Names of generated files that differ, are missing, or have no proto any more."""
    names = {file.name for folder in (fresh, committed) for file in folder.glob("*_pb2*")}
    _, mismatch, errors = filecmp.cmpfiles(fresh, committed, sorted(names), shallow=False)
    return sorted(mismatch + errors)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
