"""A request's grammar before its worker takes the request in: compiled and held, or the refusal.

What lives here: what both roles' services do with it. What does not: grammars (`pdserve.structured`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from pdserve.errors import Overloaded, PdserveError
from pdserve.messages import PrefillRequest, Refusal, Refused, Reserve
from pdserve.structured.worker import WorkerGrammars


async def grammar_held(
    grammars: WorkerGrammars, call: Reserve | PrefillRequest
) -> AbstractContextManager[None] | Refused:
    """Enter what comes back for as long as the request lives here; a request without a grammar never waits.

    The router has compiled the grammar already: a refusal means that this worker differs or is busy.
    """
    try:
        return await grammars.hold(call.tenant, call.sampling.grammar)
    except PdserveError as error:
        busy = isinstance(error, Overloaded)
        reason = Refusal.FULL if busy else Refusal.INCOMPATIBLE
        retry_after_s = error.retry_after_s or 0.0
        return Refused(key=call.key, reason=reason, detail=error.message, retry_after_s=retry_after_s)
