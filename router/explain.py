"""What requests wait for, in words, and the ledgers of the last ones. No prompt and no text is kept. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace

from pdserve.api import Explanation
from pdserve.messages import Report
from pdserve.types import HandoverMode, Ledger, Usage
from router.request_state import Phase, RequestState

MAX_EXPLAINED = 1000


class Explained:
    """Explanations of the last requests that ended, by tenant and id: one tenant never sees another's."""

    def __init__(self, limit: int = MAX_EXPLAINED) -> None:
        self._limit = limit
        self._by_id: OrderedDict[tuple[str, str], Explanation] = OrderedDict()

    def put(self, tenant: str, explanation: Explanation) -> None:
        """Keeps it; the oldest goes."""
        self._by_id[tenant, explanation.request_id] = explanation
        while len(self._by_id) > self._limit:
            self._by_id.popitem(last=False)

    def get(self, tenant: str, request_id: str) -> Explanation | None:
        return self._by_id.get((tenant, request_id))


def waiting_for(state: RequestState, queue_reason: str, reports: Mapping[str, Report]) -> str:
    """What a request waits for now. queue_reason: why the queue's head does not get a worker. reports: what
    its workers say of it."""
    what = _waiting_for(state, queue_reason)
    words = "; ".join(f"{worker} {report.doing}" for worker, report in reports.items())
    return f"{what} ({words})" if what and words else what


def _waiting_for(state: RequestState, queue_reason: str) -> str:
    decode = state.decode.worker_id if state.decode is not None else "decode"
    prefill = state.prefill.worker_id if state.prefill is not None else "prefill"
    match state.phase:
        case Phase.QUEUED:
            return f"a worker: {queue_reason}" if queue_reason else "its turn in the queue"
        case Phase.RESERVING:
            return f"{decode} to reserve pages"
        case Phase.RESERVED if state.mode is HandoverMode.LOCAL:
            return f"{decode} to compute the prompt"
        case Phase.RESERVED:
            return f"{prefill} to compute the prompt and {decode} to take its pages over"
        case Phase.RUNNING:
            return f"{decode} to make token {len(state.delivered)} of at most {state.max_tokens}"
        case Phase.STOPPING:
            return f"{decode} to report"
        case Phase.DONE:
            return ""


def told_by(reports: Mapping[str, Report], before: Ledger | None) -> Ledger:
    """The newest ledger of a running request: decode's, with prefill's stretches while decode has not heard
    of them. before: what the first token brought, if it came."""
    ledgers = [report.ledger for report in reports.values()]
    whole = next((ledger for ledger in ledgers if ledger.decode_worker), before)
    if whole is None:
        whole = next(iter(ledgers), Ledger())
    for ledger in ledgers:
        known = {(s.phase, s.begin_clock) for s in whole.spans}
        more = tuple(s for s in ledger.spans if (s.phase, s.begin_clock) not in known)
        whole = replace(
            whole, spans=whole.spans + more, prefill_worker=whole.prefill_worker or ledger.prefill_worker
        )
    return whole


def progress(state: RequestState) -> Usage:
    """Tokens so far."""
    return Usage(prompt_tokens=len(state.prompt), completion_tokens=len(state.delivered))
