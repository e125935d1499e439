"""A router of a worker's own, so that gateways of others can drive this worker alone by vLLM's contract.

It is the same router that serves a fleet, in this process and on this thread: the worker joins it as it joins
every router, over gRPC. It computes prompts where it decodes; nothing is handed over.
"""

from __future__ import annotations

import asyncio
import logging

from kvtransfer.port import WorkerParts
from pdserve.config.addresses import is_loopback
from pdserve.config.worker import WorkerConfig
from pdserve.types import Role

log = logging.getLogger(__name__)


class Front:
    """The worker's router. Control thread only."""

    def __init__(self, config: WorkerConfig, parts: WorkerParts) -> None:
        """Raises ConfigError. Must be called in the running loop."""
        from router.config import RouterConfig
        from router.main import Router

        self._draining: asyncio.Task[None] | None = None
        self._router = Router(
            RouterConfig(
                host=parts.host,
                port=config.vllm_port or 0,
                protocols=("vllm",),
                metrics=False,
                http=False,  # gateways come by gRPC; the fleet's router has that port
                insecure=parts.tls is None and not is_loopback(parts.host),  # the fleet has checked it
                fleet_secret=parts.context.secret.hex(),
                tls_ca=config.tls_ca,
                tls_cert=config.tls_cert,
                tls_key=config.tls_key,
                tls_server_name=config.tls_server_name,
                kv_mixing=config.kv_mixing or "strict",
                otlp_endpoint=config.otlp_endpoint,
                trace_sample_ratio=config.trace_sample_ratio,
                log_prompts=config.log_prompts,
            )
        )

    @classmethod
    def of(cls, config: WorkerConfig, parts: WorkerParts) -> Front | None:
        """None where it is not asked for, or the worker makes no tokens."""
        wanted = config.vllm_port is not None and config.role is not Role.PREFILL
        return cls(config, parts) if wanted else None

    async def start(self) -> str:
        """Listens; returns the address for the worker to join. Raises ConfigError."""
        await self._router.start()
        log.info("gateways can drive this worker on %s", self._router.address)
        return self._router.address

    def drain(self) -> None:
        """Refuses new requests from now on; running ones finish."""
        self._draining = asyncio.get_running_loop().create_task(self._router.drain())

    async def stop(self) -> None:
        """Ends everything at once."""
        if self._draining is not None:
            self._draining.cancel()
        await self._router.stop()
