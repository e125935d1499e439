"""What one worker process needs to know. It reaches a Ray actor as JSON, never as a pickled object."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.config.codec import from_json, to_json
from pdserve.config.fields import setting
from pdserve.config.precision import EXACT, FAST, KV_MIXING, PRECISIONS, RELAXED, STRICT, WEIGHTS
from pdserve.config.telemetry import TelemetrySettings
from pdserve.config.tls import tls_files, tls_source
from pdserve.errors import ConfigError
from pdserve.tls import TlsSource
from pdserve.types import Role

DTYPES = ("float32", "bfloat16")
TRANSPORTS = ("shm", "tcp", "nixl")
INT8 = "int8"
KV_DTYPES = (*DTYPES, INT8)
RANK_ATTENTION = ("divided", "repeated", "rows")
RANK_EXCHANGES = ("shm", "gloo")
MAX_TP = 64
NO_QUANTISED_RANKS = "workers of several ranks compute with exact weights; use exact, or one rank"
NO_INT8_RANKS = "workers of several ranks have pages of the model's type; use auto, or one rank"
NO_NIXL = "nixl moves pages of workers with one rank only; use shm or tcp"


def page_dtype(kv_dtype: str | None, dtype: str) -> str:
    """The number type of KV pages for a setting and the model's number type, which None stands for.
    Raises ConfigError for pages that kernels of that type can not use."""
    if kv_dtype not in (None, dtype, INT8):
        raise ConfigError(
            f"kv_dtype: a model in {dtype} can not use pages in {kv_dtype}; use auto or {INT8}, or give dtype"
        )
    return kv_dtype or dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(TelemetrySettings):
    """Configuration of one worker, built by the fleet from the settings of `pdserve up`."""

    worker_id: str = setting(help="Name of the worker, unique in its fleet.")
    role: Role = setting(help="What the worker does.")
    model: str = setting(help="Registered name, Hugging Face directory, or GGUF file.")
    fleet_secret: str = setting(
        "", help="Hex of the 32 random bytes all processes of a fleet share.", secret=True
    )
    dtype: str = setting("bfloat16", help="Number type of weights and activations.", choices=DTYPES)
    kv_dtype: str | None = setting(
        None,
        help="Number type of KV pages: dtype, or int8 with a scale by token and head. Auto: by precision.",
        choices=KV_DTYPES,
    )
    precision: str = setting(
        EXACT, help="exact: the model's own numbers; fast: what suits role and hardware.", choices=PRECISIONS
    )
    weights: str | None = setting(
        None,
        help="Form of the linear layers' weights: the model's own type, or 8 or 4 bits (inputs: 8 bits). "
        "Auto: by precision.",
        choices=WEIGHTS,
    )
    deterministic: bool = setting(False, help="Bit-exact results whatever runs beside a request (slower).")
    page_size: int = setting(16, help="Tokens in one KV page.", unit="tokens", minimum=1, maximum=1024)
    kv_memory_bytes: int = setting(
        2**30, help="Memory of the page pool; num_pages, if set, wins.", unit="bytes", minimum=1
    )
    num_pages: int | None = setting(None, help="Pages in the pool.", unit="pages", minimum=1)
    prefill_chunk_tokens: int = setting(
        512, help="Prompt tokens computed at once for one request.", unit="tokens", minimum=1
    )
    token_budget: int = setting(
        1024, help="Tokens computed in one step over all requests.", unit="tokens", minimum=1
    )
    max_num_seqs: int = setting(64, help="Requests that run at the same time.", unit="requests", minimum=1)
    local_prefill_threshold: int = setting(
        0,
        help="A prompt with fewer uncached tokens than this is prefilled on the decode worker.",
        unit="tokens",
        minimum=0,
    )
    prefix_caching: bool = setting(True, help="Keep sealed prompt pages for later requests.")
    transports: tuple[str, ...] = setting(
        ("shm", "tcp"), help="Ways to move KV pages, most wanted first.", choices=TRANSPORTS
    )
    kv_mixing: str | None = setting(
        None,
        help="Whether pages computed by other numerics may be used. Auto: relaxed with precision fast.",
        choices=KV_MIXING,
    )
    host: str = setting("127.0.0.1", help="Address all listeners of the worker bind to.")
    tls_ca: str = setting(
        "", help="PEM file of the authorities whose certificates we accept; with it all connections use TLS."
    )
    tls_cert: str = setting("", help="PEM file of our certificate, with its chain, for serving and dialling.")
    tls_key: str = setting("", help="PEM file of its private key; readable by its user alone.")
    tls_server_name: str = setting(
        "",
        help="Name that the certificates of peers must have, in place of the host dialled; empty: the host.",
    )
    routers: tuple[str, ...] = setting((), help="host:port of each router's internal listener.")
    vllm_port: int | None = setting(
        None,
        help="Port on which gateways drive this worker alone by vLLM's contract, "
        "vllm.grpc.engine.VllmEngine; 0: any free one; unset: none. Prefill workers have none.",
        minimum=0,
        maximum=65535,
    )
    metrics_port: int | None = setting(
        None,
        help="Port of this worker's Prometheus metrics; 0: any free one; unset: none.",
        minimum=0,
        maximum=65535,
    )
    run_dir: str = setting("", help="Private directory for Unix sockets; empty: a new temporary one.")
    threads: int = setting(1, help="Compute threads (OMP_NUM_THREADS).", unit="threads", minimum=1)
    tp: int = setting(
        1,
        help="Tensor-parallel ranks of the worker: processes of one machine that share its threads.",
        unit="ranks",
        minimum=1,
        maximum=MAX_TP,
    )
    expert_placement: str = setting(
        "", help="Snapshot of experts (pdserve experts --save) to start with; empty: in order."
    )
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
    rank_exchange: str = setting("shm", help="How the ranks exchange tensors.", choices=RANK_EXCHANGES)
    rank_attention: str = setting(
        "divided",
        help="How ranks share attention: divided by heads; repeated: each computes all of it and they divide "
        "experts alone, so that a worker goes on without a lost rank whose experts have replicas; rows: each "
        "computes sequences of its own and holds their pages alone.",
        choices=RANK_ATTENTION,
    )
    nice: int = setting(0, help="Added to the process's nice value at start.", minimum=0, maximum=19)
    decode_pace_s: float = setting(
        0.04,
        help="Least time between decode steps while a prefill worker on the same machine computes a prompt "
        "for this worker; 0: none.",
        unit="seconds",
        minimum=0,
        maximum=10,
    )
    lease_s: float = setting(10.0, help="Lease of protocol.md.", unit="seconds", minimum=0.1)

    def __post_init__(self) -> None:
        tls_files(self)
        if self.token_budget < self.prefill_chunk_tokens:
            raise ConfigError("token_budget: must be at least prefill_chunk_tokens")
        if self.expert_placement and self.tp == 1:
            raise ConfigError("expert_placement: a worker of one rank has all experts; give it more ranks")
        if self.tp > 1 and self.role is not Role.AGGREGATED and "nixl" in self.transports:
            raise ConfigError(f"transports: {NO_NIXL}")
        if self.attention_repeated and (self.rank_exchange, self.role) != ("shm", Role.AGGREGATED):
            raise ConfigError("rank_attention: repeated is for aggregated workers that exchange over shm")
        if self.tp > 1 and self.weights not in (None, EXACT):
            raise ConfigError(f"weights: {NO_QUANTISED_RANKS}")
        if self.page_dtype == INT8 and self.tp > 1:
            raise ConfigError(f"kv_dtype: {NO_INT8_RANKS}")
        if not self.transports:
            raise ConfigError("transports: name at least one")

    @property
    def page_dtype(self) -> str:
        """The number type of this worker's KV pages. Raises ConfigError."""
        return page_dtype(self.kv_dtype, self.dtype)

    @property
    def mixing(self) -> str:
        """kv_mixing, with auto resolved."""
        return self.kv_mixing or (RELAXED if self.precision == FAST else STRICT)

    @property
    def attention_repeated(self) -> bool:
        """Whether the ranks divide experts alone."""
        return self.tp > 1 and self.rank_attention == "repeated"

    @property
    def attention_rows(self) -> bool:
        """Whether each rank has sequences of its own."""
        return self.tp > 1 and self.rank_attention == "rows"

    @property
    def num_homes(self) -> int:
        """Parts of the page pool, each a rank's: 1 unless ranks have sequences of their own."""
        return self.tp if self.attention_rows else 1

    @property
    def secret_bytes(self) -> bytes:
        """The fleet secret as bytes. Raises ConfigError if it is not hex."""
        try:
            return bytes.fromhex(self.fleet_secret)
        except ValueError:
            raise ConfigError("fleet_secret: must be hex digits") from None

    def tls_source(self) -> TlsSource | None:
        """The certificates; None without TLS. Raises ConfigError for files that can not be used."""
        return tls_source(self)

    def to_json(self) -> str:
        """As one JSON object, the fleet secret included: for actor arguments only, never for logs."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> WorkerConfig:
        """The inverse of to_json. Raises ConfigError naming the field."""
        return from_json(cls, text)
