"""Who may call which method: one table over all services. What is not in it may be called by nobody.

What lives here: the classes of access and the table. What does not: how a caller proves who it is
(`fleet_auth` for our own processes, the router for clients), and the interceptor that asks (`guard`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum


class Access(StrEnum):
    """public: everybody. client: whoever the router's authenticator knows. admin: those of them that may
    change the fleet. fleet: our own processes, by the fleet's token."""

    PUBLIC = "public"
    CLIENT = "client"
    ADMIN = "admin"
    FLEET = "fleet"


def _service(name: str, access: Access, *methods: str) -> Iterator[tuple[str, Access]]:
    return ((f"/{name}/{method}", access) for method in methods)


_OURS = "pdserve.rpc.v1"

RULES: Mapping[str, Access] = dict(
    (
        *_service("grpc.health.v1.Health", Access.PUBLIC, "Check", "List", "Watch"),
        # Served behind a flag only.
        *_service("grpc.reflection.v1alpha.ServerReflection", Access.PUBLIC, "ServerReflectionInfo"),
        *_service("grpc.reflection.v1.ServerReflection", Access.PUBLIC, "ServerReflectionInfo"),
        *_service(
            f"{_OURS}.InferenceService", Access.CLIENT,
            "Generate", "Abort", "Tokenize", "Detokenize", "Embed", "Score", "GetModel", "GetStatus",
            "Explain", "GetExperts",
        ),
        *_service(f"{_OURS}.InferenceService", Access.ADMIN, "RebalanceExperts"),
        # Served where `--protocols` names them.
        *_service(
            "inference.GRPCInferenceService", Access.PUBLIC, "ServerLive", "ServerReady", "ServerMetadata"
        ),
        *_service(
            "inference.GRPCInferenceService", Access.CLIENT,
            "ModelReady", "ModelMetadata", "ModelInfer", "ModelStreamInfer",
        ),
        *_service(
            "vllm.grpc.engine.VllmEngine", Access.CLIENT,
            "Generate", "Embed", "HealthCheck", "Abort", "GetModelInfo", "GetServerInfo", "GetLoads",
            "GetTokenizer", "SubscribeKvEvents",
        ),
        *_service("vllm.grpc.engine.VllmEngine", Access.ADMIN, "FlushCache", "StartProfile", "StopProfile"),
        *_service(f"{_OURS}.ClusterService", Access.FLEET, "Join"),
        *_service(
            f"{_OURS}.WorkerService", Access.FLEET,
            "FetchTokenizer", "Drain", "GetWorkerStatus", "GetRequest", "GetWorkerExperts",
            "RebalanceWorkerExperts",
        ),
        *_service(f"{_OURS}.PrefillService", Access.FLEET, "Prefill", "CancelPrefill"),
        *_service(f"{_OURS}.DecodeService", Access.FLEET, "Reserve", "CancelDecode", "SwitchLocal"),
        *_service(f"{_OURS}.TransferService", Access.FLEET, "Exchange"),
        *_service(f"{_OURS}.EvaluateService", Access.FLEET, "Evaluate"),
    )
)  # fmt: skip
"""Access by full method name, as it is on the wire."""
