"""Settings of a router."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from kvtransfer.ticket import MIN_SECRET_BYTES
from pdserve.chat.formats import FORMATS
from pdserve.config.fields import setting
from pdserve.config.precision import KV_MIXING
from pdserve.config.telemetry import TelemetrySettings
from pdserve.config.tls import tls_files
from pdserve.errors import ConfigError

_ADDRESS = re.compile(r"[A-Za-z0-9_.:\[\]-]+:[0-9]{1,5}")
SECRET_VARIABLE = "PDSERVE_FLEET_SECRET"  # noqa: S105 - the name of a variable


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(TelemetrySettings):
    """What a router needs to know. Raises ConfigError for values that do not go together."""

    host: str = setting("127.0.0.1", help="Address to listen on; others than loopback need TLS or insecure.")
    port: int = setting(
        50051, help="gRPC port for clients and workers; 0: any free one.", minimum=0, maximum=65535
    )
    metrics_port: int = setting(
        9464,
        help="Port of the Prometheus metrics, on the same host; 0: any free one.",
        minimum=0,
        maximum=65535,
    )
    metrics: bool = setting(True, help="Serve Prometheus metrics.")
    http: bool | None = setting(
        None, help="Serve the OpenAI-compatible HTTP API. Auto: where the extra http is installed."
    )
    http_port: int = setting(
        8000, help="Port of the HTTP API, on the same host; 0: any free one.", minimum=0, maximum=65535
    )
    served_model_name: tuple[str, ...] = setting(
        (), help="Names that HTTP requests may ask for beside the model's own; the first is shown."
    )
    max_model_len: int | None = setting(
        None, help="Bound on prompt and completion together. Auto: the model's context.",
        unit="tokens", minimum=2,
    )  # fmt: skip
    insecure: bool = setting(
        False,
        help="Allow listeners and workers beyond loopback without TLS. Anyone who reaches them may use them.",
    )
    tls_ca: str = setting(
        "", help="PEM file of the authorities whose certificates we accept; with it all connections use TLS."
    )
    tls_cert: str = setting("", help="PEM file of our certificate, with its chain, for serving and dialling.")
    tls_key: str = setting("", help="PEM file of its private key; readable by its user alone.")
    tls_server_name: str = setting(
        "",
        help="Name that the certificates of peers must have, in place of the host dialled; empty: the host.",
    )
    reflection: bool = setting(False, help="Serve gRPC reflection.")
    protocols: tuple[str, ...] = setting(
        (),
        help="Contracts of others to speak on the gRPC port too, with commas between: oip is the Open "
        "Inference Protocol v2, vllm is vllm.grpc.engine.VllmEngine.",
        choices=("oip", "vllm"),
    )
    api_key_file: str = setting(
        "", help="File of pdserve keys: whoever calls must show one of its keys. Read again when it changes."
    )
    api_key: str = setting(
        "",
        help="One key that every caller must show, for a simple start; better given as a variable than as a "
        "flag, which others on the machine can see.",
        secret=True,
    )
    jwt_issuer: str = setting(
        "", help="Take JSON Web Tokens of this issuer; needs the extra jwt, an audience and a JWKS file."
    )
    jwt_audience: str = setting("", help="What the tokens' aud must name.")
    jwt_jwks_file: str = setting(
        "",
        help="File with the issuer's public keys (JWKS). Nothing is fetched; it is read again when changed.",
    )
    jwt_tenant_claim: str = setting("tenant", help="The claim whose text is the tenant.")
    jwt_admin_claim: str = setting(
        "",
        help="Admins have this claim as true, or, given as name=word, the word in its list or text of words; "
        "empty: no token is an admin's.",
    )
    auth_failures_per_minute: int = setting(
        300,
        help="Wrong credentials that one address may show in a minute before it has to wait; 0: no bound. "
        "Behind a proxy all clients have its address.",
        minimum=0,
    )
    audit_log: str = setting(
        "", help="File to which calls that change the fleet are appended, as JSON lines; empty: the log."
    )
    fleet_secret: str = setting(
        "", help="Hex of the random bytes all processes of a fleet share.", secret=True, hidden=True
    )
    secret_file: str = setting(
        "", help=f"File with the fleet secret in hex; empty: the variable {SECRET_VARIABLE} is used."
    )
    kv_mixing: str = setting(
        "strict", help="Whether pages computed by other numerics may be used.", choices=KV_MIXING
    )
    tool_format: str = setting(
        "auto",
        help="How the model writes tool calls. auto: as its chat template says; none: tools are refused; "
        "hermes: also for templates without tools, which are told of them in the system message.",
        choices=("auto", "none", *FORMATS),
    )
    local_prefill_threshold: int = setting(
        0, help="A prompt with fewer tokens than this is prefilled on the decode worker; 0: never.",
        unit="tokens", minimum=0,
    )  # fmt: skip
    prefill_backlog_tokens: int = setting(
        16384,
        help="Prompt tokens a prefill worker may have outstanding before it gets no more; 0: no bound.",
        unit="tokens", minimum=0,
    )  # fmt: skip
    max_queue: int = setting(
        512, help="Requests that may wait; more are refused.", unit="requests", minimum=1
    )
    max_queue_tokens: int = setting(
        4_000_000, help="Prompt tokens that may wait; more are refused.", unit="tokens", minimum=1
    )
    max_tenant_share: float = setting(
        1.0,
        help="Part of the queue, in requests and in tokens, that one tenant may take; 1: no such bound.",
        minimum=0,
        maximum=1,
    )
    max_queue_wait_s: float = setting(
        60.0, help="How long a request may wait for its first try.", unit="seconds", minimum=0.1
    )
    suspect_after_s: float = setting(
        4.0, help="A worker silent for this long gets no new work.", unit="seconds", minimum=0.1
    )
    heartbeat_timeout_s: float = setting(
        10.0, help="A worker silent for this long is given up.", unit="seconds", minimum=0.1
    )
    lease_s: float = setting(10.0, help="Lease of protocol.md.", unit="seconds", minimum=0.1)
    drain_timeout_s: float = setting(
        30.0, help="How long running requests may take to finish at shutdown.", unit="seconds", minimum=0
    )

    fleet_metrics: tuple[str, ...] = setting(
        (),
        help="host:port of the metrics of processes that keep workers (their fleet_port), with commas "
        "between: what routers list for Prometheus beside their workers.",
    )
    slo_ttft_s: float = setting(
        2.0,
        help="Objective of metrics: a request's first token comes in this time.",
        unit="seconds",
        minimum=0,
    )
    slo_itl_s: float = setting(
        0.1, help="Objective of metrics: a request's mean gap between tokens.", unit="seconds", minimum=0
    )

    def __post_init__(self) -> None:
        tls_files(self)
        if not all(_ADDRESS.fullmatch(address) for address in self.fleet_metrics):
            raise ConfigError("fleet_metrics: must be host:port, with commas between")
        given = {"jwt_issuer": self.jwt_issuer, "jwt_audience": self.jwt_audience}
        given["jwt_jwks_file"] = self.jwt_jwks_file
        if any(given.values()) and not all(given.values()):
            missing = next(name for name, value in given.items() if not value)
            raise ConfigError(f"{missing}: jwt_issuer, jwt_audience and jwt_jwks_file go together")
        if self.heartbeat_timeout_s < self.suspect_after_s:
            raise ConfigError("heartbeat_timeout_s: must not be below suspect_after_s")

    @property
    def mixing(self) -> Literal["strict", "relaxed"]:
        """kv_mixing as the policy takes it; its choices were checked when it was parsed."""
        return cast("Literal['strict', 'relaxed']", self.kv_mixing)

    def secret_bytes(self, environ: Mapping[str, str] | None = None) -> bytes:
        """The fleet secret: of `fleet_secret`, else of the file, else of the variable.

        Raises ConfigError if there is none, or it is too short or not hex.
        """
        text = self.fleet_secret or self._from_file()
        text = text or (os.environ if environ is None else environ).get(SECRET_VARIABLE, "")
        if not text:
            raise ConfigError(f"secret_file: no fleet secret; give a file with it, or set {SECRET_VARIABLE}")
        try:
            secret = bytes.fromhex(text)
        except ValueError:
            raise ConfigError("the fleet secret must be hex digits") from None
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(f"the fleet secret must have at least {MIN_SECRET_BYTES} bytes")
        return secret

    def _from_file(self) -> str:
        if not self.secret_file:
            return ""
        try:
            return Path(self.secret_file).read_text("ascii").strip()
        except (OSError, UnicodeDecodeError):
            raise ConfigError("secret_file: can not be read") from None
