"""Starts the pods of rendered manifests on this machine, as a kubelet and KubeRay would.

For root, every pod has a network namespace and mounts of its own: a root that can not be written, its
volumes, no capabilities, names of Services in its hosts file. Others' pods are on loopback, see there.
Commands, arguments, environment, settings, volumes, sysctls, probes and hooks are those of the manifests.
Not here: schedulers, autoscalers, images.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.fleet.processes import adopt_orphans, end
from pdserve.fleet.rundirs import sweep
from tests.support.kept import over_tmp
from tests.support.loopback import Loopback, Place, addresses, ports
from tests.support.machines import available
from tests.support.manifests import Manifest, only, pods
from tests.support.netns import Namespace, Network, network
from tests.support.raycluster import LIMIT_S, family, until
from tests.support.source_tree import ROOT

BASE = {"PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
BASE |= {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
# All pods share this machine: what takes a second on a node of its own takes many here.
BASE |= {"RAY_raylet_start_wait_time_s": "120", "RAY_gcs_server_request_timeout_seconds": "120"}
NO_CAPABILITIES = "setpriv --no-new-privs --bounding-set=-all --inh-caps=-all"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdserve"


@dataclass
class Pod:
    """A running pod of one container."""

    name: str
    template: Manifest
    place: Namespace | Loopback
    process: subprocess.Popen[bytes]
    environ: dict[str, str]
    log: Path

    @property
    def container(self) -> Manifest:
        """The manifest's container."""
        found: Manifest = self.template["spec"]["containers"][0]
        return found

    @property
    def address(self) -> str:
        """Where others reach it."""
        return self.place.address

    def port(self, declared: int) -> int:
        """Where it listens for what its manifest calls by this port."""
        return self.place.port(declared)

    def passes(self, probe: str) -> bool:
        """Whether a probe such as "readinessProbe" succeeds now."""
        wanted = self.container[probe]
        limit_s = float(wanted.get("timeoutSeconds", 1))
        if "httpGet" in wanted:
            return self._get(wanted["httpGet"], limit_s)
        target = f"{self.address}:{self.port(wanted['grpc']['port'])}"
        request = health_pb2.HealthCheckRequest(service=wanted["grpc"].get("service", ""))
        with grpc.insecure_channel(target) as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=limit_s)
            except grpc.RpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _get(self, wanted: Manifest, limit_s: float) -> bool:
        named = {port["name"]: port["containerPort"] for port in self.container["ports"]}
        port = self.port(named.get(wanted["port"], wanted["port"]))
        try:
            url = f"http://{self.address}:{port}{wanted['path']}"
            with urllib.request.urlopen(url, timeout=limit_s) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def wait_ready(self) -> Pod:
        """Returns once its readiness probe succeeds; fails at once if the container ended."""

        def ready() -> bool:
            assert self.process.poll() is None, f"{self.name} ended: {self.tail()}"
            return self.passes("readinessProbe")

        try:
            until(ready, self.name, 2 * LIMIT_S)
        except AssertionError:
            print(f"--- {self.name}: {self.tail()}")
            raise
        return self

    def tail(self) -> str:
        """The end of what it wrote."""
        return self.log.read_text("utf-8", "replace")[-3000:]

    def execute(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Runs a command in the container, as hooks are."""
        if isinstance(self.place, Loopback):
            command = [self.place.value(part) for part in command]
        else:
            inside = ["nsenter", f"--target={self.process.pid}", "--net", "--mount", "--wd=/"]
            command = [*inside, *NO_CAPABILITIES.split(), *command]
        return subprocess.run(
            command,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    def terminate(self) -> str:
        """As when the pod is deleted: the hook, SIGTERM, and its grace. What the hook wrote. Raises
        AssertionError if the hook fails or the container does not end by itself."""
        hook = self.container.get("lifecycle", {}).get("preStop", {})
        said = ""
        if "exec" in hook:
            done = self.execute(hook["exec"]["command"])
            assert done.returncode == 0, (done.stdout, done.stderr)
            said = done.stdout
        processes = family(self.process.pid)
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(self.template["spec"]["terminationGracePeriodSeconds"])
        finally:
            end(processes, 0.0)
        return said

    def kill(self) -> None:
        """Ends everything in it at once."""
        end(family(self.process.pid), 0.0)
        self.process.wait()


@dataclass
class Kubelet:
    """Pods by name. directory: for their files; network: None for loopback; services: places behind names."""

    directory: Path
    network: Network | None
    pods: dict[str, Pod] = field(default_factory=dict)
    services: dict[str, list[Place]] = field(default_factory=dict)
    _addresses: Iterator[str] = field(default_factory=addresses)
    _ports: Iterator[int] = field(default_factory=ports)
    _count: int = 0

    def start(self, manifests: list[Manifest], kind: str, name: str) -> Pod:
        """A pod of "Deployment/…" or "RayCluster/…/group" of the manifests, with a name of its own."""
        template = dict(pods(manifests))[kind]
        self._count += 1
        home = self.directory / str(self._count)  # short: Ray's sockets lie below
        home.mkdir()
        container = template["spec"]["containers"][0]
        volumes = {v["name"]: _volume(manifests, v, home) for v in template["spec"]["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        place = self._place(mounts)
        environ = _environment(container, name)
        command = [*container.get("command", []), *container.get("args", [])]
        if kind.startswith("RayCluster/"):
            environ |= _ray_environment(manifests)
            command = ray_start(manifests, kind, environ)
            if kind.endswith("/head"):
                self._serve(environ["RAY_ADDRESS"].partition(":")[0], [place])
        command = [_expanded(part, environ) for part in command]
        if isinstance(place, Loopback):
            if command[:2] == ["ray", "start"]:
                command = place.ray_start(command)
                environ |= place.ray_environment()
            command = [place.value(part) for part in command]
            environ = {key: place.value(value) for key, value in environ.items()} | place.environment()
        else:
            command = self._inside(place, template, mounts, home, command)
        environ = BASE | environ
        log = home / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, env=environ, cwd="/", stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )
        pod = self.pods[name] = Pod(name, template, place, process, environ, log)
        return pod

    def serve(self, name: str, *behind: Pod) -> None:
        """A Service's name stands for these pods: from now on in all pods, on loopback in those to come."""
        self._serve(name, [pod.place for pod in behind])

    def _serve(self, name: str, behind: list[Place]) -> None:
        self.services[name] = behind
        lines = [f"{place.address} {name}" for name, places in self.services.items() for place in places]
        # In place: pods have this very file mounted.
        with (self.directory / "hosts").open("w") as hosts:
            hosts.write("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def _place(self, mounts: dict[str, Path]) -> Namespace | Loopback:
        if self.network is not None:
            return self.network.add()
        return Loopback(next(self._addresses), mounts, self.services, self._ports)

    def _inside(
        self,
        namespace: Namespace,
        template: Manifest,
        mounts: dict[str, Path],
        home: Path,
        command: list[str],
    ) -> list[str]:
        """The command that runs a command in a namespace, with its mounts and without capabilities."""
        script = [
            "set -e",
            *(f"sysctl -qw {s['name']}={shlex.quote(s['value'])}" for s in _sysctls(template)),
            *self._mounts(template, mounts, home),
            f"cd / && exec {NO_CAPABILITIES} {shlex.join(command)}",
        ]
        return ["ip", "netns", "exec", namespace.name, "sh", "-c", "\n".join(script)]

    def remove(self, pod: Pod) -> None:
        """Forgets a pod that has ended."""
        del self.pods[pod.name]

    def _mounts(self, template: Manifest, mounts: dict[str, Path], home: Path) -> list[str]:
        """Shell lines that give the container its files. The root and what lies on it can not be written."""
        layers = home / "layers"
        layers.mkdir()
        lines = ["mount --make-rprivate /", f"mount -t tmpfs tmpfs {layers}"]
        for top in ("etc", "var"):
            lines.append(f"mkdir {layers}/{top} {layers}/{top}-work")
            options = f"lowerdir=/{top},upperdir={layers}/{top},workdir={layers}/{top}-work"
            lines.append(f"mount -t overlay overlay -o {options} /{top}")
        wanted = template["spec"]["containers"][0]["volumeMounts"]
        for mount in sorted(wanted, key=lambda mount: mount["mountPath"] == "/tmp"):
            path = mount["mountPath"]
            lines += [f"mkdir -p {path}"] if path.startswith(("/etc/", "/var/")) else []
            bind = f"mount --bind {mounts[path]} {path}"
            if path == "/tmp":  # the last one: it hides our own files
                lines += [
                    f"mount --bind {self.directory}/{name} /etc/{name}" for name in ("hosts", "resolv.conf")
                ]
                lines += over_tmp(bind)
                continue
            lines.append(bind)
            if mount.get("readOnly"):
                lines.append(f"mount -o remount,bind,ro {path}")
        return [
            *lines,
            "mount -o remount,bind,ro /etc",
            "mount -o remount,bind,ro /var",
            "mount -o remount,bind,ro /",
        ]


@contextmanager
def kubelet(directory: Path) -> Iterator[Kubelet]:
    """A kubelet whose pods end with the block. directory: a short path, Ray's sockets lie below."""
    adopt_orphans()
    with network() if available() else nullcontext() as net:
        made = Kubelet(directory, net)
        made.serve("pods.invalid")
        # Nobody listens: what the hosts file does not know is unknown at once.
        (directory / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        try:
            yield made
        finally:
            for pod in reversed(list(made.pods.values())):
                pod.kill()
            sweep()  # what the killed leave in a /tmp that is not theirs alone


def ray_start(manifests: list[Manifest], kind: str, environ: dict[str, str]) -> list[str]:
    """The command that KubeRay makes of a group's rayStartParams."""
    spec, group = only(manifests, "RayCluster")["spec"], kind.rpartition("/")[2]
    if group == "head":
        found, flags = spec["headGroupSpec"], ["--head", "--dashboard-host=0.0.0.0"]
    else:
        (found,) = [one for one in spec["workerGroupSpecs"] if one["groupName"] == group]
        flags = [f"--address={environ['RAY_ADDRESS']}"]
    parameters = dict(found["rayStartParams"])
    limits = found["template"]["spec"]["containers"][0]["resources"]["limits"]
    parameters.setdefault("num-cpus", str(limits["cpu"]))
    flags += [f"--{name}={shlex.split(value)[0]}" for name, value in parameters.items()]
    return ["ray", "start", "--block", *flags]


def _environment(container: Manifest, pod_name: str) -> dict[str, str]:
    environ = {}
    for entry in container.get("env", []):
        if "value" in entry:
            environ[entry["name"]] = entry["value"]
        else:
            assert entry["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}, entry
            environ[entry["name"]] = pod_name
    return environ


def _ray_environment(manifests: list[Manifest]) -> dict[str, str]:
    cluster = only(manifests, "RayCluster")
    options = cluster["spec"]["authOptions"]
    secret = only(manifests, "Secret", options["secretName"])
    host = f"{cluster['metadata']['name']}-head-svc.{cluster['metadata']['namespace']}.svc"
    return {
        "RAY_AUTH_MODE": options["mode"],
        "RAY_AUTH_TOKEN": _decoded(secret)["auth_token"],
        "RAY_ADDRESS": f"{host}:6379",
        "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
    }


def _volume(manifests: list[Manifest], volume: Manifest, home: Path) -> Path:
    place = home / volume["name"]
    place.mkdir()
    files: dict[str, str] = {}
    if "configMap" in volume:
        files = only(manifests, "ConfigMap", volume["configMap"]["name"])["data"]
    elif "secret" in volume:
        found = _decoded(only(manifests, "Secret", volume["secret"]["secretName"]))
        files = {item["path"]: found[item["key"]] for item in volume["secret"]["items"]}
    else:
        assert "emptyDir" in volume, volume
        place.chmod(0o1777)
        if (
            volume["name"] == "cache" and CACHE.is_dir()
        ):  # the image has the kernels that this machine has built
            shutil.copytree(CACHE, place / CACHE.name)
    for name, text in files.items():
        (place / name).write_text(text)
        (place / name).chmod(volume.get("secret", {}).get("defaultMode", 0o644))
    return place


def _expanded(text: str, environ: dict[str, str]) -> str:
    for name, value in environ.items():
        text = text.replace(f"$({name})", value)
    return text


def _sysctls(template: Manifest) -> list[dict[str, str]]:
    found: list[dict[str, str]] = template["spec"].get("securityContext", {}).get("sysctls", [])
    return found


def _decoded(secret: Manifest) -> dict[str, Any]:
    return {key: b64decode(value).decode() for key, value in secret["data"].items()}
