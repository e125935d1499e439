"""What the rendered chart starts, started: Ray, seats, workers and routers as real processes, each pod with a
network and mounts of its own (root) or on loopback (others); then scaled, drained and changed under load,
without one failed request.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pdserve.client import Client, FleetStatus
from tests.support.chart import render
from tests.support.kubelet import Kubelet, Pod, kubelet
from tests.support.manifests import Manifest
from tests.support.raycluster import family, listens, until

SETTINGS = (
    "router.replicas=2", "prefill.replicas=2", "decode.replicas=2", "prefill.cpus=1", "decode.cpus=1",
    "engine.kv_memory=64MiB",
)  # fmt: skip
CHANGED = "engine.kv_memory=96MiB"
DOMAIN = "serving.svc"
SEATS = {"prefill": "Deployment/demo-pdserve-prefill", "decode": "Deployment/demo-pdserve-decode"}
PROMPT = "The capital of France is"


@dataclass
class Deployed:
    """The pods of a release. manifests: what new pods are made of."""

    kubelet: Kubelet
    manifests: list[Manifest]
    routers: list[Pod] = field(default_factory=list)
    seats: dict[str, list[Pod]] = field(default_factory=lambda: {"prefill": [], "decode": []})
    nodes: dict[str, list[Pod]] = field(default_factory=lambda: {"prefill": [], "decode": []})
    count: int = 0

    def start(self, kind: str, name: str) -> Pod:
        self.count += 1
        return self.kubelet.start(self.manifests, kind, f"{name}-{self.count}")

    def add_node(self, role: str) -> Pod:
        """Another Ray node of a group."""
        self.nodes[role].append(self.start(f"RayCluster/demo-pdserve/{role}", f"demo-pdserve-node-{role}"))
        return self.nodes[role][-1]

    def add_seat(self, role: str) -> Pod:
        """Another replica of a role's Deployment."""
        self.seats[role].append(self.start(SEATS[role], f"demo-pdserve-{role}"))
        return self.seats[role][-1]

    def remove_node(self, role: str, node: Pod) -> str:
        """One node fewer; returns when it has drained and ended. What its hook wrote."""
        self.nodes[role].remove(node)
        said = node.terminate()
        self.kubelet.remove(node)
        return said

    def spare_nodes(self, role: str) -> list[Pod]:
        """The nodes that no worker is on."""
        busy = {worker.record.pid for worker in self.status(self.addresses()[0]).workers}
        return [n for n in self.nodes[role] if busy.isdisjoint(p.pid for p in family(n.process.pid))]

    def remove_seat(self, role: str) -> None:
        """One replica fewer; returns when it has drained and ended."""
        seat = self.seats[role].pop(0)
        seat.terminate()
        assert seat.process.returncode == 0, seat.tail()
        self.kubelet.remove(seat)

    def addresses(self) -> list[str]:
        """The routers' gRPC addresses."""
        return [f"{router.address}:{router.port(50051)}" for router in self.routers]

    def status(self, address: str) -> FleetStatus:
        """What one router knows."""
        with Client(address) as client:
            return client.get_status()

    def workers(self) -> dict[str, int]:
        """Pages of each worker that all routers send work to."""
        views = [
            {w.record.peer.worker_id: w.record.pool_pages for w in self.status(a).workers
             if not w.suspect and w.load.ready and not w.load.draining}
            for a in self.addresses()
        ]  # fmt: skip
        return {name: pages for name, pages in views[0].items() if all(name in view for view in views)}

    def settled(self) -> dict[str, int]:
        """The workers, once there is exactly one for each seat."""
        wanted = {pod.name for pods in self.seats.values() for pod in pods}

        def seen() -> bool:
            names = [name.rsplit("-", 2)[0] for name in self.workers()]
            return sorted(names) == sorted(wanted)

        until(seen, "a worker for each seat")
        return self.workers()


@pytest.fixture(scope="module")
def deployed() -> Iterator[Deployed]:
    """The CPU demo with two routers, two workers of each role, and a decode node to spare."""
    manifests = render("cpu-demo", *SETTINGS)
    directory = Path(tempfile.mkdtemp(prefix="pdk-", dir="/tmp"))
    try:
        with kubelet(directory) as runs:
            made = Deployed(runs, manifests)
            head = made.start("RayCluster/demo-pdserve/head", "demo-pdserve-head")
            made.routers = [made.start("Deployment/demo-pdserve-router", "demo-pdserve-router") for _ in "ab"]
            runs.serve(f"demo-pdserve-routers.{DOMAIN}", *made.routers)
            head.wait_ready()
            # Pods that come earlier end and are started again by their kubelet; here none may end.
            until(lambda: listens(head.address, head.port(10001)), "Ray's client server")
            until(lambda: "Ray runtime started" in head.tail(), "Ray's head")
            # One after the other: they share two cores, and Ray gives up on what is slow to start.
            for role in ("prefill", "prefill", "decode", "decode", "decode"):
                made.add_node(role).wait_ready()
            for role in ("prefill", "prefill", "decode"):
                made.add_seat(role).wait_ready()
            for router in made.routers:
                router.wait_ready()
            yield made
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class Load:
    """Requests without a pause on every router, until it is told to stop."""

    def __init__(self, addresses: list[str]) -> None:
        self._over = threading.Event()
        self._done = threading.Condition()
        self.completed = 0
        self.failed: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(address,)) for address in addresses]

    def _run(self, address: str) -> None:
        with Client(address, retry=None) as client:
            while not self._over.is_set():
                try:
                    text = client.generate(PROMPT, max_tokens=6, temperature=0.0).result().text
                    wrong = "" if "Paris" in text else text
                except Exception as error:
                    wrong = repr(error)
                with self._done:
                    self.failed += [wrong] if wrong else []
                    self.completed += 1
                    self._done.notify_all()

    def wait(self, more: int) -> None:
        """Returns when so many more requests are over."""
        with self._done:
            wanted = self.completed + more
            assert self._done.wait_for(lambda: self.completed >= wanted, 60.0)

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            self.wait(4)
            yield
            self.wait(4)
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join()
        assert self.failed == []


def test_every_router_serves_by_both_roles(deployed: Deployed) -> None:
    workers = deployed.settled()
    assert sorted(name.rsplit("-", 2)[1] for name in workers) == ["decode", "prefill", "prefill"]
    for address in deployed.addresses():
        with Client(address) as client:
            result = client.generate(PROMPT, max_tokens=4, temperature=0.0).result()
        assert "Paris" in result.text
        assert result.ledger.decode_computed_prompt_tokens == 0


def test_probes_hold_for_every_pod(deployed: Deployed) -> None:
    failed = [
        (pod.name, probe)
        for pod in deployed.kubelet.pods.values()
        for probe in ("startupProbe", "readinessProbe", "livenessProbe")
        if not pod.passes(probe)
    ]
    assert failed == []


def test_decode_scales_from_one_to_two_under_load(deployed: Deployed) -> None:
    load = Load(deployed.addresses())
    with load.running():
        deployed.add_seat("decode").wait_ready()
        assert len(deployed.settled()) == 4
        load.wait(6)


def test_a_drained_node_hands_its_worker_to_the_spare_one(deployed: Deployed) -> None:
    before = deployed.settled()
    load = Load(deployed.addresses())
    (spare,) = deployed.spare_nodes("decode")
    with load.running():
        # One that no worker is on goes just so, and another one comes in its place.
        assert "0 drained" in deployed.remove_node("decode", spare)
        deployed.add_node("decode").wait_ready()
        assert "1 drained" in deployed.remove_node("decode", deployed.nodes["decode"][0])
        after = deployed.settled()
    moved = after.keys() - before.keys()
    assert [name.rpartition("-")[2] for name in moved] == ["1"]


def test_a_changed_setting_reaches_every_worker_one_by_one(deployed: Deployed) -> None:
    before = deployed.settled()
    secrets = [manifest for manifest in deployed.manifests if manifest["kind"] == "Secret"]
    changed = render("cpu-demo", *SETTINGS[:-1], CHANGED)
    deployed.manifests = [m for m in changed if m["kind"] != "Secret"] + secrets
    load = Load(deployed.addresses())
    with load.running():
        for role in ("prefill", "prefill", "decode", "decode"):
            deployed.remove_seat(role)
            deployed.add_seat(role).wait_ready()
            deployed.settled()
    after = deployed.settled()
    assert not before.keys() & after.keys()
    assert set(after.values()) == {max(before.values()) * 3 // 2}


def test_decode_scales_back_to_one_under_load(deployed: Deployed) -> None:
    with Load(deployed.addresses()).running():
        deployed.remove_seat("decode")
        assert len(deployed.settled()) == 3
