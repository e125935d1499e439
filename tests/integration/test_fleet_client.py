"""Fleets of one cluster by Ray's client server, as seats in Kubernetes keep them; stand-ins for engines."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from pdserve.cli.prometheus import Series
from pdserve.cli.recording import legend
from pdserve.errors import ConfigError, Unavailable
from pdserve.fleet.cluster import joined_ray
from pdserve.fleet.handle import FleetHandle
from pdserve.fleet.placement import workers_on
from pdserve.fleet.port import fleet_port
from pdserve.fleet.spec import CONTROL_RESOURCE, FleetSpec, group_name
from pdserve.fleet.watch import FleetWatch
from pdserve.obs.dashboards.workers import WORKERS
from pdserve.obs.port import serve_metrics
from pdserve.types import Role
from router.targets import targets
from tests.support.fleets import LIMIT_S, make_spec, pids, until
from tests.support.process_tree import command_line
from tests.support.prometheus import Scraped, prometheus
from tests.support.raycluster import RayCluster, free_ports, ray_cluster
from tests.support.raycluster import until as wait


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """A head for controllers, and one node for decode workers."""
    with ray_cluster() as made:
        made.start_head({CONTROL_RESOURCE: 1})
        made.start_node("first", {"pdserve_decode": 1})
        yield made


@pytest.fixture(scope="module")
def joined(cluster: RayCluster) -> Iterator[str]:
    """This process is a client of the cluster."""
    address = f"ray://{cluster.client}"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environ().items():
            patch.setenv(name, value)
        with joined_ray(address):
            yield address


def seat(tmp_path: Path, name: str, **more: object) -> FleetSpec:
    """What a seat wants: one decode worker on a node of its own."""
    spec = make_spec(tmp_path, {"prefill": 0, "decode": 0, "aggregated": 1})
    return dataclasses.replace(
        spec, wanted={Role.DECODE: 1}, name=name, exclusive_nodes=True, owner_lease_s=30.0, **more
    )


def test_a_wrong_token_is_refused_at_once(cluster: RayCluster) -> None:
    wrong = cluster.directory / "wrong"
    wrong.write_text(secrets.token_hex(32))
    script = "from pdserve.fleet.cluster import joined_ray; joined_ray(__import__('sys').argv[1]).__enter__()"
    done = subprocess.run(
        [sys.executable, "-c", script, f"ray://{cluster.client}"],
        env=cluster.environ() | {"RAY_AUTH_TOKEN_PATH": str(wrong)},
        capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    assert done.stderr.splitlines()[-1].endswith("ConfigError: ray_address: the cluster refused the token")


def test_addresses_that_are_none_are_told(cluster: RayCluster) -> None:
    for address in ("ray://", "ray://nowhere", "127.0.0.1"):
        with pytest.raises(ConfigError, match="must be host:port"), joined_ray(address):
            pass
    with pytest.raises(Unavailable, match="nobody listens"), joined_ray("ray://127.0.0.1:1"):
        pass


def test_a_second_worker_waits_for_a_node_and_takes_the_one_that_comes(
    cluster: RayCluster, joined: str, tmp_path: Path
) -> None:
    one = FleetHandle.start(seat(tmp_path, "pod-a"))
    two: FleetHandle | None = None
    try:
        first = pids(one.wait_serving(LIMIT_S))
        two = FleetHandle.start(seat(tmp_path, "pod-b"))
        status = until(two, lambda s: s["workers"] and s["workers"][0]["note"] == "waiting for a node")
        assert not status["enough_serving"]
        assert first.keys() == {"pod-a-decode-0"}
        cluster.start_node("second", {"pdserve_decode": 1})
        second = pids(two.wait_serving(LIMIT_S))
        assert second.keys() == {"pod-b-decode-0"}
        parents = [psutil.Process(pid).ppid() for pid in (*first.values(), *second.values())]
        assert parents[0] != parents[1]
        assert {controller_node(cluster)} == {"head"}
        with FleetWatch(one).watching(), pytest.raises(ConfigError, match="of that name already"):
            FleetHandle.start(seat(tmp_path, "pod-a"))
    finally:
        one.shutdown(1.0)
        if two is not None:
            two.shutdown(1.0)


def controller_node(cluster: RayCluster) -> str:
    """The node, by our name for it, whose raylet runs the controllers."""
    found = {
        name
        for name, node in cluster.nodes.items()
        for process in psutil.Process(node.pid).children(recursive=True)
        if "FleetController" in " ".join(command_line(process))
    }
    assert len(found) == 1
    return found.pop()


def test_the_port_tells_of_readiness_and_restarts(cluster: RayCluster, joined: str, tmp_path: Path) -> None:
    handle = FleetHandle.start(seat(tmp_path, "seen"))
    with contextlib.ExitStack() as stack:
        stack.callback(handle.shutdown, 1.0)
        watch = stack.enter_context(FleetWatch(handle).watching())
        port = stack.enter_context(fleet_port(watch, 0, "127.0.0.1")).port
        wait(lambda: get(port, "/readyz") == 200, "ready")
        assert get(port, "/livez") == 200
        scraped = stack.enter_context(watching(tmp_path, port))
        until_panel(scraped, "Restarts", {"decode": 0, "prefill": 0})
        until_panel(scraped, "Workers wanted", {"decode": 1})
        until_panel(scraped, "Ray actors by state", {"decode serving": 1, "prefill serving": 0})
        before = series(port)
        assert before["pdserve_fleet_wanted_workers", ("decode",)] == 1
        assert before["pdserve_fleet_workers", ("decode", "serving")] == 1
        assert before["pdserve_fleet_workers", ("prefill", "serving")] == 0
        assert before["pdserve_fleet_restarts_total", ("decode",)] == 0
        os.kill(pids(handle.status())["seen-decode-0"], signal.SIGKILL)
        wait(lambda: get(port, "/readyz") == 503, "not ready")
        wait(lambda: get(port, "/readyz") == 200, "ready again")
        assert series(port)["pdserve_fleet_restarts_total", ("decode",)] == 1
        assert series(port)["process_resident_memory_bytes", ()] > 0
        until_panel(scraped, "Restarts", {"decode": 1, "prefill": 0})


@contextlib.contextmanager
def watching(directory: Path, port: int) -> Iterator[Scraped]:
    """A Prometheus that finds the fleet's port in a router's list."""
    listed = {"/targets": lambda: targets("127.0.0.1:1", (), (f"127.0.0.1:{port}",))}
    server = serve_metrics(0, registry=CollectorRegistry(), pages=listed)
    (directory / "prometheus").mkdir()
    try:
        with prometheus(directory / "prometheus", f"http://127.0.0.1:{server.port}/targets") as scraped:
            yield scraped
    finally:
        server.close()


def until_panel(scraped: Scraped, title: str, want: dict[str, int]) -> None:
    """Waits until the lines of a panel of the workers' dashboard are these, whole numbers all of them."""
    (query,) = next(panel for panel in WORKERS.panels if panel.title == title).queries

    def shown(found: list[Series]) -> bool:
        lines = {legend(query.legend, each): round(each.points[-1][1]) for each in found}
        return all(lines.get(line) == value for line, value in want.items())

    scraped.until(query.promql("1h"), shown)


def test_a_worker_between_two_tries_gives_its_place_back(
    cluster: RayCluster, joined: str, tmp_path: Path
) -> None:
    """Else the node would be taken for good, or its successor would come up on the node that is drained."""
    spec = seat(tmp_path, "dying", min_backoff_s=30.0)
    dies = {role: dataclasses.replace(config, model="dies") for role, config in spec.templates.items()}
    handle = FleetHandle.start(dataclasses.replace(spec, templates=dies))
    try:
        until(handle, lambda s: s["workers"] and s["workers"][0]["state"] == "waiting")
        assert places_of("dying") == ["dying-decode-0"]
        assert handle.move("dying-decode-0", 10.0)
        until(handle, lambda s: [x["worker_id"] for x in s["workers"]] == ["dying-decode-1"])
        until(handle, lambda s: s["workers"][0]["state"] == "waiting")
        assert handle.drain("dying-decode-1")
        until(handle, lambda s: not s["workers"])
        assert places_of("dying") == []
    finally:
        handle.shutdown(1.0)


def places_of(fleet: str) -> list[str]:
    """Workers of a fleet that have a place, or wait for one."""
    import ray

    groups = ray.util.placement_group_table().values()
    names = [group["name"] for group in groups if group["state"] != "REMOVED"]
    return [name.removeprefix(group_name("")) for name in names if name.startswith(group_name(fleet))]


def get(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def series(port: int) -> dict[tuple[str, tuple[str, ...]], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {(s.name, tuple(s.labels.values())): s.value for family in families for s in family.samples}


OWNER = """
import json, signal, sys
from pdserve.fleet.cluster import joined_ray
from pdserve.fleet.handle import FleetHandle
from pdserve.fleet.spec import FleetSpec
with joined_ray(sys.argv[1]):
    fleet = FleetHandle.start(FleetSpec.from_json(sys.stdin.read()))
    status = fleet.wait_serving(60.0)
    print(json.dumps([slot["record"]["pid"] for slot in status["workers"]]), flush=True)
    while True:
        fleet.next_status(1.0)
"""


def owner(cluster: RayCluster, spec: FleetSpec) -> tuple[subprocess.Popen[str], int]:
    """A process that keeps a fleet of one worker, and that worker's process."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, f"ray://{cluster.client}"], env=cluster.environ(),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(spec.to_json())
    process.stdin.close()
    return process, int(process.stdout.readline().strip("[]\n"))


def test_a_seat_that_is_killed_is_taken_over_and_at_last_its_worker_drains(
    cluster: RayCluster, tmp_path: Path
) -> None:
    spec = dataclasses.replace(seat(tmp_path, "left"), owner_lease_s=7.0)
    first, worker = owner(cluster, spec)
    first.kill()
    first.wait()
    second, same = owner(cluster, spec)
    assert same == worker, "the worker went on while its seat started again"
    second.kill()
    second.wait()
    psutil.Process(worker).wait(30.0)
    assert (tmp_path / "left-decode-0").read_text() == f"start {worker}\ndrain {worker}\nstop {worker}\n"


def test_a_fleet_scales_without_a_restart(cluster: RayCluster, joined: str, tmp_path: Path) -> None:
    if "second" not in cluster.nodes:  # of another test of this file
        cluster.start_node("second", {"pdserve_decode": 1})
    fleet = FleetHandle.start(seat(tmp_path, "sized"))
    with contextlib.ExitStack() as stack:
        stack.callback(fleet.shutdown, 1.0)
        first = pids(fleet.wait_serving(LIMIT_S))
        stack.enter_context(FleetWatch(fleet).watching())
        for count in (2, 1):
            done = command(
                cluster,
                "scale",
                "decode",
                str(count),
                "--fleet-name",
                "sized",
                "--ray-address",
                cluster.address,
            )
            assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"{count} decode serving")
            assert pids(fleet.status()).items() >= first.items()
            assert len(pids(fleet.status())) == count
        assert [line.split()[0] for line in (tmp_path / "sized-decode-1").read_text().splitlines()] == [
            "start", "drain", "stop",
        ]  # fmt: skip
        gone = command(
            cluster, "scale", "decode", "2", "--fleet-name", "none", "--ray-address", cluster.address
        )
        assert (gone.returncode, "no pdserve fleet of that name" in gone.stderr) == (1, True)


def test_a_drained_node_gives_its_worker_to_another(cluster: RayCluster, joined: str, tmp_path: Path) -> None:
    import ray

    process, worker = owner(cluster, seat(tmp_path, "moved"))
    try:
        node = next(n["NodeID"] for n in ray.nodes() if workers_on(n["NodeID"]) == ["moved-decode-0"])
        done = command(
            cluster, "drain", "--node", node, "--ray-address", cluster.address, "--timeout-s", "30"
        )
        assert (done.returncode, done.stdout) == (
            0, "draining moved-decode-0\nno worker is left on the node; 1 drained\n",
        )  # fmt: skip
        assert not psutil.pid_exists(worker)
        wait(lambda: (tmp_path / "moved-decode-1").exists(), "the worker's successor")
    finally:
        process.kill()
        process.wait()


def test_drain_wants_to_know_where(cluster: RayCluster) -> None:
    done = command(cluster, "drain")
    assert (done.returncode, done.stderr) == (
        2, "error: config_error: here: say --here, or --node and its id\n",
    )  # fmt: skip


def test_drain_does_not_wait_for_a_head_that_is_gone(cluster: RayCluster) -> None:
    (port,) = free_ports(1)
    done = command(cluster, "drain", "--here", PDSERVE_RAY_ADDRESS="", RAY_ADDRESS=f"127.0.0.1:{port}")
    assert (done.returncode, done.stderr) == (
        1, "error: unavailable: ray_address: nobody listens there\n",
    )  # fmt: skip


def command(cluster: RayCluster, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pdserve.cli", *words],
        env=cluster.environ() | {"PDSERVE_RAY_ADDRESS": cluster.address} | variables,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
