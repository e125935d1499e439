"""The fleet on real Ray processes, with a stand-in for the engine: counts, restarts, settings, tokens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pdserve.errors import ModelError
from pdserve.fleet.cluster import local_ray
from pdserve.fleet.handle import FleetHandle
from pdserve.fleet.processes import descendants
from pdserve.fleet.spec import CONTROLLER_NAME
from pdserve.types import Role
from tests.support.fleets import LIMIT_S, make_spec, pids, until
from tests.support.process_tree import command_line

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    """One local Ray for the tests of this file; none of its processes may outlive it."""
    before = {process.pid for process in descendants()}
    terminate = signal.getsignal(signal.SIGTERM)
    os.environ["PYTHONPATH"] = str(REPO)
    with local_ray():
        assert signal.getsignal(signal.SIGTERM) == terminate
        yield
        ours = descendants(before)
        assert len(ours) >= 4
    assert [process for process in ours if process.is_running()] == []


@pytest.fixture
def fleet(ray_here: None, tmp_path: Path) -> Iterator[Callable[..., FleetHandle]]:
    """Starts a fleet of stand-ins in a fresh run directory; shut down at the end."""
    started: list[FleetHandle] = []

    def start(*, model: str = "standin", min_backoff_s: float = 0.2, **counts: int) -> FleetHandle:
        spec = make_spec(tmp_path, counts, model=model, min_backoff_s=min_backoff_s)
        started.append(FleetHandle.start(spec))
        return started[-1]

    yield start
    for handle in started:
        handle.shutdown(1.0)


def gone(pid: int) -> bool:
    try:
        psutil.Process(pid).wait(10.0)
    except psutil.NoSuchProcess:
        return True
    return True


def test_workers_have_the_settings_of_colocated_roles(fleet: Callable[..., FleetHandle]) -> None:
    handle = fleet(prefill=1, decode=1)
    status = handle.wait_serving(LIMIT_S)
    assert {slot["role"]: slot["state"] for slot in status["workers"]} == {
        "prefill": "serving",
        "decode": "serving",
    }
    record = status["workers"][0]["record"]
    assert record["peer"]["incarnation"] == 2**64 - 1
    for worker, nice in (("prefill-0", 10), ("decode-0", 0)):
        found = handle.settings(worker)
        assert found["pid"] == pids(status)[worker]
        assert (found["nice"], found["thread_nices"]) == (nice, [nice])
        assert (found["omp_wait_policy"], found["omp_num_threads"]) == ("passive", "2")
        assert (found["auth_mode"], found["gcs_patience_s"]) == ("token", "600")


def test_killed_worker_comes_back_and_controller_finds_it_after_its_own_death(
    fleet: Callable[..., FleetHandle],
) -> None:
    import ray

    handle = fleet(aggregated=2)
    first = pids(handle.wait_serving(LIMIT_S))
    os.kill(first["aggregated-0"], signal.SIGKILL)
    second = pids(until(handle, lambda s: s["all_serving"] and pids(s) != first))
    assert second["aggregated-1"] == first["aggregated-1"]
    assert handle.scale(Role.AGGREGATED, 3)["wanted"]["aggregated"] == 3
    third = pids(handle.wait_serving(LIMIT_S))

    controller = ray.get_actor(CONTROLLER_NAME)
    old = controller_pid()
    ray.kill(controller, no_restart=False)
    assert gone(old)
    status = until(FleetHandle.find(), lambda s: s["all_serving"])
    assert pids(status) == third
    assert status["wanted"]["aggregated"] == 3
    assert sum(slot["restarts"] for slot in status["workers"]) == 0


def controller_pid() -> int:
    """The controller's process, by the title Ray gives it."""
    found = [p.pid for p in descendants() if "FleetController" in " ".join(command_line(p))]
    assert len(found) == 1
    return found[0]


def test_worker_that_dies_at_every_start_backs_off(fleet: Callable[..., FleetHandle], tmp_path: Path) -> None:
    handle = fleet(model="dies", aggregated=1, min_backoff_s=0.1)
    status = until(handle, lambda s: s["workers"] and s["workers"][0]["failures"] >= 3)
    slot = status["workers"][0]
    assert slot["error"]["label"] == "worker_lost"
    assert slot["restarts"] == slot["failures"]
    starts = (tmp_path / "aggregated-0").read_text().splitlines()
    assert len(set(starts)) >= 3


def test_worker_whose_incarnation_is_over_starts_again_at_once(fleet: Callable[..., FleetHandle]) -> None:
    handle = fleet(model="retires", aggregated=1, min_backoff_s=30.0)
    status = until(handle, lambda s: s["all_serving"] and s["workers"][0]["restarts"] == 1)
    assert status["workers"][0]["failures"] == 0


def test_start_that_can_not_succeed_is_told_at_once(fleet: Callable[..., FleetHandle]) -> None:
    handle = fleet(model="broken", aggregated=1)
    with pytest.raises(ModelError, match=r"^aggregated-0: the model file can not be used$"):
        handle.wait_serving(LIMIT_S)


def test_drain_and_shutdown_drain_first_and_leave_no_worker(
    fleet: Callable[..., FleetHandle], tmp_path: Path
) -> None:
    handle = fleet(aggregated=2)
    running = pids(handle.wait_serving(LIMIT_S))
    assert handle.drain("aggregated-1")
    assert not handle.drain("unheard-0")
    status = until(handle, lambda s: len(s["workers"]) == 1)
    assert status["wanted"]["aggregated"] == 1
    assert gone(running["aggregated-1"])
    assert handle.shutdown(1.0)
    assert gone(running["aggregated-0"])
    for worker, pid in running.items():
        assert (tmp_path / worker).read_text() == f"start {pid}\ndrain {pid}\nstop {pid}\n"


JOIN = """
import sys
from pdserve.errors import PdserveError
from pdserve.fleet.cluster import joined_ray
from pdserve.fleet.handle import FleetHandle
try:
    with joined_ray(sys.argv[1]):
        print(FleetHandle.find().status()["all_serving"])
except PdserveError as err:
    print(err.label, err.message)
"""


def test_another_process_joins_with_the_token_only(fleet: Callable[..., FleetHandle]) -> None:
    import ray

    handle = fleet(aggregated=1)
    handle.wait_serving(LIMIT_S)
    address = ray.get_runtime_context().gcs_address
    answers = []
    for token in (os.environ["RAY_AUTH_TOKEN"], "0" * 64):
        result = subprocess.run(
            [sys.executable, "-c", JOIN, address],
            env={**os.environ, "RAY_AUTH_TOKEN": token},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=True,
        )
        answers.append(result.stdout.strip())
    assert answers == ["True", "config_error ray_address: the cluster refused the token"]


OWNER = """
import json, os, signal
from pathlib import Path
from pdserve.fleet.cluster import local_ray
from pdserve.fleet.processes import descendants
with local_ray():
    import ray
    ray.get(ray.remote(num_cpus=0)(lambda: os.getpid()).remote())
    print(json.dumps([p.pid for p in descendants()]), flush=True)
    signal.pause()
"""


def test_ray_dies_with_an_owner_that_is_killed() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, env=environ) as owner:
        assert owner.stdout is not None
        processes = [psutil.Process(pid) for pid in json.loads(owner.stdout.readline())]
        # Ray's two agents notice by themselves, some tens of seconds later.
        processes = [process for process in processes if "Agent" not in process.name()]
        assert len(processes) >= 4
        owner.kill()
        _, alive = psutil.wait_procs(processes, timeout=30.0)
    assert alive == []
