"""What every process of ours tells about itself: settings that routers, workers and `pdserve up` share."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.config.fields import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySettings:
    """Base of the configurations of routers, workers and of `pdserve up` and `pdserve fleet`."""

    vllm_metrics: bool = setting(
        False, help="Also serve the metrics under vLLM's names, for dashboards and autoscalers made for it."
    )
    otlp_endpoint: str = setting(
        "",
        help="Where spans go, such as http://127.0.0.1:4317 (OTLP over gRPC); needs the extra otel; "
        "empty: there are no spans.",
    )
    trace_sample_ratio: float = setting(
        1.0,
        help="Share of requests that get spans, of those whose caller has not decided: a traceparent's flag "
        "goes before.",
        minimum=0,
        maximum=1,
    )
    log_format: str = setting("text", help="Log lines for people, or JSON objects.", choices=("text", "json"))
    log_level: str = setting(
        "INFO", help="The least level that is logged.", choices=("DEBUG", "INFO", "WARNING", "ERROR")
    )
    log_prompts: bool = setting(False, help="Let log lines hold prompts and answers.")
