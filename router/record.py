"""What a router tells of each request once it is over: a log line, and a span with the whole ledger.

What lives here: whose trace a request belongs to, the line and the span (GenAI semantic conventions). What
does not: the ledger itself (`router.ledger`), metrics, and what workers tell (`pdserve.obs.work`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict

from pdserve.api import Chunk, Explanation, GenerateInput, StreamEvent
from pdserve.config.telemetry import TelemetrySettings
from pdserve.obs.logging import MAX_VALUE_CHARS, fields
from pdserve.obs.tracecontext import PARENT, TraceContext, new_trace
from pdserve.obs.tracing import FinishedSpan, Kind, Value, WallClock, spans_of
from pdserve.types import FinishReason, Ledger, Span, Usage
from router.validate import MAX_LABEL_BYTES

log = logging.getLogger("pdserve.router")

SERVICE = "pdserve-router"
PROVIDER = "pdserve"
_ASKED = (
    "temperature", "top_k", "top_p", "presence_penalty", "frequency_penalty", "seed", "max_tokens",
)  # fmt: skip
_MAX_INT = 2**63
_FINISHED = frozenset(map(str, FinishReason))

Spans = Sequence[Span]
"""Of a ledger."""


class Recorder:
    """One router's. Owned by the event loop."""

    def __init__(self, settings: TelemetrySettings, router_id: str) -> None:
        """Raises ConfigError if spans are asked for and can not be."""
        self.log_prompts = settings.log_prompts
        self._ratio = settings.trace_sample_ratio
        self.spans = spans_of(settings, SERVICE, router_id, **{"pdserve.router.id": router_id})

    def begin(self, source: GenerateInput, began_at: float) -> GenerateRecord:
        """A request came, as asked and not looked at yet. began_at: by the monotonic clock."""
        return GenerateRecord(self, source, began_at)

    def begin_texts(self, operation: str, model: str, began_at: float) -> TextsRecord:
        """The same for one that is no generation. operation: what it is called. model: asked for."""
        return TextsRecord(self, operation, model, began_at)

    def context(self, trace_id: str) -> tuple[TraceContext | None, str]:
        """A request's span, and its parent's id. Without spans of ours its workers' are the caller's."""
        parent = PARENT.get()
        if self.spans is None:
            return parent, ""
        if parent is None:
            return new_trace(self._ratio, trace_id), ""
        return parent.child(), parent.span_id

    def close(self) -> None:
        """Sends what waits to be sent. Blocks for a few seconds at most."""
        if self.spans is not None:
            self.spans.close()


class _Record:
    """One request. trace: what its calls to workers carry, None without a trace."""

    def __init__(
        self, recorder: Recorder, operation: str, model: str, began_at: float, trace_id: str = ""
    ) -> None:
        self._recorder, self._operation, self._asked_model = recorder, operation, model
        self._asked_id, self.began_at = trace_id, began_at
        self.trace, self._parent_id = recorder.context(trace_id)

    @property
    def trace_id(self) -> str:
        """32 hex digits, or what the caller gave in its place, or empty."""
        return self.trace.trace_id if self.trace is not None else self._asked_id

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Metadata of calls to workers, so that it stays one trace."""
        return () if self.trace is None else self.trace.headers()

    def _line(self, message: str, outcome: str, tenant: str, now: float, told: dict[str, object]) -> None:
        head = {"trace_id": self.trace_id, "tenant": tenant, "outcome": outcome}
        log.info(message, extra=fields(**head, **told, seconds=round(now - self.began_at, 6)))

    def _span(
        self, outcome: str, tenant: str, model: str, now: float, told: dict[str, Value], stretches: Spans
    ) -> None:
        """model: that is served. told: attributes of its kind of request."""
        trace, spans = self.trace, self._recorder.spans
        if spans is None or trace is None or not trace.sampled:
            return
        asked = self._asked_model[:MAX_LABEL_BYTES] or model
        failed = "" if outcome in _FINISHED else outcome
        begin = (wall := WallClock()).at(self.began_at)
        attributes: dict[str, Value] = {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": asked,
            "pdserve.tenant": tenant,
            "pdserve.outcome": outcome,
            **({"error.type": failed} if failed else {"gen_ai.response.model": model}),
            **told,
        }
        spans.add(
            FinishedSpan(
                name=f"{self._operation} {asked}".rstrip(), kind=Kind.SERVER, context=trace,
                parent_id=self._parent_id, remote_parent=True, begin_s=begin, end_s=wall.at(now),
                attributes=attributes, error=failed, stretches=stretches, zero_s=begin,
            )
        )  # fmt: skip


class GenerateRecord(_Record):
    """A generation."""

    def __init__(self, recorder: Recorder, source: GenerateInput, began_at: float) -> None:
        operation = "text_completion" if source.messages is None else "chat"
        super().__init__(recorder, operation, source.model, began_at, source.trace_id)
        self._source = source
        self._texts: list[str] = []
        self._num_chars = 0

    def saw(self, event: StreamEvent) -> None:
        """An event on its way to the client. Nothing is kept of it unless prompts are logged."""
        if self._recorder.log_prompts and isinstance(event, Chunk) and self._num_chars < MAX_VALUE_CHARS:
            self._texts.append(event.reasoning + event.text)
            self._num_chars += len(self._texts[-1])

    def ended(self, outcome: str, tenant: str, found: Explanation | None, *, model: str, now: float) -> None:
        """The request is over. found: None if it was refused before it had an id. model: that is served. now:
        as began_at."""
        message = "request ended" if found is not None else "request refused"
        if log.isEnabledFor(logging.INFO):
            self._line(message, outcome, tenant, now, self._fields(found))
        if self._recorder.spans is not None:
            told = _asked(self._source) | ({} if found is None else _answered(found, outcome))
            stretches = () if found is None else found.ledger.spans
            self._span(outcome, tenant, model, now, told, stretches)

    def _fields(self, found: Explanation | None) -> dict[str, object]:
        told: dict[str, object] = {"client_request_id": self._source.client_request_id}
        if found is not None:
            ttft = found.ledger.ttft_s
            told |= {
                "request_id": found.request_id,
                "prefill_worker": found.prefill_worker,
                "decode_worker": found.decode_worker,
                "prompt_tokens": found.usage.prompt_tokens,
                "cached_tokens": found.usage.cached_tokens,
                "completion_tokens": found.usage.completion_tokens,
                "tries": found.epochs,
                "ttft_s": None if ttft is None else round(ttft, 6),
            }
        if self._recorder.log_prompts:
            told |= {"prompt": _prompt(self._source), "completion": "".join(self._texts)}
        return told


class TextsRecord(_Record):
    """Texts that are only run through the model."""

    def ended(self, outcome: str, tenant: str, usage: Usage | None, *, model: str, now: float) -> None:
        """As GenerateRecord's. usage: None unless it ended well."""
        told: dict[str, Value] = {}
        if usage is not None:
            told["gen_ai.usage.input_tokens"] = usage.prompt_tokens
            told["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
        if log.isEnabledFor(logging.INFO):
            tokens = 0 if usage is None else usage.prompt_tokens
            self._line(f"{self._operation} ended", outcome, tenant, now, {"prompt_tokens": tokens})
        self._span(outcome, tenant, model, now, told, ())


def _asked(source: GenerateInput) -> dict[str, Value]:
    """What the client asked for; defaults are not told. Nothing need have been checked: a span waits for its
    collector, and what waits is bounded."""
    kind = "text" if source.sampling.grammar is None else "json"
    found: dict[str, Value] = {"gen_ai.output.type": kind}
    if source.client_request_id:
        found["pdserve.client_request_id"] = source.client_request_id[:MAX_LABEL_BYTES]
    if source.n > 1:
        found["gen_ai.request.choice.count"] = source.n
    for name in _ASKED:
        value = getattr(source.sampling, name)
        if value is not None and abs(value) < _MAX_INT:  # seeds go further than the protocol's integers
            found[f"gen_ai.request.{name}"] = value
    return found


def _answered(found: Explanation, outcome: str) -> dict[str, Value]:
    usage, ledger = found.usage, found.ledger
    told: dict[str, Value] = {
        "gen_ai.response.id": found.request_id,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "pdserve.tries": found.epochs,
        "pdserve.prefill_worker": found.prefill_worker,
        "pdserve.decode_worker": found.decode_worker,
        **_of_ledger(ledger),
    }
    if outcome in _FINISHED:
        told["gen_ai.response.finish_reasons"] = (outcome,)
    return told


def _of_ledger(ledger: Ledger) -> dict[str, Value]:
    """Its sums; its stretches are the span's events."""
    told: dict[str, Value] = {
        "pdserve.prefill_computed_tokens": ledger.prefill_computed_tokens,
        "pdserve.prefill_cached_tokens": ledger.prefill_cached_tokens,
        "pdserve.decode_computed_prompt_tokens": ledger.decode_computed_prompt_tokens,
        "pdserve.decode_hit_tokens": ledger.decode_hit_tokens,
        **{f"pdserve.transfer.{name}": value for name, value in asdict(ledger.transfer).items()},
    }
    seconds = {
        "gen_ai.response.time_to_first_chunk": ledger.ttft_s,
        "pdserve.residual_s": ledger.residual_s,
        "pdserve.handover_s": ledger.handover_s,
        "pdserve.wire_hidden_ratio": ledger.wire_hidden,
    }
    return told | {name: value for name, value in seconds.items() if value is not None}


def _prompt(source: GenerateInput) -> str:
    """What the client sent to be completed, for those who asked to see it."""
    if source.prompt is not None:
        return source.prompt
    if source.messages is not None:
        return json.dumps([{"role": m.role, "content": m.content} for m in source.messages])
    return " ".join(map(str, source.token_ids or ()))
