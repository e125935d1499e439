"""Settings of a fleet as a part of its own: the Ray cluster it joins, its name there, routers, its port."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pdserve.config.addresses import check_router
from pdserve.config.fields import setting
from pdserve.config.telemetry import TelemetrySettings
from pdserve.errors import ConfigError

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings(TelemetrySettings):
    """Base of ServeConfig: what `pdserve fleet` (and `pdserve up` on a cluster) needs beside the engine's."""

    ray_address: str = setting(
        "",
        help="Ray cluster to join: host:port where a Ray node runs on this machine, ray://host:port from "
        "anywhere; empty: start a local one.",
    )
    fleet_name: str = setting(
        "",
        help="Name of this fleet where a cluster runs several; its workers are called after it. Letters, "
        "digits and hyphens, as a Kubernetes pod's name.",
    )
    exclusive_nodes: bool = setting(
        False,
        help="Each worker has a Ray node of its own, one that offers the resource pdserve_ROLE; without such "
        "a node it waits for one.",
    )
    routers: tuple[str, ...] = setting(
        (),
        help="host:port of routers that run elsewhere, or dns+host:port for every address behind a name, "
        "asked again every few seconds; for `pdserve fleet` alone.",
    )
    fleet_port: int | None = setting(
        None,
        help="HTTP port for the fleet's /metrics, /readyz and /livez, on the address `host`; 0: any free "
        "one, which no router lists for Prometheus; unset: none.",
        minimum=0,
        maximum=65535,
    )
    secret_file: str = setting(
        "", help="File with the fleet secret in hex; empty: a new one, or PDSERVE_FLEET_SECRET for the parts."
    )
    start_timeout_s: float = setting(
        300.0, help="How long workers may take until they serve.", unit="seconds", minimum=1
    )
    drain_timeout_s: float = setting(
        30.0, help="How long running requests may take to finish at shutdown.", unit="seconds", minimum=0
    )

    def check_fleet(self) -> None:
        """Raises ConfigError naming the first of these settings that can not be used."""
        if self.fleet_name and not _NAME.fullmatch(self.fleet_name):
            raise ConfigError("fleet_name: must be lower-case letters, digits and hyphens, at most 63")
        for entry in self.routers:
            check_router(entry)
