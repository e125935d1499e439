"""Joining Ray: a local head that is ours, or somebody's cluster. Token authentication in both cases.

The local head binds loopback only and its processes are children of ours with the kernel's parent-death
signal, so that they end with us however we end. Ray is imported here for the first time, after its
environment is set: several of its switches are read at import.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from pdserve.errors import ConfigError, Unavailable
from pdserve.fleet.processes import adopt_orphans, descendants, end
from pdserve.fleet.rundirs import run_directory
from pdserve.fleet.spec import NAMESPACE, WORKER_RESOURCE

log = logging.getLogger("pdserve.fleet")

OBJECT_STORE_BYTES = 100 * 2**20
"""Ray objects carry our JSON only; the default would take a third of the machine's memory."""
SHUTDOWN_PATIENCE_S = 15.0
END_PATIENCE_S = 3.0
PROBE_TIMEOUT_S = 5.0
CLIENT_PATIENCE_S = 10.0
"""`ray start` says that Ray has started before its client server listens."""
CLIENT_PAUSE_S = 0.2
KNOCK_TIMEOUT_S = 30.0
"""A head that has just been started, or has many seats to welcome, takes its time."""
CLIENT_TRIES = 3
CLIENT = "ray://"
"""Before an address of Ray's client server."""
_SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Actors outlive a controller store that is away for this long; the default is a minute.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
}
# The name tells of other systems; what it does is to keep every Ray listener on the loopback address.
_LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
_TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_NOT_FOR_CHILDREN = ("RAY_AUTH_TOKEN",)


def local_environment(environ: MutableMapping[str, str]) -> None:
    """Sets what the Ray processes of a local head need, with this process's own random token."""
    environ.update(_SETTINGS | _LOOPBACK_ONLY)
    environ.pop("RAY_AUTH_TOKEN_PATH", None)
    environ["RAY_AUTH_TOKEN"] = _own_token()


@functools.cache
def _own_token() -> str:
    """One for the life of the process: Ray reads its token once."""
    return secrets.token_hex(32)


def join_environment(environ: MutableMapping[str, str]) -> None:
    """Sets what a client of a cluster needs. Raises ConfigError if there is no token to show."""
    environ.update(_SETTINGS | {"RAY_NUM_REDIS_GET_RETRIES": "3"})
    default = Path.home() / ".ray" / "auth_token"
    if not any(environ.get(name) for name in _TOKEN_VARIABLES) and not default.exists():
        raise ConfigError(
            "ray_address: joining a cluster needs its token; set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
        )


def child_environment(environ: MutableMapping[str, str]) -> dict[str, str]:
    """The environment of a child process that has nothing to do with Ray."""
    return {name: value for name, value in environ.items() if name not in _NOT_FOR_CHILDREN}


@contextlib.contextmanager
def local_ray() -> Iterator[Path]:
    """Starts a Ray head on this machine, joins it, and ends all its processes on the way out.

    Gives the directory of its logs, which goes with it.

    Call it in the main thread: the parent-death signal follows the thread that starts a process.
    """
    before = {process.pid for process in descendants()}
    adopt_orphans()
    with _restored(os.environ), run_directory("ray") as temp:
        local_environment(os.environ)
        try:
            _init(
                address="local",
                _temp_dir=str(temp),
                num_cpus=1,
                resources={WORKER_RESOURCE: 1.0},
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
            )
            yield temp / "session_latest" / "logs"
        finally:
            _leave(before)


@contextlib.contextmanager
def _restored(environ: MutableMapping[str, str]) -> Iterator[None]:
    before = dict(environ)
    try:
        yield
    finally:
        environ.clear()
        environ.update(before)


@contextlib.contextmanager
def joined_ray(address: str) -> Iterator[None]:
    """Joins a running cluster for the time of the block, from the main thread. Raises PdserveError.

    address: host:port of the cluster, for a process on one of its nodes; "auto" for the node we are on;
    ray://host:port of Ray's client server, from anywhere.
    """
    if address != "auto":
        _probe(address)
    with _restored(os.environ):
        join_environment(os.environ)
        if address.startswith(CLIENT):
            _knock(address.removeprefix(CLIENT))
            _init_client(address)
        else:
            _init(address=address)
        try:
            yield
        finally:
            _disconnect()


def ray_here() -> str:
    """The cluster that this machine is part of. In a pod of KubeRay's Ray's own variable names the head: with
    its address a dead one is noticed at once, where Ray by itself would try it for minutes."""
    return os.environ.get("RAY_ADDRESS") or "auto"


def _init(**options: object) -> None:
    import ray

    terminate = signal.getsignal(signal.SIGTERM)
    # A terminal that closes hangs up on its whole process group. Ray's processes, which start with what we
    # ignore, must outlive that: the drain needs them, and we end them ourselves.
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        ray.init(
            namespace=NAMESPACE,
            log_to_driver=False,
            configure_logging=False,
            logging_level=logging.ERROR,
            **options,
        )
    except (OSError, ray.exceptions.RayError, RuntimeError) as err:
        log.debug("ray.init", exc_info=err)
        if any("InvalidAuthToken" in str(link) for link in _chain(err)):
            raise ConfigError("ray_address: the cluster refused the token") from None
        raise Unavailable("Ray can not be reached, or did not start") from None
    finally:
        # Ray puts a handler of its own there, which ends the process without a word to us.
        signal.signal(signal.SIGTERM, terminate)
        signal.signal(signal.SIGHUP, hangup)


def _init_client(address: str) -> None:
    """Ray's client server forks a server for each client, which may die before it has begun; again, then."""
    for left in reversed(range(CLIENT_TRIES)):
        try:
            _init(address=address)
        except Unavailable:
            if not left:
                raise
            log.warning("Ray's client server did not take us; trying again")
            _disconnect()
        else:
            return


def _chain(err: BaseException | None) -> Iterator[BaseException]:
    while err is not None:
        yield err
        err = err.__cause__ or err.__context__


def _probe(address: str) -> None:
    """Ray itself would take minutes to find out that nobody listens."""
    host, _, port = address.removeprefix(CLIENT).rpartition(":")
    until = time.monotonic() + (CLIENT_PATIENCE_S if address.startswith(CLIENT) else 0.0)
    while True:
        try:
            return socket.create_connection((host, int(port)), PROBE_TIMEOUT_S).close()
        except ValueError:
            raise ConfigError("ray_address: must be host:port or ray://host:port") from None
        except OSError:
            if time.monotonic() >= until:
                raise Unavailable("ray_address: nobody listens there") from None
        time.sleep(CLIENT_PAUSE_S)


def _knock(address: str) -> None:
    """Shows our token to Ray's client server. Ray itself would try a wrong one again for a minute."""
    import grpc
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import ray_client_pb2, ray_client_pb2_grpc

    with init_grpc_channel(address) as channel:
        request = ray_client_pb2.ClusterInfoRequest(type=ray_client_pb2.ClusterInfoType.PING)
        try:
            driver = ray_client_pb2_grpc.RayletDriverStub(channel)
            driver.ClusterInfo(request, timeout=KNOCK_TIMEOUT_S, wait_for_ready=True)
        except grpc.RpcError as err:
            log.debug("Ray's client server", exc_info=err)
            code = err.code() if isinstance(err, grpc.Call) else None
            if code is grpc.StatusCode.UNAUTHENTICATED:
                raise ConfigError("ray_address: the cluster refused the token") from None
            raise Unavailable("ray_address: no Ray client server answers there") from None


def _leave(before: set[int]) -> None:
    """Shuts Ray down; what does not end by itself is killed, also when the shutdown hangs."""
    ours = descendants(before)
    hurry = threading.Timer(SHUTDOWN_PATIENCE_S, lambda: end(ours, 0.0))
    hurry.daemon = True
    hurry.start()
    try:
        _disconnect()
    finally:
        hurry.cancel()
        # Asked again: processes that lost their parent meanwhile are our children now.
        killed = end([*ours, *descendants(before)], END_PATIENCE_S)
        log.debug("Ray is down; %d processes had to be killed", killed)


def _disconnect() -> None:
    """If Ray was imported: a signal may end its import, which can not be begun again in this process."""
    ray = sys.modules.get("ray")
    if ray is not None:
        ray.shutdown()
