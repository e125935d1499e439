"""Which role drivers a worker loads, by name and lazily: a role is a policy, not a different program."""

from __future__ import annotations

from collections.abc import Callable

from kvtransfer.port import RoleDriver, WorkerPort
from pdserve.types import Role


def _prefill(port: WorkerPort) -> RoleDriver:
    from prefill_worker.service import PrefillDriver

    return PrefillDriver(port)


def _decode(port: WorkerPort) -> RoleDriver:
    from decode_worker.service import DecodeDriver

    return DecodeDriver(port)


def _evaluate(port: WorkerPort) -> RoleDriver:
    from pdserve.worker.evaluate import EvaluateDriver

    return EvaluateDriver(port)


_BY_ROLE: dict[Role, tuple[Callable[[WorkerPort], RoleDriver], ...]] = {
    Role.PREFILL: (_prefill, _evaluate),
    Role.DECODE: (_decode, _evaluate),
    Role.AGGREGATED: (_prefill, _decode, _evaluate),
}


def load_roles(role: Role, port: WorkerPort) -> tuple[RoleDriver, ...]:
    """The drivers of a worker's role; an aggregated worker has both. All evaluate."""
    return tuple(make(port) for make in _BY_ROLE[role])
