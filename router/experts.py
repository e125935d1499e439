"""Asks workers for the loads and homes of their experts, for GetExperts."""

from __future__ import annotations

import asyncio
import logging

import grpc

from pdserve.api import ExpertReport
from pdserve.errors import PdserveError, Unavailable
from pdserve.rpc.convert import expert_report_from_pb
from pdserve.rpc.v1 import cluster_pb2
from router.links import WorkerLink
from router.roster import Roster

TIMEOUT_S = 5.0
log = logging.getLogger(__name__)


async def ask_experts(roster: Roster, worker_id: str) -> tuple[ExpertReport, ...]:
    """Reports of workers whose model has experts. worker_id: of one worker; "" asks all.

    A worker that does not answer is left out and logged. Raises Unavailable if none of those asked answers.
    """
    records = [m.record.peer for m in roster.members() if worker_id in ("", m.record.peer.worker_id)]
    links = [link for peer in records if (link := roster.links.get(peer.incarnation)) is not None]
    answers = await asyncio.gather(*(_ask(link) for link in links))
    told = [answer for answer in answers if answer is not None]
    if not told:
        raise Unavailable("No such worker answers; see pdserve status.", retry_after_s=1.0)
    return tuple(sorted((report for report in told if report.layers), key=lambda report: report.name))


async def _ask(link: WorkerLink) -> ExpertReport | None:
    try:
        request = cluster_pb2.GetWorkerExpertsRequest()
        response = await link.worker.GetWorkerExperts(request, timeout=TIMEOUT_S)
        return expert_report_from_pb(response.report)
    except (grpc.RpcError, PdserveError):
        log.warning("a worker did not tell of its experts")
        return None
