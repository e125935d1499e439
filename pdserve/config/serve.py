"""Settings of `pdserve up`: one machine's (or one cluster's) workers, their engine, and the front door."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

from pdserve.config.addresses import is_loopback
from pdserve.config.fields import setting
from pdserve.config.fleet import FleetSettings
from pdserve.config.precision import (
    EXACT,
    FAST,
    KV_MIXING,
    PRECISIONS,
    STRICT,
    WEIGHTS,
    CpuFacts,
    ModelFacts,
    Wish,
    choose,
    mixing,
)  # fmt: skip
from pdserve.config.telemetry import TelemetrySettings
from pdserve.config.tls import tls_files
from pdserve.config.worker import (
    DTYPES,
    INT8,
    KV_DTYPES,
    MAX_TP,
    NO_INT8_RANKS,
    NO_NIXL,
    NO_QUANTISED_RANKS,
    RANK_ATTENTION,
    RANK_EXCHANGES,
    TRANSPORTS,
    WorkerConfig,
    page_dtype,
)
from pdserve.errors import ConfigError
from pdserve.types import Role

DEFAULT_MODEL = "smollm2-135m-instruct"
NODE_HOST = "node"
"""Stands for the address of the Ray node a worker lands on; the actor fills it in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(FleetSettings):
    """What an operator may set. `resolved()` turns every "auto" into a value, but for weights that workers
    choose themselves (precision fast): they know their CPU and the model."""

    model: str = setting(DEFAULT_MODEL, help="Registered name, Hugging Face directory, or GGUF file.")
    prefill: int | None = setting(
        None, help="Prefill workers. Auto: 1, or 0 with aggregated workers.", unit="workers", minimum=0
    )
    decode: int | None = setting(
        None, help="Decode workers. Auto: 1, or 0 with aggregated workers.", unit="workers", minimum=0
    )
    aggregated: int = setting(
        0, help="Workers that do both phases themselves (the baseline).", unit="workers", minimum=0
    )
    prefill_tp: int = setting(
        1, help="Tensor-parallel ranks of each prefill worker.", unit="ranks", minimum=1, maximum=MAX_TP
    )
    decode_tp: int = setting(
        1, help="Tensor-parallel ranks of each decode worker.", unit="ranks", minimum=1, maximum=MAX_TP
    )
    aggregated_tp: int = setting(
        1, help="Tensor-parallel ranks of each aggregated worker.", unit="ranks", minimum=1, maximum=MAX_TP
    )
    prefill_experts: str = setting(
        "", help="Where the ranks of prefill workers hold experts: file of pdserve experts --save."
    )
    decode_experts: str = setting("", help="The same for decode workers.")
    aggregated_experts: str = setting("", help="The same for aggregated workers.")
    expert_slots: int = setting(
        0,
        help="Room for experts of a layer on each rank where no placement is given; 0: as many as needed. "
        "What is over is for replicas.",
        unit="experts",
        minimum=0,
    )
    rebalance_gain: float = setting(
        0.1,
        help="Part of the fullest ranks' load that a new placement of experts must save before a worker of "
        "several ranks moves them by itself; 0: only when asked.",
        minimum=0,
        maximum=1,
    )
    rank_exchange: str = setting(
        "shm", help="How the ranks of a worker exchange tensors: memory, or sockets.", choices=RANK_EXCHANGES
    )
    rank_attention: str = setting(
        "divided",
        help="How the ranks of a worker share attention: divided by heads; repeated: each computes all of it "
        "and they divide experts alone, so that it goes on without a lost rank whose experts have replicas; "
        "rows: each computes sequences of its own and holds their pages alone.",
        choices=RANK_ATTENTION,
    )
    dtype: str = setting("bfloat16", help="Number type of weights and activations.", choices=DTYPES)
    kv_dtype: str | None = setting(
        None,
        help="Number type of KV pages: dtype, or int8 with a scale by token and head. Auto: by precision.",
        choices=KV_DTYPES,
    )
    precision: str = setting(
        EXACT,
        help="exact: the model's own numbers; fast: 8 or 4 bits where they suit role, CPU and model.",
        choices=PRECISIONS,
    )
    prefill_weights: str | None = setting(
        None,
        help="Form of the linear layers' weights in prefill workers: exact, or 8 or 4 bits (inputs: 8). "
        "Auto: by precision.",
        choices=WEIGHTS,
    )
    decode_weights: str | None = setting(None, help="The same for decode workers.", choices=WEIGHTS)
    aggregated_weights: str | None = setting(None, help="The same for aggregated workers.", choices=WEIGHTS)
    deterministic: bool = setting(
        False, help="Results do not depend on what runs beside a request, bit for bit (slower)."
    )
    page_size: int = setting(16, help="Tokens in one KV page.", unit="tokens", minimum=1, maximum=1024)
    prefill_page_size: int | None = setting(
        None, help="The same for prefill workers. Auto: page_size.", unit="tokens", minimum=1, maximum=1024
    )
    decode_page_size: int | None = setting(
        None, help="The same for decode workers. Auto: page_size.", unit="tokens", minimum=1, maximum=1024
    )
    local_prefill_threshold: int = setting(
        0,
        help="A prompt with fewer uncached tokens than this is prefilled on the decode worker; 0: never.",
        unit="tokens",
        minimum=0,
    )
    transport: str = setting(
        "shm",
        help="How KV pages move: shm (tcp between machines), tcp, or nixl (needs the extra nixl).",
        choices=TRANSPORTS,
    )
    kv_memory: int = setting(
        2**30, help="Memory of each worker's page pool, over its ranks.", unit="bytes", minimum=2**20
    )
    prefill_chunk_tokens: int = setting(
        512, help="Prompt tokens computed at once for one request.", unit="tokens", minimum=1
    )
    token_budget: int | None = setting(
        None,
        help="Tokens computed in one step over all requests. Auto: twice prefill_chunk_tokens.",
        unit="tokens",
        minimum=1,
    )
    max_num_seqs: int = setting(
        64, help="Requests a worker runs at the same time.", unit="requests", minimum=1
    )
    prefix_caching: bool = setting(True, help="Keep prompt pages for later requests with the same prefix.")
    kv_mixing: str | None = setting(
        None,
        help="Whether pages computed by other numerics may be used. Auto: relaxed where prefill and decode "
        "workers have, or may choose, different weights.",
        choices=KV_MIXING,
    )
    threads: int | None = setting(
        None,
        help="Compute threads of each worker, over its ranks. Auto: the CPUs we may use.",
        unit="threads",
        minimum=1,
    )
    prefill_nice: int = setting(
        10,
        help="Nice value of prefill workers, so that they give way to decode on the same cores.",
        minimum=0,
        maximum=19,
    )
    host: str = setting(
        "127.0.0.1",
        help="Address of the router, or of the fleet's port; others than loopback need TLS or insecure.",
    )
    port: int = setting(50051, help="gRPC port of the router; 0: any free one.", minimum=0, maximum=65535)
    metrics_port: int = setting(
        9464, help="Port of the router's Prometheus metrics; 0: any free one.", minimum=0, maximum=65535
    )
    worker_metrics_port: int | None = setting(
        0,
        help="Port of each worker's Prometheus metrics, which routers list for Prometheus; 0: any free one; "
        "auto: none.",
        minimum=0,
        maximum=65535,
    )
    http: bool | None = setting(None, help="Serve the OpenAI-compatible HTTP API. Auto: if it is installed.")
    http_port: int = setting(8000, help="Port of the HTTP API; 0: any free one.", minimum=0, maximum=65535)
    served_model_name: tuple[str, ...] = setting((), help="Names for HTTP clients beside the model's own.")
    max_model_len: int | None = setting(None, help="Bound on prompt and completion together.", minimum=2)
    insecure: bool = setting(
        False, help="Allow listeners beyond loopback without TLS. Anyone who reaches them may use them."
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
    api_key_file: str = setting(
        "", help="File of pdserve keys: clients must show one of its keys. Read again when it changes."
    )
    api_key: str = setting(
        "",
        help="One key that every client must show, where there is no key file. As a variable others on the "
        "machine do not see it; client commands show the same one.",
        secret=True,
    )
    decode_pace_s: float = setting(
        0.04,
        help="Least time between decode steps while a prefill worker on the same machine computes a prompt "
        "for the same decode worker; up to twice that with many prompts; 0: none. "
        "More throughput for a longer inter-token latency meanwhile.",
        unit="seconds",
        minimum=0,
        maximum=10,
    )
    vllm_port: int | None = setting(
        None,
        help="Port on which gateways drive a decode or aggregated worker alone by vLLM's contract, "
        "vllm.grpc.engine.VllmEngine; for several such workers on one machine 0, any free one; unset: none.",
        minimum=0,
        maximum=65535,
    )
    lease_s: float = setting(10.0, help="Lease on transfers and reservations.", unit="seconds", minimum=0.1)

    def resolved(self, *, part: bool = False) -> ServeConfig:
        """A copy without "auto", but for weights with precision fast. part: prefill or decode workers may be
        alone, others have the rest; naming one means none of the other. Raises ConfigError for settings that
        do not go together."""
        share = 0 if self.aggregated or (part and (self.prefill or self.decode)) else 1
        usual = None if self.precision == FAST else EXACT
        forms = (self.prefill_weights or usual, self.decode_weights or usual)
        prefill = share if self.prefill is None else self.prefill
        decode = share if self.decode is None else self.decode
        config = dataclasses.replace(
            self,
            prefill_weights=forms[0],
            decode_weights=forms[1],
            aggregated_weights=self.aggregated_weights or usual,
            kv_mixing=mixing(self.kv_mixing, *forms) if prefill or decode else self.kv_mixing or STRICT,
            prefill=prefill,
            decode=decode,
            token_budget=self.token_budget or 2 * self.prefill_chunk_tokens,
            threads=self.threads or len(os.sched_getaffinity(0)),
        )
        config = dataclasses.replace(config, kv_dtype=config._common_pages())
        config.check(part=part)
        return config

    def _common_pages(self) -> str | None:
        """kv_dtype; workers must not choose one each where they can not all have the same of 8 bits."""
        sizes = {self._page_size(role) for role in self._roles()}
        alike = len(sizes) == 1 and all(self.ranks(role) == 1 for role in self._roles())
        return self.kv_dtype if alike or self.precision == EXACT else self.kv_dtype or self.dtype

    def _roles(self) -> tuple[Role, ...]:
        """Roles whose workers have to go together, those of other parts included."""
        pair = (Role.PREFILL, Role.DECODE) if self.prefill or self.decode else ()
        return (*pair, Role.AGGREGATED) if self.aggregated else pair

    def check(self, *, part: bool = False) -> None:
        """Raises ConfigError naming the first field that does not go with the others. part: see resolved."""
        tls_files(self)
        self.check_fleet()
        if bool(self.prefill) != bool(self.decode) and not part:
            raise ConfigError("prefill: prefill and decode workers need each other; give both or neither")
        if not self._roles():
            raise ConfigError("aggregated: no workers at all; give prefill and decode, or aggregated")
        if self.transport == "nixl" and max(self.prefill_tp, self.decode_tp) > 1:
            raise ConfigError(f"transport: {NO_NIXL}")
        for role in self._roles():
            if self.ranks(role) > 1 and self._weights(role) not in (None, EXACT):
                raise ConfigError(f"{role}_weights: {NO_QUANTISED_RANKS}")
        self._check_pages()
        if Role.PREFILL in self._roles() and self._unlike_weights() and self.kv_mixing == STRICT:
            raise ConfigError(
                "kv_mixing: prefill and decode workers with different weights compute different pages; "
                "allow it with relaxed, or give both the same"
            )
        if not (self.insecure or self.tls_ca or is_loopback(self.host)):
            raise ConfigError(
                "host: an address beyond loopback needs TLS: give --tls-ca, --tls-cert and --tls-key, "
                "or --insecure if everyone who can reach it may use it"
            )

    def _unlike_weights(self) -> bool:
        """Whether prefill and decode workers are sure to compute in different forms, whatever the model."""
        forms = {choose(self.wish(r), ModelFacts(), CpuFacts()).weights for r in (Role.PREFILL, Role.DECODE)}
        return self.prefill_weights != self.decode_weights or len(forms) > 1

    def _check_pages(self) -> None:
        if page_dtype(self.kv_dtype, self.dtype) != INT8:
            return
        if any(self.ranks(role) > 1 for role in self._roles()):
            raise ConfigError(f"kv_dtype: {NO_INT8_RANKS}")
        if Role.PREFILL in self._roles() and self._page_size(Role.PREFILL) != self._page_size(Role.DECODE):
            raise ConfigError(
                "kv_dtype: pages in int8 are taken as they are; give prefill and decode one page size, "
                "or pages of the model's type"
            )

    def wanted(self) -> dict[Role, int]:
        """Workers by role, of a resolved configuration."""
        counts = {
            Role.PREFILL: self.prefill or 0,
            Role.DECODE: self.decode or 0,
            Role.AGGREGATED: self.aggregated,
        }
        return {role: count for role, count in counts.items() if count}

    def ranks(self, role: Role) -> int:
        """Tensor-parallel ranks of each worker of a role."""
        return {
            Role.PREFILL: self.prefill_tp,
            Role.DECODE: self.decode_tp,
            Role.AGGREGATED: self.aggregated_tp,
        }[role]

    def wish(self, role: Role) -> Wish:
        """What a worker of a role chooses its form by; of a resolved configuration."""
        return Wish(
            role=role, precision=self.precision, weights=self._weights(role),
            kv_mixing=self.kv_mixing or STRICT, ranks=self.ranks(role),
        )  # fmt: skip

    def _weights(self, role: Role) -> str | None:
        return {
            Role.PREFILL: self.prefill_weights,
            Role.DECODE: self.decode_weights,
            Role.AGGREGATED: self.aggregated_weights,
        }[role]

    def _page_size(self, role: Role) -> int:
        own = {Role.PREFILL: self.prefill_page_size, Role.DECODE: self.decode_page_size}
        return own.get(role) or self.page_size

    def _experts(self, role: Role) -> str:
        """The file with the placement of a role's experts; the workers run elsewhere than we."""
        file = {
            Role.PREFILL: self.prefill_experts,
            Role.DECODE: self.decode_experts,
            Role.AGGREGATED: self.aggregated_experts,
        }[role]
        return os.path.abspath(file) if file else ""

    def worker(self, role: Role, *, secret: str, routers: tuple[str, ...], run_dir: str) -> WorkerConfig:
        """The configuration all workers of a role share; the fleet gives each its own worker_id."""
        transports = ("shm", "tcp") if self.transport == "shm" else (self.transport,)
        return WorkerConfig(
            worker_id=str(role),
            role=role,
            model=self.model,
            fleet_secret=secret,
            dtype=self.dtype,
            precision=self.precision,
            kv_dtype=self.kv_dtype,
            weights=self._weights(role),
            deterministic=self.deterministic,
            page_size=self._page_size(role),
            kv_memory_bytes=self.kv_memory,
            prefill_chunk_tokens=self.prefill_chunk_tokens,
            token_budget=self.token_budget or 2 * self.prefill_chunk_tokens,
            max_num_seqs=self.max_num_seqs,
            local_prefill_threshold=self.local_prefill_threshold,
            prefix_caching=self.prefix_caching,
            transports=transports,
            kv_mixing=self.kv_mixing,
            host=NODE_HOST if self.ray_address and (self.insecure or self.tls_ca) else "127.0.0.1",
            tls_ca=self.tls_ca,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            tls_server_name=self.tls_server_name,
            routers=routers,
            run_dir=run_dir,
            threads=self.threads or 1,
            tp=self.ranks(role),
            expert_placement=self._experts(role),
            expert_slots=self.expert_slots,
            rebalance_gain=self.rebalance_gain,
            rank_attention=self.rank_attention,
            rank_exchange=self.rank_exchange,
            nice=self.prefill_nice if role is Role.PREFILL else 0,
            decode_pace_s=self.decode_pace_s,
            lease_s=self.lease_s,
            vllm_port=self.vllm_port,
            metrics_port=self.worker_metrics_port,
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(TelemetrySettings)},
        )
