"""What `pdserve doctor` looks at: one function a subject, each with what it found and what to do about it.

Nothing here starts, changes or connects to anything beyond this machine. Printing is `doctor`.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path

import psutil

from pdserve.cli.platforms import MACHINES
from pdserve.errors import ConfigError, PdserveError

GIB = 2**30
NEEDED_BYTES = 4 * GIB
"""What `make serve` takes with the default model, its two page pools included."""
MANY_FILES = 4096
PORTS = {50051: "gRPC", 8000: "HTTP", 9464: "metrics"}
_NEWEST = {"torch": (2, 11), "ray": (2, 55), "grpcio": (1, 80)}
_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8")


class Verdict(StrEnum):
    """fail: it will not serve. warn: it serves, less well than it could, or not everything. note: a fact."""

    OK = "ok"
    NOTE = "note"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """subject: what was looked at. found: in words. advice: what to do; empty where nothing is to be done."""

    subject: str
    verdict: Verdict
    found: str
    advice: str = ""


def check(subject: str, good: bool, found: str, advice: str, bad: Verdict = Verdict.WARN) -> Check:
    """A check that is fine or not; the advice is for when it is not."""
    return Check(
        subject=subject,
        verdict=Verdict.OK if good else bad,
        found=found,
        advice="" if good else advice,
    )


def system() -> Check:
    """Operating system, machine and Python."""
    name = f"{platform.system()} {platform.release()} on {platform.machine()}"
    found = f"{name}, Python {platform.python_version()}"
    right = platform.system() == "Linux" and platform.machine() in MACHINES
    python = platform.python_version_tuple()[:2] in (("3", "11"), ("3", "12"))
    advice = "workers need Linux on x86-64 or arm64, and Python 3.11 or 3.12"
    return check("system", right and python, found, advice, Verdict.FAIL)


def cpu(info: str | None = None, machine: str = "") -> Check:
    """Vector units that the kernels use. info: as in /proc/cpuinfo. machine: as `platform` names it."""
    if (machine or platform.machine()) == "aarch64":
        advice = "the CPU kernels are for x86-64; without them it serves, slower"
        return check("cpu", False, "arm64", advice, Verdict.NOTE)
    text = Path("/proc/cpuinfo").read_text() if info is None else info
    name = re.search(r"^model name\s*:\s*(.+)", text, re.MULTILINE)
    words = re.search(r"^flags\s*:\s*(.+)", text, re.MULTILINE)
    flags = set(words[1].split()) if words else set()
    have = [feature for feature in _FEATURES if feature in flags]
    found = f"{name[1].strip() if name else 'unknown'}: {', '.join(have) or 'no vector units we know'}"
    if "avx2" not in flags:
        return check("cpu", False, found, "the CPU kernels need AVX2: serve on another machine", Verdict.FAIL)
    advice = "without AVX-512 VNNI --precision fast takes exact weights; all else works"
    return check("cpu", "avx512_vnni" in flags, found, advice, Verdict.NOTE)


def cores() -> Check:
    """Cores that we may use, and what the container's quota leaves of them."""
    count, quota = len(os.sched_getaffinity(0)), _cpu_quota()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    found = f"{count} cores" + (f", a quota of {quota:g}" if quota else "")
    if quota and quota < count:
        advice = f"more threads than the quota stall each other: pass --threads {max(1, int(quota))}"
        return check("cores", False, found, advice)
    if threads and int(threads or 0) != count:
        return check("cores", True, f"{found}; OMP_NUM_THREADS is {threads}, workers set their own", "")
    return check("cores", count >= 2, found, "with one core the two phases wait for each other")


def _cpu_quota() -> float | None:
    """Cores by the container's quota (cgroup v2); None for none."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None


def memory() -> Check:
    """Memory that is left, by the machine and by the container."""
    left = psutil.virtual_memory().available
    limit = _memory_limit()
    found = f"{left / GIB:.1f} GiB available" + (f", container limit {limit / GIB:.1f} GiB" if limit else "")
    advice = "the default model and two page pools take some 4 GiB: pass a smaller --kv-memory"
    return check("memory", min(left, limit or left) >= NEEDED_BYTES, found, advice)


def _memory_limit() -> int | None:
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        return None if text == "max" else int(text)
    except (OSError, ValueError):
        return None


def shared_memory() -> Check:
    """How page pools are shared on one machine: memory files, or /dev/shm in their place."""
    try:
        os.close(os.memfd_create("pdserve-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        return check("shared memory", True, "memory files work", "")
    except OSError:
        free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0  # noqa: S108
        found = f"no memory files, {free / GIB:.1f} GiB in /dev/shm"
        advice = "page pools lie in /dev/shm then: make it larger than they are (docker: --shm-size=4g)"
        return check("shared memory", free >= GIB, found, advice)


def limits() -> Iterator[Check]:
    """Of open files, and of locked memory for RDMA."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = f"each stream takes one: ulimit -n {min(hard, 65536) if hard > 0 else 65536}"
    yield check("open files", soft < 0 or soft >= MANY_FILES, f"limit {soft}", advice)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "no limit" if locked < 0 else f"limit {locked // 1024} KiB"
    advice = "only RDMA locks memory: for it set the limit to unlimited (ulimit -l)"
    yield check("locked memory", locked < 0, shown, advice, Verdict.NOTE)


def ports() -> Iterator[Check]:
    """The default ports on loopback."""
    for port, what in PORTS.items():
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                taken = False
            except OSError as error:
                taken = error.errno == errno.EADDRINUSE
        advice = f"is pdserve running already? else choose another port for {what}"
        yield check(f"port {port} ({what})", not taken, "in use" if taken else "free", advice, Verdict.NOTE)


def ray_ports() -> Check:
    """Ray binds every interface; its token is what closes its ports."""
    listening = sorted({
        port
        for process in psutil.process_iter(["name"])
        if process.info["name"] in ("raylet", "gcs_server")
        for port in _open_to_all(process)
    })  # fmt: skip
    if not listening:
        return Check(subject="ray's ports", verdict=Verdict.OK, found="no Ray listens beyond this machine")
    found = f"Ray listens on all interfaces: {', '.join(map(str, listening))}"
    advice = "close them: RAY_AUTH_MODE=token (pdserve sets it for a Ray that it starts), and a firewall"
    return check("ray's ports", os.environ.get("RAY_AUTH_MODE") == "token", found, advice, Verdict.NOTE)


def _open_to_all(process: psutil.Process) -> Iterator[int]:
    try:
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.ip in ("0.0.0.0", "::"):  # noqa: S104
                yield connection.laddr.port
    except psutil.Error:
        return


def compiler() -> Check:
    """What builds the CPU kernels at the first start, and where they are kept."""
    from pdserve.kernels.build import find_compiler, found_before

    try:
        if found_before() is not None:
            return check("compiler", True, "none is needed: the kernels were compiled before", "")
        command = find_compiler()
    except ConfigError as error:
        return check("compiler", False, "none", error.message, Verdict.FAIL)
    return check("compiler", True, " ".join(command), "")


def packages() -> Iterator[Check]:
    """Those whose version matters."""
    for name, oldest in _NEWEST.items():
        wanted = ".".join(map(str, oldest))
        try:
            found = installed(name)
        except PackageNotFoundError:
            advice = "workers need it: pip install 'pdserve[worker]'"
            yield check(name, False, "not installed", advice, Verdict.FAIL)
            continue
        numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
        yield check(name, numbers >= oldest, found, f"at least {wanted} is needed", Verdict.FAIL)


def gpu() -> Check:
    """GPUs that the driver knows. Serving is on the CPU so far; kernels for GPUs are there to measure."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Check(subject="gpu", verdict=Verdict.NOTE, found="none (none is needed)")
    asked = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True)  # noqa: S603
        return Check(subject="gpu", verdict=Verdict.NOTE, found="; ".join(done.stdout.strip().splitlines()))
    except (OSError, subprocess.SubprocessError):
        return check("gpu", False, "the driver does not answer", "see what nvidia-smi says")


def nixl() -> Check:
    """The transport for RDMA."""
    from kvtransfer.nixl.agent import available

    if available():
        return Check(subject="nixl", verdict=Verdict.OK, found="installed (--transport nixl)")
    found = "not installed (only --transport nixl needs it)"
    return Check(subject="nixl", verdict=Verdict.NOTE, found=found)


def default_model() -> Check:
    """Whether `pdserve up` has something to serve without --model."""
    from pdserve.config.serve import DEFAULT_MODEL
    from pdserve.models.registry import locate

    try:
        locate(DEFAULT_MODEL)
    except PdserveError as error:
        return check("default model", False, "not there", error.message)
    return check("default model", True, DEFAULT_MODEL, "")


CHECKS: tuple[Callable[[], Check | Iterator[Check]], ...] = (
    system, cpu, cores, memory, shared_memory, limits, ports, compiler, packages, ray_ports, gpu, nixl,
    default_model,
)  # fmt: skip
