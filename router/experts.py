"""Asks workers for the loads and homes of their experts, and to place them anew."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from pdserve.api import ExpertReport, RebalanceAnswer
from pdserve.errors import PdserveError, Unavailable
from pdserve.rpc.convert import expert_report_from_pb, rebalance_answer_from_pb
from pdserve.rpc.v1 import cluster_pb2
from router.links import WorkerLink
from router.roster import Roster

TIMEOUT_S = 5.0
PLAN_TIMEOUT_S = 130.0
"""A worker gives its planner two minutes."""
T = TypeVar("T")
log = logging.getLogger(__name__)


async def ask_experts(roster: Roster, worker_id: str) -> tuple[ExpertReport, ...]:
    """Reports of workers whose model has experts. worker_id: of one worker; "" asks all.

    A worker that does not answer is left out and logged. Raises Unavailable if none of those asked answers.
    """
    told = await _each(roster, worker_id, _ask)
    return tuple(sorted((report for report in told if report.layers), key=lambda report: report.name))


async def rebalance_experts(roster: Roster, worker_id: str) -> tuple[RebalanceAnswer, ...]:
    """What workers say when they are asked to place their experts anew. Else as `ask_experts`."""
    return tuple(sorted(await _each(roster, worker_id, _rebalance), key=lambda answer: answer.name))


async def _each(roster: Roster, worker_id: str, ask: Callable[[WorkerLink], Awaitable[T]]) -> list[T]:
    """Answers of one worker or all, at once."""
    records = [m.record.peer for m in roster.members() if worker_id in ("", m.record.peer.worker_id)]
    links = [link for peer in records if (link := roster.links.get(peer.incarnation)) is not None]
    answers = await asyncio.gather(*(_answer(ask, link) for link in links))
    told = [answer for answer in answers if answer is not None]
    if not told:
        raise Unavailable("No such worker answers; see pdserve status.", retry_after_s=1.0)
    return told


async def _answer(ask: Callable[[WorkerLink], Awaitable[T]], link: WorkerLink) -> T | None:
    try:
        return await ask(link)
    except (grpc.RpcError, PdserveError):
        log.warning("a worker did not answer about its experts")
        return None


async def _ask(link: WorkerLink) -> ExpertReport:
    request = cluster_pb2.GetWorkerExpertsRequest()
    response = await link.worker.GetWorkerExperts(request, timeout=TIMEOUT_S)
    return expert_report_from_pb(response.report)


async def _rebalance(link: WorkerLink) -> RebalanceAnswer:
    request = cluster_pb2.RebalanceWorkerExpertsRequest()
    response = await link.worker.RebalanceWorkerExperts(request, timeout=PLAN_TIMEOUT_S)
    return rebalance_answer_from_pb(response.answer)
