"""What `pdserve up` tells the router that it starts."""

from __future__ import annotations

import itertools
import json
import urllib.request

import pytest

from pdserve.cli.router_child import RouterChild, router_arguments
from pdserve.config import ServeConfig
from pdserve.types import Role


@pytest.mark.parametrize(
    ("fleet_port", "listed"), [(9466, ["127.0.0.1:9466"]), (0, []), (None, [])], ids=["fixed", "any", "none"]
)
def test_the_router_lists_the_port_of_the_fleet_where_it_is_known(
    fleet_port: int | None, listed: list[str]
) -> None:
    flags = router_arguments(ServeConfig(fleet_port=fleet_port).resolved(), None)
    assert [value for flag, value in itertools.pairwise(flags) if flag == "--fleet-metrics"] == listed


def test_a_started_router_lists_it() -> None:
    config = ServeConfig(port=0, metrics_port=0, http=False, fleet_port=9466).resolved()
    child = RouterChild.start(router_arguments(config, None), secret="ab" * 32)
    try:
        url = f"http://127.0.0.1:{child.metrics_port}/targets"
        with urllib.request.urlopen(url, timeout=10) as answer:
            found = json.load(answer)
    finally:
        child.kill()
    by_process = {target["labels"]["process"]: target["targets"] for target in found}
    assert by_process == {"router": [f"127.0.0.1:{child.metrics_port}"], "fleet": ["127.0.0.1:9466"]}


def test_what_processes_tell_of_themselves_is_the_same_in_all_of_them() -> None:
    config = ServeConfig(
        otlp_endpoint="http://127.0.0.1:4317", trace_sample_ratio=0.25, log_format="json", log_level="DEBUG",
        log_prompts=True,
    )  # fmt: skip
    flags = router_arguments(config.resolved(), None)
    pairs = dict(itertools.pairwise(flags))
    assert (pairs["--otlp-endpoint"], pairs["--trace-sample-ratio"]) == ("http://127.0.0.1:4317", "0.25")
    assert (pairs["--log-format"], pairs["--log-level"]) == ("json", "DEBUG")
    assert "--log-prompts" in flags
    worker = config.resolved().worker(Role.DECODE, secret="", routers=(), run_dir="")
    for name in ("otlp_endpoint", "trace_sample_ratio", "log_format", "log_level", "log_prompts"):
        assert getattr(worker, name) == getattr(config, name)
