"""Trace contexts by the rules of the W3C, spans and lines of calls that end badly, and tracing off."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pdserve.api import GenerateInput
from pdserve.client import AsyncClient
from pdserve.clock import monotonic
from pdserve.config.worker import WorkerConfig
from pdserve.errors import ConfigError
from pdserve.messages import Ended, Outcome, Prefilled, PrefillRequest, Refusal, Refused, Reserve
from pdserve.obs.logging import setup_logging
from pdserve.obs.tracecontext import TraceContext, new_span_id, new_trace, parent_of
from pdserve.obs.tracing import FinishedSpan, spans_of
from pdserve.obs.work import Works
from pdserve.rpc.fleet_auth import METADATA_KEY
from pdserve.types import (
    FinishReason,
    HandoverMode,
    Key,
    Ledger,
    PeerRef,
    Phase,
    Role,
    SamplingParams,
    Span,
    TransferStats,
    Usage,
)
from router.config import RouterConfig
from router.record import Recorder
from tests.support.collector import Collector, collector
from tests.support.router_kit import FakeWorker, fleet

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    yield
    root.handlers[:], root.level = before


# -- contexts --------------------------------------------------------------------------------------------


def test_a_parent_is_read_and_written_as_it_came() -> None:
    found = parent_of([("traceparent", PARENT), ("tracestate", "a=1"), ("tracestate", "b=2")])
    assert found == TraceContext(trace_id=TRACE, span_id=SPAN, sampled=True, state="a=1,b=2")
    assert found.headers() == (("traceparent", PARENT), ("tracestate", "a=1,b=2"))
    spaced = parent_of([("traceparent", PARENT), ("tracestate", "a@b= 1 ,, c=2")])
    assert spaced is not None
    assert spaced.state == "a@b= 1,c=2"
    child = found.child()
    assert (child.trace_id, child.sampled, child.state) == (TRACE, True, "a=1,b=2")
    assert child.span_id != SPAN


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        PARENT.upper(),
        PARENT.replace(TRACE, "0" * 32),
        PARENT.replace(SPAN, "0" * 16),
        f"ff{PARENT[2:]}",
        f"{PARENT}-more",
        PARENT[:-1],
        f"{PARENT}\n00-x",
    ],
)
def test_what_is_no_parent_is_left_out(text: str) -> None:
    assert parent_of([("traceparent", text)]) is None


def test_two_parents_are_none_and_later_versions_may_say_more() -> None:
    assert parent_of([("traceparent", PARENT), ("traceparent", PARENT)]) is None
    later = parent_of([("traceparent", f"cc{PARENT[2:-2]}03-what-is-this".encode())])
    assert later == TraceContext(trace_id=TRACE, span_id=SPAN, sampled=True)


@pytest.mark.parametrize(
    "state", ["a=" + "x" * 511, "a=\x07", "a=ä", "words", "A=1", "a=x=y", "a=,b=1", ",".join(["a=1"] * 33)]
)
def test_a_state_that_could_do_harm_is_not_passed_on(state: str) -> None:
    found = parent_of([("traceparent", PARENT), ("tracestate", state)])
    assert found is not None
    assert found.state == ""


def test_a_share_of_traces_is_recorded_by_their_ids_alone() -> None:
    low, high = f"{'1' * 16}{'7f' * 8}", f"{'1' * 16}{'80' * 8}"
    assert [new_trace(0.5, each).sampled for each in (low, high)] == [True, False]
    assert all(new_trace(1.0).sampled and not new_trace(0.0).sampled for _ in range(50))
    assert new_trace(1.0, low).trace_id == low
    assert new_trace(1.0, "0" * 32).trace_id != "0" * 32
    assert len({new_span_id() for _ in range(50)}) == 50


# -- what workers tell -----------------------------------------------------------------------------------


class Kept:
    """Spans as they would be sent."""

    def __init__(self) -> None:
        self.spans: list[FinishedSpan] = []

    def add(self, span: FinishedSpan) -> None:
        self.spans.append(span)

    def close(self) -> None:
        pass


class Context:
    """A gRPC call's."""

    def invocation_metadata(self) -> Any:
        return (("traceparent", PARENT),)


def stretch(phase: Phase, begin: float, end: float, *, clock: str = "d", on_path: bool = False) -> Span:
    return Span(phase=phase, begin_s=begin, end_s=end, begin_clock=clock, end_clock=clock, on_path=on_path)


def reserve(prefill: str = "") -> Reserve:
    peer = PeerRef(worker_id=prefill, incarnation=1, control="", host_id="") if prefill else None
    mode = HandoverMode.DISAGGREGATED if prefill else HandoverMode.LOCAL
    return Reserve(
        key=Key(request_id="r1", epoch=2), receiver_incarnation=1, ticket=b"", token_ids=(1, 2), num_forced=0,
        sampling=SamplingParams(), tenant="t", mode=mode, prefill=peer, deadline_s=1.0, trace_id=TRACE,
    )  # fmt: skip


def prefill() -> PrefillRequest:
    peer = PeerRef(worker_id="d", incarnation=1, control="", host_id="")
    return PrefillRequest(
        key=Key(request_id="r1"), receiver_incarnation=1, ticket=b"", token_ids=(1, 2), num_forced=0,
        sampling=SamplingParams(), tenant="t", decode=peer, deadline_s=1.0, trace_id=TRACE,
    )  # fmt: skip


def decoded(result: Ended | Refused | None, call: Reserve) -> dict[str, FinishedSpan]:
    kept = Kept()
    Works("d", kept).began(call, Context()).decoded(result)
    assert all(s.parent_id == SPAN and s.context.trace_id == TRACE for s in kept.spans)
    return {span.name: span for span in kept.spans}


def test_a_prompt_that_decode_computed_itself_has_its_span_there() -> None:
    now = monotonic()
    spans = (
        stretch(Phase.DISPATCH, now, now),
        stretch(Phase.PREFILL_QUEUE, now, now + 1, on_path=True),
        stretch(Phase.COMPUTE, now + 1, now + 3, on_path=True),
        stretch(Phase.ADMIT, now + 3, now + 3.5, on_path=True),
    )
    ledger = Ledger(decode_worker="d", decode_computed_prompt_tokens=2, spans=spans)
    ended = Ended(key=Key(request_id="r1"), finish=FinishReason.STOP, usage=Usage(), ledger=ledger)
    found = decoded(ended, reserve())
    assert set(found) == {"prefill", "decode"}
    assert found["prefill"].end_s - found["prefill"].begin_s == pytest.approx(3, abs=0.01)
    assert found["prefill"].attributes["pdserve.computed_tokens"] == 2
    assert found["decode"].begin_s - found["prefill"].begin_s == pytest.approx(3, abs=0.01)
    assert not found["decode"].error


def test_a_transfer_that_broke_shows_where() -> None:
    now = monotonic()
    spans = (
        stretch(Phase.DISPATCH, now, now),
        stretch(Phase.COMPUTE, now, now + 1, clock="p", on_path=True),
        stretch(Phase.WIRE, now + 1, now + 2),
    )
    ledger = Ledger(decode_worker="d", transfer=TransferStats(path="tcp", pages=1), spans=spans)
    ended = Ended(key=Key(request_id="r1"), finish=None, error_label="worker_lost", ledger=ledger)
    found = decoded(ended, reserve("p"))
    assert set(found) == {"transfer", "decode"}, "what the peer computed is its own to tell"
    assert {span.error for span in found.values()} == {"worker_lost"}
    assert found["transfer"].attributes["error.type"] == "worker_lost"
    assert found["decode"].attributes["pdserve.epoch"] == 2


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (None, "cancelled"),
        (Refused(key=Key(request_id="r1"), reason=Refusal.FULL), str(Refusal.FULL)),
        (Prefilled(key=Key(request_id="r1"), outcome=Outcome.STOPPED), "stopped"),
        (Prefilled(key=Key(request_id="r1"), outcome=Outcome.COMPLETE), ""),
    ],
)
def test_every_end_of_a_prefill_call_is_told(result: Prefilled | Refused | None, error: str) -> None:
    kept, stream = Kept(), io.StringIO()
    setup_logging(form="json", service="worker", about={"worker": "p"}, stream=stream)
    Works("p", kept).began(prefill(), Context()).prefilled(result)
    (span,) = kept.spans
    assert (span.name, span.error, span.end_s >= span.begin_s) == ("prefill", error, True)
    line = json.loads(stream.getvalue())
    assert (line["request_id"], line["trace_id"], line["worker"]) == ("r1", TRACE, "p")
    assert line["outcome"] == (error or "complete")


# -- the router ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log_prompts", [False, True])
async def test_prompts_are_logged_only_if_asked_for(log_prompts: bool) -> None:
    stream = io.StringIO()
    setup_logging(form="json", level="DEBUG", stream=stream, log_prompts=log_prompts)
    async with fleet(FakeWorker("d", Role.DECODE), log_prompts=log_prompts) as running:
        result = await running.client.generate("the emerald", max_tokens=4).result()
        with pytest.raises(Exception, match="temperature"):
            await running.client.generate("the emerald", temperature=-1.0).result()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    (ended,) = [line for line in lines if line["message"] == "request ended"]
    (refused,) = [line for line in lines if line["message"] == "request refused"]
    assert ended["request_id"] == result.request_id
    assert ("emerald" in stream.getvalue()) is log_prompts
    if log_prompts:
        assert ended["prompt"] == refused["prompt"] == "the emerald"
        assert ended["completion"] == result.text
    else:
        assert not {"prompt", "completion"} & (ended.keys() | refused.keys())


async def test_a_router_without_spans_hands_the_callers_on() -> None:
    worker = FakeWorker("d", Role.DECODE)
    async with fleet(worker) as running:
        beside = {"traceparent": PARENT, "tracestate": "a=1"}
        async with AsyncClient(running.router.address, retry=None, metadata=beside) as client:
            await client.generate("x", max_tokens=1).result()
        await running.client.generate("x", max_tokens=1).result()
    (traced, plain) = worker.metadata
    assert (traced["traceparent"], traced["tracestate"]) == (PARENT, "a=1")
    assert "traceparent" not in plain
    assert METADATA_KEY in traced, "the fleet's token is still there"
    assert METADATA_KEY in plain
    assert [call.trace_id for call in worker.reserves] == [TRACE, ""]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_router_records_the_share_it_was_told_to(share: float) -> None:
    recorder = Recorder(RouterConfig(trace_sample_ratio=share), "r")
    recorder.spans = Kept()
    record = recorder.begin(GenerateInput(prompt="x"), monotonic())
    assert record.trace is not None
    assert record.trace.sampled is bool(share)


class Stuck(Collector):
    """A collector that takes no batch before it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = 0
        self.let_go = threading.Event()

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.entered += 1
        self.let_go.wait()
        return super().Export(request, context)


def test_a_stuck_collector_holds_up_neither_requests_nor_the_end() -> None:
    stuck = Stuck()
    with collector(stuck):
        recorder = Recorder(RouterConfig(otlp_endpoint=stuck.address), "r")
        for _ in range(3000):  # more than may wait
            record = recorder.begin(GenerateInput(prompt="x"), monotonic())
            record.ended("length", "default", None, model="m", now=monotonic())
        recorder.close()
        assert stuck.entered <= 2, "what waits is given up, batch for batch it would take longer"
        recorder.close()
        stuck.let_go.set()


# -- off, and not to be had -------------------------------------------------------------------------------


def test_what_waits_of_a_refused_request_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    recorder = Recorder(RouterConfig(), "r")
    recorder.spans = kept
    long = "m" * 1_000_000
    source = GenerateInput(prompt="p", model=long, client_request_id=long)
    recorder.begin(source, 0.0).ended("unknown_model", "t", None, model="small", now=1.0)
    recorder.begin_texts("score", long, 0.0).ended("unknown_model", "t", None, model="small", now=1.0)
    assert len(kept.spans) == 2
    assert max(len(repr(span)) for span in kept.spans) < 2000


def test_an_endpoint_that_can_not_be_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint: begins with http"):
        spans_of(RouterConfig(otlp_endpoint="localhost:4317"), "s", "i")
    monkeypatch.setitem(sys.modules, "pdserve.obs.otlp", None)  # as without the extra
    config = WorkerConfig(worker_id="w", role=Role.DECODE, model="m", otlp_endpoint="http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="extra otel"):
        spans_of(config, "s", "i")


_OFF = """
import sys
import prefill_worker.service, decode_worker.service, pdserve.worker.engine
from router.config import RouterConfig
from router.record import Recorder
from router.main import Router
from router.record import Recorder
from pdserve.api import GenerateInput
from pdserve.obs.work import Works

record = Recorder(RouterConfig(), "r").begin(GenerateInput(prompt="x"), 0.0)
record.ended("length", "default", None, model="m", now=1.0)
assert record.trace is None
class Call:
    trace_id = ""
    def invocation_metadata(self):
        raise AssertionError("nobody looks at it")
Works("w").began(Call(), Call())
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""


def test_off_means_that_opentelemetry_is_not_even_imported() -> None:
    done = subprocess.run([sys.executable, "-c", _OFF], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
