"""One request seen through a real fleet of processes: its spans at a collector of OTLP, and its log lines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from pdserve.client import Client, Result
from pdserve.errors import InvalidRequest
from pdserve.types import Phase, Role
from tests.support.collector import Collected, Collector, collector, plain
from tests.support.edge_kit import byte_llama
from tests.support.stack import Stack

SECRET_WORDS = "the queen of hearts hides an emerald"
SPANS = {
    "pdserve-router": ["text_completion model"],
    "pdserve-prefill": ["prefill"],
    "pdserve-decode": ["transfer", "decode"],
}
SKEW_S = 0.05
"""Of clocks of processes on one machine, each of which has read the time of day for itself."""


@dataclass
class Traced:
    stack: Stack
    collector: Collector
    folder: Path

    @property
    def http_url(self) -> str:
        found = re.search(r"http://[0-9.:]+", (self.folder / "router").read_text())
        assert found is not None
        return found[0]

    def lines(self, process: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / process).read_text().splitlines()]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    folder = tmp_path_factory.mktemp("logs")
    with collector() as spans:
        flags = ("--otlp-endpoint", spans.address, "--log-format", "json", "--log-level", "DEBUG")
        stack = Stack.start(
            {Role.PREFILL: 1, Role.DECODE: 1},
            router_flags=(*flags, "--http-port", "0"),
            router_log=folder / "router",
            worker_logs=folder,
            model=str(byte_llama(tmp_path_factory.mktemp("byte") / "model")),
            otlp_endpoint=spans.address,
            log_format="json",
            log_level="DEBUG",
        )
        yield Traced(stack, spans, folder)
        stack.stop()


def parent(number: int, *, sampled: bool = True) -> tuple[str, str, str]:
    """A client's trace id, span id and traceparent."""
    trace_id, span_id = f"{number:032x}", f"{number + 7:016x}"
    return trace_id, span_id, f"00-{trace_id}-{span_id}-{int(sampled):02x}"


def ask(traced: Traced, traceparent: str, prompt: str = SECRET_WORDS) -> Result:
    with Client(traced.stack.address, retry=None, metadata={"traceparent": traceparent}) as client:
        return client.generate(
            prompt, max_tokens=6, seed=2**64 - 1, temperature=0.5, ignore_eos=True, no_prefix_cache=True
        ).result()


def by_name(spans: list[Collected]) -> dict[str, Collected]:
    return {s.name.split(" ")[0]: s for s in spans}


def test_one_trace_from_the_client_to_the_last_token(traced: Traced) -> None:
    trace_id, client_span, traceparent = parent(1)
    result = ask(traced, traceparent)
    spans = traced.collector.trace(trace_id, 4)
    services: dict[str, list[str]] = {}
    for span in spans:
        services.setdefault(span.service, []).append(span.name)
    assert services == SPANS
    found = by_name(spans)
    router = found["text_completion"]
    assert router.span.parent_span_id.hex() == client_span
    for name in ("prefill", "transfer", "decode"):
        assert found[name].span.parent_span_id == router.span.span_id
        assert found[name].attributes["pdserve.request_id"] == result.request_id
    order = [found[name].times_s for name in ("text_completion", "prefill", "transfer", "decode")]
    begins = [begin for begin, _ in order]
    assert begins == sorted(begins)
    assert order[1][1] <= order[3][0] + SKEW_S, "decode begins when prefill has ended"
    assert all(end <= order[0][1] + SKEW_S for _, end in order)


def test_the_ledger_is_told_as_events(traced: Traced) -> None:
    trace_id, _, traceparent = parent(2)
    ledger = ask(traced, traceparent).ledger
    found = by_name(traced.collector.trace(trace_id, 4))
    router = found["text_completion"]
    begin_s = router.times_s[0]
    told = [
        (e.name, e.time_unix_nano / 1e9 - begin_s, plain(e.attributes)["pdserve.duration_s"])
        for e in router.span.events
    ]
    assert len(told) == len(ledger.spans)
    for (name, at_s, length_s), span in zip(told, ledger.spans, strict=True):
        assert name == f"pdserve.ledger.{span.phase}"
        assert at_s == pytest.approx(span.begin_s, abs=1e-4)
        assert length_s == pytest.approx(span.end_s - span.begin_s, abs=1e-6)
    own = {name: {e.name.rpartition(".")[2] for e in found[name].span.events} for name in found}
    assert own["prefill"] == {Phase.PREFILL_QUEUE, Phase.COMPUTE}
    assert own["transfer"] == {Phase.WIRE, Phase.VERIFY}
    assert own["decode"] == {Phase.ADMIT, Phase.FIRST_STEP}
    moved = found["transfer"].attributes
    assert moved["pdserve.transfer.path"] == ledger.transfer.path == "shm"
    assert moved["pdserve.transfer.pages"] == ledger.transfer.pages
    assert found["prefill"].attributes["pdserve.computed_tokens"] == ledger.prefill_computed_tokens


def test_names_are_those_of_the_genai_conventions(traced: Traced) -> None:
    trace_id, _, traceparent = parent(3)
    result = ask(traced, traceparent)
    router = by_name(traced.collector.trace(trace_id, 4))["text_completion"]
    told = router.attributes
    assert told["gen_ai.operation.name"] == "text_completion"
    assert told["gen_ai.provider.name"] == "pdserve"
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == "model"
    assert told["gen_ai.request.max_tokens"] == 6
    assert told["gen_ai.request.temperature"] == 0.5
    assert "gen_ai.request.seed" not in told, "it does not fit into the protocol's integers"
    assert told["gen_ai.response.id"] == result.request_id
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert told["gen_ai.usage.input_tokens"] == result.usage.prompt_tokens
    assert told["gen_ai.usage.output_tokens"] == 6
    assert told["gen_ai.response.time_to_first_chunk"] == pytest.approx(result.ledger.ttft_s)
    assert router.resource["service.instance.id"] == router.resource["pdserve.router.id"]


def test_workers_say_who_they_are(traced: Traced) -> None:
    trace_id, _, traceparent = parent(4)
    ask(traced, traceparent)
    found = by_name(traced.collector.trace(trace_id, 4))
    for name, worker in (("prefill", "prefill-0"), ("decode", "decode-0"), ("transfer", "decode-0")):
        resource = found[name].resource
        assert (resource["pdserve.worker.id"], resource["service.instance.id"]) == (worker, worker)
        assert resource["pdserve.worker.role"] == worker.partition("-")[0]
    assert found["prefill"].attributes["pdserve.peer"] == "decode-0"


def test_a_trace_comes_in_by_http_as_well(traced: Traced) -> None:
    trace_id, client_span, traceparent = parent(5)
    body = {"messages": [{"role": "user", "content": SECRET_WORDS}], "max_tokens": 4, "model": "model"}
    headers = {"traceparent": traceparent, "tracestate": "vendor=1"}
    answer = httpx2.post(f"{traced.http_url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    found = by_name(traced.collector.trace(trace_id, 4))
    assert found["chat"].name == "chat model"
    assert found["chat"].span.parent_span_id.hex() == client_span
    assert {s.span.trace_state for s in found.values()} == {"vendor=1"}


def test_what_the_caller_does_not_record_nobody_records(traced: Traced) -> None:
    silent, _, traceparent = parent(6, sampled=False)
    ask(traced, traceparent)
    loud, _, traceparent = parent(7)
    ask(traced, traceparent)
    traced.collector.trace(loud, 4)  # sent after the other's, by every process
    assert silent not in {s.trace_id for s in traced.collector.spans}


def test_without_a_parent_the_router_begins_the_trace(traced: Traced) -> None:
    asked_for = "ab" * 16
    with traced.stack.client() as client:
        client.generate("x", max_tokens=2, trace_id=asked_for).result()
    found = by_name(traced.collector.trace(asked_for, 4))
    assert found["text_completion"].span.parent_span_id == b""


def test_texts_that_are_only_looked_at_are_traced(traced: Traced) -> None:
    trace_id, client_span, traceparent = parent(11)
    with Client(traced.stack.address, retry=None, metadata={"traceparent": traceparent}) as client:
        client.embed([SECRET_WORDS])
        client.score(SECRET_WORDS, [" well"])
    spans = traced.collector.trace(trace_id, 4)
    routers = {s.span.span_id: s for s in spans if s.service == "pdserve-router"}
    assert {s.name for s in routers.values()} == {"embeddings model", "score model"}
    assert {s.span.parent_span_id.hex() for s in routers.values()} == {client_span}
    workers = [s for s in spans if s.name == "evaluate"]
    assert {s.span.parent_span_id for s in workers} == routers.keys()
    tokens = {s.attributes["pdserve.tokens"] for s in workers}
    assert tokens == {s.attributes["gen_ai.usage.input_tokens"] for s in routers.values()}


def test_a_refused_request_is_a_span_with_its_error(traced: Traced) -> None:
    trace_id, _, traceparent = parent(8)
    with pytest.raises(InvalidRequest):
        ask(traced, traceparent, prompt="")
    (span,) = traced.collector.trace(trace_id, 1)
    assert span.attributes["error.type"] == "invalid_request"
    assert span.span.status.code == span.span.status.STATUS_CODE_ERROR


def test_log_lines_of_all_processes_join_by_request_and_trace(traced: Traced) -> None:
    trace_id, _, traceparent = parent(9)
    result = ask(traced, traceparent)
    traced.collector.trace(trace_id, 4)  # spans follow the lines
    for process, message in (("router", "request"), ("prefill-0", "prefill"), ("decode-0", "decode")):
        lines = [line for line in traced.lines(process) if line.get("request_id") == result.request_id]
        (line,) = [line for line in lines if line["message"] == f"{message} ended"]
        assert line["trace_id"] == trace_id
        assert line["level"] == "INFO"
        if process != "router":
            assert (line["service"], line["worker"], line["role"]) == ("worker", process, message)
    mine = [line for line in traced.lines("router") if line.get("request_id") == result.request_id]
    assert "dispatch" in mine[0]["logger"], "DEBUG also says where it goes"
    line = mine[-1]
    assert (line["outcome"], line["completion_tokens"]) == ("length", 6)
    assert (line["prefill_worker"], line["decode_worker"]) == ("prefill-0", "decode-0")


def test_no_prompt_is_in_any_line_or_span(traced: Traced) -> None:
    trace_id, _, traceparent = parent(10)
    completion = ask(traced, traceparent).text
    traced.collector.trace(trace_id, 4)
    ids = ", ".join(str(byte) for byte in SECRET_WORDS.encode()[:8])
    said = "".join((traced.folder / name).read_text() for name in ("router", "prefill-0", "decode-0"))
    spans = "".join(str(s.span) + str(s.resource) for s in traced.collector.spans)
    for text in (SECRET_WORDS, ids, json.dumps(completion)[1:-1]):
        assert text
        assert text not in said
        assert text not in spans
