"""Libraries of our C++ that were compiled before: what an image brings along, so that it needs no compiler.

`python -m pdserve.kernels.prebuilt` compiles every library for every target into the package itself
(kernels/libraries), beside the code that loads it and as trusted as that; `build.built` looks there before it
compiles. A library's name holds the hash of its sources, so one of older sources is never taken. What does
not live here: compiling, and the cache of what a machine compiled for itself (`build`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from pdserve.errors import PdserveError

FOLDER = Path(__file__).with_name("libraries")
_PACKAGES = Path(__file__).parents[2]
SOURCES = {
    "kernels": _PACKAGES / "pdserve" / "kernels" / "csrc",
    "dequant": _PACKAGES / "pdserve" / "models" / "csrc",
    "exchange": _PACKAGES / "pdserve" / "parallel" / "csrc",
    "ferry": _PACKAGES / "pdserve" / "ranks" / "csrc",
    "page-mover": _PACKAGES / "kvtransfer" / "csrc",
}
"""Every library of ours by name, with the folder of its C++."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """CPUs that one library is for. isa: as `build.chosen_isa` names it. needs: flags of /proc/cpuinfo."""

    name: str
    isa: str
    flags: tuple[str, ...]
    needs: frozenset[str]


_SKYLAKE = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd", "bmi1", "bmi2", "adx"})
TARGETS = (
    Target(
        name="avx512-dot",
        isa="avx512-dot",
        flags=("-march=cascadelake", "-mavx512bf16", "-DPDS_DOT_BF16"),
        needs=_SKYLAKE | {"avx512_vnni", "avx512_bf16"},
    ),
    Target(
        name="avx512-vnni",
        isa="avx512",
        flags=("-march=cascadelake",),
        needs=_SKYLAKE | {"avx512_vnni"},
    ),
    Target(name="avx512", isa="avx512", flags=("-march=skylake-avx512",), needs=_SKYLAKE),
    Target(name="avx2", isa="avx2", flags=("-march=haswell",), needs=frozenset({"avx2", "fma"})),
)
"""The best first. Between those of one isa, which share a numerics id, only products of integers differ."""


def candidates(isa: str, cpu: str) -> list[Target]:
    """Targets that run on a CPU and compute as `isa` says, the best first. cpu: vendor and flags."""
    words = set(cpu.split())
    return [target for target in TARGETS if target.isa == isa and target.needs <= words]


def file_name(name: str, target: Target, source_hash: str) -> str:
    """Of a library in `FOLDER`."""
    return f"{name}-{target.name}-{source_hash}.so"


def main(folder: Path = FOLDER, names: tuple[str, ...] = tuple(SOURCES)) -> int:
    """Compiles all libraries for all targets; returns an exit code, the reason being on stderr."""
    from pdserve.kernels.build import build_for, find_compiler

    try:
        find_compiler()
        folder.mkdir(exist_ok=True)
        for name in names:
            for target in TARGETS:
                build_for(name, SOURCES[name], target, folder)
    except PdserveError as error:
        print(error.message, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
