"""Where workers can run. Clients and the router have fewer needs and are not asked."""

from __future__ import annotations

import platform

from pdserve.errors import ConfigError

MACHINES = ("x86_64", "aarch64")


def require_transport(name: str) -> None:
    """Raises ConfigError if this installation can't move pages so: before Ray and workers are started."""
    if name == "nixl":
        from kvtransfer.nixl.agent import require

        require()


def require_platform(system: str = "", machine: str = "") -> None:
    """Raises ConfigError with a sentence where workers can not run; empty arguments mean this machine."""
    system, machine = system or platform.system(), machine or platform.machine()
    if system != "Linux" or machine not in MACHINES:
        raise ConfigError(f"workers run on Linux on x86_64 or aarch64; this is {system} on {machine}")
