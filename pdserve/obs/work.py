"""What a worker tells of the calls it served, once each is over: a log line, and spans from its own stamps.

What lives here: the names and attributes of a worker's lines and spans. What does not: stamps
(`kvtransfer.stamps`), the services that serve the calls, and what routers tell (`router.record`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from pdserve import clock
from pdserve.messages import Ended, Outcome, Prefilled, PrefillRequest, Refused, Reserve
from pdserve.obs.logging import fields
from pdserve.obs.tracecontext import TraceContext, parent_of
from pdserve.obs.tracing import Attributes, FinishedSpan, Kind, Spans, Value, WallClock
from pdserve.types import Ledger, Phase, Span

log = logging.getLogger("pdserve.worker")

PREFILL, TRANSFER, DECODE, EVALUATE = "prefill", "transfer", "decode", "evaluate"
"""Names of the spans: the prompt is computed; its pages come over; tokens are made; a text is looked at."""
BROKEN = "cancelled"
"""How a call ended whose caller went away."""
_PREFILL_PHASES = frozenset({Phase.PREFILL_QUEUE, Phase.COMPUTE})
_TRANSFER_PHASES = frozenset({Phase.WIRE, Phase.VERIFY})
_DECODE_PHASES = frozenset({Phase.DISPATCH, Phase.ADMIT, Phase.FIRST_STEP})


class CallContext(Protocol):
    """What is needed of a gRPC call that is served."""

    def invocation_metadata(self) -> Any:
        """Pairs of names and values, or None."""
        ...


class Works:
    """One worker's recorder. Control thread only."""

    def __init__(self, worker_id: str = "", spans: Spans | None = None) -> None:
        """spans: None where tracing is off; calls' metadata is not even looked at then."""
        self.worker_id, self.spans = worker_id, spans

    def began(self, call: PrefillRequest | Reserve, context: CallContext) -> Work:
        """A call came in."""
        return Work(self, call, self._parent(context))

    def evaluated(self, context: CallContext, came_at: float, num_tokens: int, error: str) -> None:
        """A text was run through the model, or was not. came_at: when the call came, by the monotonic clock.
        error: a label, "" for none."""
        now = clock.monotonic()
        parent = self._parent(context)
        told = fields(
            trace_id="" if parent is None else parent.trace_id, outcome=error or "ok", tokens=num_tokens,
            seconds=round(now - came_at, 6),
        )  # fmt: skip
        log.info("evaluate ended", extra=told)
        if parent is not None:
            attributes = {"pdserve.tokens": num_tokens}
            self.add(parent, EVALUATE, Kind.SERVER, (came_at, now), error, attributes, ())

    def _parent(self, context: CallContext) -> TraceContext | None:
        """The router's span; None where no spans are to be made."""
        parent = None if self.spans is None else parent_of(context.invocation_metadata() or ())
        return parent if parent is not None and parent.sampled else None

    def add(
        self, parent: TraceContext, name: str, kind: Kind, times: tuple[float, float], error: str,
        attributes: Attributes, stretches: Sequence[Span],
    ) -> None:  # fmt: skip
        """Sends a span. times: its begin and end by our monotonic clock, as the stretches'."""
        assert self.spans is not None
        wall = WallClock()
        failed = {"error.type": error} if error else {}
        self.spans.add(
            FinishedSpan(
                name=name, kind=kind, context=parent.child(), parent_id=parent.span_id, remote_parent=True,
                begin_s=wall.at(times[0]), end_s=wall.at(times[1]), attributes={**attributes, **failed},
                error=error, stretches=stretches, zero_s=wall.at(0.0),
            )
        )  # fmt: skip

    def close(self) -> None:
        """Sends what waits to be sent. Blocks for a few seconds at most; any thread."""
        if self.spans is not None:
            self.spans.close()


class Work:
    """One call from its arrival on; tell once how it ended."""

    def __init__(self, works: Works, call: PrefillRequest | Reserve, parent: TraceContext | None) -> None:
        self._works, self._call, self._parent = works, call, parent
        self._came_at = clock.monotonic()

    def prefilled(self, result: Prefilled | Refused | None) -> None:
        """The end of a prefill worker's call; None: its caller broke it off."""
        ledger = result.ledger if isinstance(result, Prefilled) else Ledger()
        error = _refusal(result)
        if isinstance(result, Prefilled) and result.outcome is not Outcome.COMPLETE:
            error = str(result.outcome)
        self._line(
            "prefill ended", error or str(Outcome.COMPLETE), peer=self._peer,
            computed_tokens=ledger.prefill_computed_tokens, cached_tokens=ledger.prefill_cached_tokens,
        )  # fmt: skip
        if self._parent is not None:
            self._prefill_span(ledger, error, Kind.SERVER)

    def decoded(self, result: Ended | Refused | None) -> None:
        """The end of a decode worker's call; None: its caller broke it off."""
        ledger = result.ledger if isinstance(result, Ended) else Ledger()
        error = result.error_label if isinstance(result, Ended) else _refusal(result)
        told: dict[str, Value] = {}
        if isinstance(result, Ended):
            told["completion_tokens"] = result.usage.completion_tokens
            told["finish_reason"] = str(result.finish or "")
        moved = ledger.transfer
        self._line(
            "decode ended", error or "ok", peer=self._peer, path=moved.path, pages=moved.pages,
            **told,
        )  # fmt: skip
        if self._parent is None:
            return
        if any(span.phase is Phase.COMPUTE for span in self._own(ledger)):
            self._prefill_span(ledger, "", Kind.INTERNAL)
        self._transfer_span(ledger, error)
        self._decode_span(ledger, error, told)

    # -- lines -------------------------------------------------------------------------------------------

    @property
    def _peer(self) -> str:
        call = self._call
        peer = call.decode if isinstance(call, PrefillRequest) else call.prefill
        return "" if peer is None else peer.worker_id

    def _line(self, message: str, outcome: str, **told: Value) -> None:
        if not log.isEnabledFor(logging.INFO):
            return
        key = self._call.key
        seconds = round(clock.monotonic() - self._came_at, 6)
        log.info(
            message,
            extra=fields(
                request_id=key.request_id, epoch=key.epoch, trace_id=self._call.trace_id, outcome=outcome,
                **told, seconds=seconds,
            ),
        )  # fmt: skip

    # -- spans -------------------------------------------------------------------------------------------

    def _own(self, ledger: Ledger) -> list[Span]:
        """The stretches that this process stamped itself, both ends."""
        mine = self._works.worker_id
        return [span for span in ledger.spans if span.begin_clock == span.end_clock == mine]

    def _prefill_span(self, ledger: Ledger, error: str, kind: Kind) -> None:
        """From the call, or what it was computed with here, to the last chunk's end."""
        stretches = [s for s in self._own(ledger) if s.phase in _PREFILL_PHASES]
        begin = self._came_at if kind is Kind.SERVER else min(s.begin_s for s in stretches)
        ended = [s.end_s for s in stretches if s.phase is Phase.COMPUTE]
        local = kind is Kind.INTERNAL
        computed = ledger.decode_computed_prompt_tokens if local else ledger.prefill_computed_tokens
        cached = ledger.decode_hit_tokens if local else ledger.prefill_cached_tokens
        more = {"pdserve.computed_tokens": computed, "pdserve.cached_tokens": cached}
        end = max(ended) if ended and not error else clock.monotonic()
        self._add(PREFILL, kind, (begin, end), stretches, error, more)

    def _transfer_span(self, ledger: Ledger, error: str) -> None:
        """From the first page's announcement to the last one's verification."""
        stretches = [s for s in self._own(ledger) if s.phase in _TRANSFER_PHASES]
        if not stretches:
            return
        moved = ledger.transfer
        more: dict[str, Value] = {
            "pdserve.transfer.path": moved.path, "pdserve.transfer.pages": moved.pages,
            "pdserve.transfer.bytes": moved.bytes, "pdserve.transfer.hit_pages": moved.hit_pages,
            "pdserve.transfer.resent_pages": moved.resent_pages,
        }  # fmt: skip
        times = (min(s.begin_s for s in stretches), max(s.end_s for s in stretches))
        handed_over = any(s.phase is Phase.ADMIT for s in self._own(ledger))
        beside = [s for s in stretches if not s.on_path]
        self._add(TRANSFER, Kind.INTERNAL, times, beside, "" if handed_over else error, more)

    def _decode_span(self, ledger: Ledger, error: str, told: Attributes) -> None:
        """From the hand-over (if there was none, from the call) to the end."""
        stretches = [s for s in self._own(ledger) if s.phase in _DECODE_PHASES]
        begin = min((s.begin_s for s in stretches if s.phase is Phase.ADMIT), default=self._came_at)
        more: dict[str, Value] = {f"pdserve.{name}": value for name, value in told.items()}
        more["pdserve.retractions"] = ledger.num_retractions
        after = [s for s in stretches if s.begin_s >= begin]
        self._add(DECODE, Kind.SERVER, (begin, clock.monotonic()), after, error, more)

    def _add(
        self, name: str, kind: Kind, times: tuple[float, float], stretches: Iterable[Span], error: str,
        more: Attributes,
    ) -> None:  # fmt: skip
        """times: begin and end by our monotonic clock."""
        call = self._call
        attributes: dict[str, Value] = {
            "pdserve.request_id": call.key.request_id,
            "pdserve.epoch": call.key.epoch,
            **({"pdserve.peer": self._peer} if self._peer else {}),
            **more,
        }
        assert self._parent is not None
        self._works.add(
            self._parent,
            name,
            kind,
            times,
            error,
            attributes,
            sorted(stretches, key=lambda span: span.begin_s),
        )


def _refusal(result: object) -> str:
    """Why a call was not served to its end; "" if it was."""
    if result is None:
        return BROKEN
    return str(result.reason) if isinstance(result, Refused) else ""
