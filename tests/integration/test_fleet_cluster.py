"""The fleet on a cluster of two raylets: each worker on its own, the whole on one machine."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pdserve.cli.router_child import RouterChild
from pdserve.client import Client
from pdserve.config import ServeConfig, resolve
from pdserve.fleet.cluster import joined_ray, local_environment
from pdserve.fleet.handle import FleetHandle
from pdserve.fleet.processes import adopt_orphans, descendants, end
from pdserve.fleet.spec import WORKER_RESOURCE, FleetSpec
from pdserve.types import Role
from tests.support.fleets import LIMIT_S, make_spec
from tests.support.stack import wait_serving

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def two_raylets(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a cluster of two raylets with room for one worker each."""
    environ = dict(os.environ)
    local_environment(environ)
    for name, value in {**environ, "PYTHONPATH": str(REPO)}.items():
        monkeypatch.setenv(name, value)
    from ray.cluster_utils import Cluster

    adopt_orphans()
    before = {process.pid for process in descendants()}
    node = {
        "num_cpus": 1,
        "resources": {WORKER_RESOURCE: 1},
        "object_store_memory": 80 * 2**20,
        "include_dashboard": False,
        # Ray puts Unix sockets below: the path must be short.
        "temp_dir": tempfile.mkdtemp(prefix="pdserve-ray-", dir="/tmp"),
    }
    # Ray's test cluster notes its address below its default directory, which a fresh machine lacks.
    Path("/tmp/ray").mkdir(exist_ok=True)
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(**{name: value for name, value in node.items() if name != "include_dashboard"})
        yield cluster.address
        ours = descendants(before)
    finally:
        cluster.shutdown()
        end(descendants(before), 5.0)
        shutil.rmtree(str(node["temp_dir"]))
    assert [process for process in ours if process.is_running()] == []


def test_workers_are_placed_on_different_raylets(two_raylets: str, tmp_path: Path) -> None:
    with joined_ray(two_raylets):
        spec = make_spec(tmp_path, {"prefill": 1, "decode": 1})
        fleet = FleetHandle.start(dataclasses.replace(spec, resource_share=1.0))
        try:
            fleet.wait_serving(LIMIT_S)
            found = [fleet.settings(worker) for worker in ("prefill-0", "decode-0")]
        finally:
            fleet.shutdown(1.0)
    assert found[0]["node"] != found[1]["node"]
    assert [settings["auth_mode"] for settings in found] == ["token", "token"]


def test_a_real_model_is_served_by_workers_on_different_raylets(two_raylets: str) -> None:
    secret = "cd" * 32
    flags: dict[str, object] = {"dtype": "float32", "deterministic": True, "kv_memory": 256 * 2**20}
    serve = resolve(ServeConfig, flags=flags).config.resolved()
    run_dir = tempfile.mkdtemp(prefix="pdserve-", dir="/tmp")
    router = RouterChild.start(["--port", "0", "--metrics-port", "0", "--http-port", "0"], secret)
    try:
        templates = {
            role: serve.worker(role, secret=secret, routers=(router.address,), run_dir=run_dir)
            for role in Role
        }
        spec = FleetSpec(wanted=serve.wanted(), templates=templates, resource_share=1.0)
        with joined_ray(two_raylets):
            fleet = FleetHandle.start(spec)
            try:
                fleet.wait_serving(LIMIT_S)
                pids = [fleet.settings(worker)["pid"] for worker in ("prefill-0", "decode-0")]
                raylets = {psutil.Process(pid).ppid() for pid in pids}
                wait_serving(router.address)
                with Client(router.address) as client:
                    stream = client.generate("The capital of France is", max_tokens=4, temperature=0.0)
                    result = stream.result()
            finally:
                fleet.shutdown(5.0)
    finally:
        router.process.kill()
        router.process.wait()
        shutil.rmtree(run_dir, ignore_errors=True)
    assert len(raylets) == 2
    assert "Paris" in result.text
    assert (result.ledger.decode_computed_prompt_tokens, result.ledger.transfer.pages) == (0, 1)
