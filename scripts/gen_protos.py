"""Regenerates pdserve/rpc/v1 from protos/. The output is committed; CI fails when it differs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Runs protoc with the python, pyi and grpc plugins over every proto file."""
    out = ROOT / "pdserve" / "rpc" / "v1"
    for old in out.glob("*_pb2*"):
        old.unlink()
    files = sorted((ROOT / "protos").rglob("*.proto"))
    if sys.executable:
        bin_dir = Path(sys.executable).parent
    command = [
        sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}",
        f"--python_out={ROOT}", f"--grpc_python_out={ROOT}",
        f"--plugin=protoc-gen-mypy={bin_dir / 'protoc-gen-mypy'}", f"--mypy_out=quiet:{ROOT}",
        f"--plugin=protoc-gen-mypy_grpc={bin_dir / 'protoc-gen-mypy_grpc'}", f"--mypy_grpc_out=quiet:{ROOT}",
        *map(str, files),
    ]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
