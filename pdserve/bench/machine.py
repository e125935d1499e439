"""What a number was measured on: the machine and the date. No names of hosts or users."""

from __future__ import annotations

import datetime
import os
import platform
import re
from pathlib import Path
from typing import Any

import psutil


def machine() -> dict[str, Any]:
    """CPU, cores we may use, memory, system, and how busy it was before we started."""
    info = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*:\s*(.+)", info)
    flags = set((re.search(r"^flags\s*:\s*(.+)", info, re.MULTILINE) or ["", ""])[1].split())
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
    return {
        "cpu": model[1].strip() if model else platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "instructions": [flag for flag in wanted if flag in flags],
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def now() -> datetime.datetime:
    """UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0)
