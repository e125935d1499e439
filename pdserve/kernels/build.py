"""Compiling our C++ (kernels, page mover) once per machine: find a compiler, key the result, build, keep it.

The library is cached under $XDG_CACHE_HOME/pdserve (default ~/.cache/pdserve) by a hash of sources, flags,
compiler version and CPU flags, and put in place by one rename; a file lock keeps two processes from building
at once. It is code that will run here: the folder must be the user's own and is closed to others, and a file
that is not the one that was built (by its SHA-256, kept beside it) is built again. An image brings libraries
along instead (`prebuilt`). Loading is `native`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pdserve.errors import ConfigError
from pdserve.kernels import prebuilt

_SOURCES = Path(__file__).with_name("csrc")
_FLAGS = (
    "-O3", "-std=c++17", "-pthread", "-fPIC", "-fvisibility=hidden",
    # One rounding per written operation: contraction could differ between two copies of the same code.
    "-ffp-contract=off",
    # GCC 11 and 12 warn about their own intrinsics.
    "-Wno-maybe-uninitialized", "-Wno-uninitialized",
)  # fmt: skip
_ISA_FLAGS = {
    "avx2": ("-march=haswell",),
    "avx512": ("-march=native",),
    "avx512-dot": ("-march=native", "-DPDS_DOT_BF16"),
}
_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_LIMIT_S = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    """A build, not yet done. name: of what is built. sources: its folder. key: of the library's contents.
    source_hash: of the C++ alone, for the numerics id."""

    name: str
    sources: Path
    compiler: tuple[str, ...]
    flags: tuple[str, ...]
    key: str
    source_hash: str


def chosen_isa(cpu: str, environ: Mapping[str, str] = os.environ) -> str:
    """ "avx2", "avx512" or "avx512-dot" (bfloat16 pair products). cpu: vendor and flags, as in /proc/cpuinfo.

    The best for the CPU, unless PDSERVE_KERNEL_ISA names one; avx2 too when torch and oneDNN are both held to
    it. Raises ConfigError for an unknown name.
    """
    named = environ.get("PDSERVE_KERNEL_ISA", "")
    if named and named not in _ISA_FLAGS:
        raise ConfigError(f"PDSERVE_KERNEL_ISA is {named!r}; it can be {', '.join(_ISA_FLAGS)}")
    held = environ.get("ATEN_CPU_CAPABILITY") == "avx2" and environ.get("ONEDNN_MAX_CPU_ISA") == "AVX2"
    words = set(cpu.split())
    if named or held or not words >= _AVX512:
        return named or "avx2"
    # On Intel, VDPBF16PS does half the work of widening and two FMAs in the same time (measured); not on AMD.
    return "avx512-dot" if words >= {"avx512_bf16", "AuthenticAMD"} else "avx512"


def has_byte_products(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the kernels that would be built here multiply bytes without widening them (VPDPBUSD).

    Raises ConfigError for a machine that there are no kernels for.
    """
    cpu = _cpu()
    return chosen_isa(cpu, environ) != "avx2" and "avx512_vnni" in cpu.split()


def built(sources: Path = _SOURCES, name: str = "kernels") -> Path:
    """Path of the library of a folder's C++: one compiled before, or else built here and kept.

    Raises ConfigError as `plan_build` and `ensure_built` do.
    """
    return found_before(sources, name) or ensure_built(plan_build(sources, name))


def found_before(sources: Path = _SOURCES, name: str = "kernels") -> Path | None:
    """The best library for this CPU that was compiled before, as it was then; None if there is none."""
    if not prebuilt.FOLDER.is_dir():
        return None
    cpu = _cpu()
    source = source_hash(sources)
    for target in prebuilt.candidates(chosen_isa(cpu), cpu):
        library = prebuilt.FOLDER / prebuilt.file_name(name, target, source)
        if _is_as_built(library):
            return library
    return None


def build_for(name: str, sources: Path, target: prebuilt.Target, folder: Path) -> Path:
    """Compiles a library for other machines of one kind. Raises ConfigError if it does not compile."""
    source = source_hash(sources)
    flags = (*_FLAGS, *target.flags)
    library = folder / prebuilt.file_name(name, target, source)
    plan = BuildPlan(
        name=name, sources=sources, compiler=find_compiler(), flags=flags, key="", source_hash=source
    )
    _build(plan, library, f"for {target.name}")
    return library


def source_hash(sources: Path = _SOURCES) -> str:
    """Of a folder's C++ alone."""
    return _source_digest(sources).hex()[:12]


def _source_digest(sources: Path) -> bytes:
    digest = hashlib.sha256()
    for path in sorted(sources.iterdir()):
        if path.suffix in (".cpp", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.digest()


def plan_build(sources: Path = _SOURCES, name: str = "kernels") -> BuildPlan:
    """What would be built here of a folder's C++. Raises ConfigError without a compiler or AVX2."""
    cpu = _cpu()
    compiler = find_compiler()
    flags = (*_FLAGS, *_ISA_FLAGS[chosen_isa(cpu)])
    source = _source_digest(sources)
    version = _run((*compiler, "--version")).splitlines()[0]
    key = hashlib.sha256(source)
    for part in (*compiler, *flags, version, *sorted(set(cpu.split()))):
        key.update(part.encode() + b"\0")
    return BuildPlan(
        name=name,
        sources=sources,
        compiler=compiler,
        flags=flags,
        key=key.hexdigest()[:24],
        source_hash=source.hex()[:12],
    )


def ensure_built(plan: BuildPlan) -> Path:
    """Path of the library, built first if the cache lacks it, or has another file in its place.

    Raises ConfigError if it does not compile, or the cache folder is not this user's.
    """
    folder = _cache_folder()
    target = folder / f"{plan.name}-{plan.key}.so"
    if _is_as_built(target):
        return target
    with open(folder / f"{plan.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_as_built(target):
            _build(plan, target)
    return target


def _digest_beside(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _is_as_built(library: Path) -> bool:
    """Whether the library is there, with the digest that was noted when it was built."""
    try:
        noted = _digest_beside(library).read_text().strip()
        return hashlib.sha256(library.read_bytes()).hexdigest() == noted
    except (OSError, UnicodeDecodeError):
        return False


def _build(plan: BuildPlan, target: Path, what: str = "(once per machine)") -> None:
    print(f"building CPU {plan.name} {what}…", end="", file=sys.stderr, flush=True)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        sources = sorted(plan.sources.glob("*.cpp"))
        objects = [str(Path(scratch) / f"{source.stem}.o") for source in sources]
        compile_one = (*plan.compiler, *plan.flags, "-c")
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            jobs = [(*compile_one, str(s), "-o", o) for s, o in zip(sources, objects, strict=True)]
            list(pool.map(_run, jobs))
        library = str(Path(scratch) / f"{plan.name}.so")
        _run((*plan.compiler, "-shared", "-pthread", *objects, "-o", library))
        digest = Path(scratch) / "digest"
        digest.write_text(hashlib.sha256(Path(library).read_bytes()).hexdigest() + "\n")
        os.replace(digest, _digest_beside(target))
        os.replace(library, target)
    print(f" done in {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)


def _cache_folder() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "pdserve"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
        if found.st_uid == os.geteuid() and found.st_mode & 0o077:
            folder.chmod(0o700)
    except OSError:
        raise ConfigError("the cache folder can not be made; set XDG_CACHE_HOME to a writable one") from None
    if found.st_uid != os.geteuid():
        raise ConfigError(
            "the cache folder is another user's, and code in it would run here; set XDG_CACHE_HOME"
        )
    return folder


def _cpu() -> str:
    """Vendor and flags of the first processor."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise ConfigError("the CPU kernels need Linux on x86-64")
    with open("/proc/cpuinfo") as cpuinfo:
        first = cpuinfo.read().partition("\n\n")[0].splitlines()
    cpu = " ".join(line.partition(":")[2] for line in first if line.startswith(("vendor_id", "flags")))
    if not {"avx2", "fma"} <= set(cpu.split()):
        raise ConfigError("the CPU kernels need a CPU with AVX2 and FMA")
    return cpu


def find_compiler() -> tuple[str, ...]:
    """The command of a C++ compiler. Raises ConfigError where there is none."""
    named = os.environ.get("CXX", "").split()
    for words in (named,) if named else (["c++"], ["g++"], ["clang++"]):
        path = shutil.which(words[0])
        if path is not None:
            return (path, *words[1:])
    raise ConfigError("a C++ compiler is needed to build the CPU kernels; install g++, or set CXX to one")


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, check=False, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"our C++ did not compile within {_LIMIT_S:g} s") from None
    if done.returncode:
        print(f"\n{done.stderr[-4000:]}", file=sys.stderr)
        raise ConfigError("our C++ did not compile (the compiler's words are above); use g++ 11+")
    return done.stdout
