"""A rank's process: connects to its leader, loads its share of the model, computes one plan after the other.

What lives here: that life, from the first connection to the last step. What does not: deciding anything, the
fleet, gRPC. The process ends when its leader does, at once and however that happens.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
from dataclasses import dataclass

from pdserve.engine.runner import ModelRunner
from pdserve.errors import InternalError, PdserveError, WorkerLost
from pdserve.garbage import keep_what_is_loaded
from pdserve.kvcache.homes import Homes
from pdserve.kvcache.pool import KVPool
from pdserve.models.loader import load_model
from pdserve.parallel.shards import thread_share
from pdserve.parallel.surviving_group import SurvivingGroup
from pdserve.ranks.beats import Beats
from pdserve.ranks.config import RankConfig
from pdserve.ranks.frames import Frame, Kind, receive, send
from pdserve.ranks.meeting import RankGroup, joint_numerics, meet
from pdserve.ranks.placing import first_table, tender_of
from pdserve.ranks.plans import decode_plan
from pdserve.ranks.pools import joined_pool, own_pool, pool_pages, rank_layouts
from pdserve.ranks.tender import Tender, decode, encode

log = logging.getLogger(__name__)

EXIT_LOST = 75
"""The status of a rank whose replica is over: nothing is wrong with it."""
SERIAL = struct.Struct("<Q")
HEAD = struct.Struct("<QI")


def serve_rank(config: RankConfig) -> int:
    """Serves until the leader says stop: 0; or until it can not: 1. A lost leader ends the process."""
    work, life = _connect(config, "work"), _connect(config, "life")
    beats = Beats({0: life}, _leader_lost)
    beats.start()
    try:
        engine, pool = _load(config, work)
        keep_what_is_loaded()
        send(work, Kind.DONE, SERIAL.pack(0))
        _compute(engine, work)
        beats.close()
        pool.close()
    except WorkerLost as error:
        log.warning("this rank ends: %s", error.message)
        return EXIT_LOST
    except PdserveError as error:
        _fail(work, error)
        return 1
    except Exception:
        log.exception("rank %d failed", config.rank)
        _fail(work, InternalError("a rank failed; its log says why"))
        return 1
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engine:
    """What a rank computes with. tender: None without experts."""

    runner: ModelRunner
    tender: Tender | None
    group: RankGroup

    def step(self, body: bytes) -> tuple[Kind, bytes]:
        """Carries a plan out; the answer. Raises WorkerLost where a rank can not be spared."""
        serial, version = HEAD.unpack(body[: HEAD.size])
        if version != (0 if self.tender is None else self.tender.version):
            raise WorkerLost("the replica's leader is out of step")
        try:
            self.runner.execute(decode_plan(body[HEAD.size :]))
        except WorkerLost:
            if not isinstance(self.group, SurvivingGroup):
                raise
            return Kind.ABORTED, SERIAL.pack(serial)
        words = [] if self.tender is None else self.tender.words()
        return Kind.DONE, SERIAL.pack(serial) + (encode(words) if words else b"")

    def obey(self, frame: Frame) -> None:
        """Orders about experts. Raises WorkerLost, as `step`."""
        if self.tender is None:
            raise WorkerLost("the replica's leader is out of step")
        try:
            for order in decode(frame.body):
                self.tender.order(order, frame.fd)
        except WorkerLost:  # of a probe, the one order that exchanges rows and the last of its frame
            if not isinstance(self.group, SurvivingGroup):
                raise
        finally:
            if frame.fd is not None:
                os.close(frame.fd)

    def regroup(self, frame: Frame) -> None:
        """Joins those that are left."""
        if not isinstance(self.group, SurvivingGroup) or frame.fd is None:
            raise WorkerLost("the replica's leader is out of step")
        self.group.renew(frame.fd, json.loads(frame.body))
        os.close(frame.fd)


def _leader_lost(reason: str) -> None:
    """Beats' thread. The compute thread may be deep in a collective that nobody will finish."""
    logging.shutdown()
    os._exit(EXIT_LOST)


def _connect(config: RankConfig, channel: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(str(config.socket_path))
    except OSError as error:
        sock.close()
        raise WorkerLost("the replica's leader is gone") from error
    hello = {"rank": config.rank, "token": config.token, "channel": channel}
    send(sock, Kind.HELLO, json.dumps(hello).encode())
    return sock


def _fail(work: socket.socket, error: PdserveError) -> None:
    with contextlib.suppress(WorkerLost):
        send(work, Kind.FAILED, json.dumps({"label": error.label, "message": error.message}).encode())


def _load(config: RankConfig, work: socket.socket) -> tuple[_Engine, KVPool]:
    """Loads, makes the pool, tells the leader, meets the others, builds."""
    worker, rank = config.worker_config, config.rank
    model = load_model(worker.model, worker.dtype)
    layouts = rank_layouts(worker, model.config)
    num_pages = pool_pages(worker, layouts)
    pool = None if worker.attention_rows else own_pool(layouts[rank], num_pages)
    ready = {"model": model.digest, "numerics": joint_numerics(worker), "pages": num_pages}
    if pool is not None:
        ready["pool"] = pool.pool_id
    send(work, Kind.READY, json.dumps(ready).encode(), fd=None if pool is None else pool.fd)
    if pool is None:
        homes = Homes.over(num_pages, worker.num_homes)
        pool = joined_pool(receive(work, with_fd=True), layouts[rank], homes, rank)
    frame = receive(work, with_fd=True)
    if frame.kind is not Kind.MEET:
        raise WorkerLost("the replica's leader is out of step")
    group = meet(worker, rank, config.meeting, frame.fd)
    threads = thread_share(worker.threads, worker.tp, rank)
    table = first_table(worker, model.config)
    runner = ModelRunner(
        model,
        pool,
        deterministic=worker.deterministic,
        group=group,
        placement=table,
        attention=worker.rank_attention,
        threads=threads,
    )
    tender = None if table is None else tender_of(runner, table, rank)
    return _Engine(runner=runner, tender=tender, group=group), pool


def _compute(engine: _Engine, work: socket.socket) -> None:
    """Carries out plans in order, and orders about experts between them, until told to stop."""
    while (frame := receive(work, with_fd=True)).kind is not Kind.STOP:
        match frame.kind:
            case Kind.PLAN:
                send(work, *engine.step(frame.body))
            case Kind.ORDERS:
                engine.obey(frame)
            case Kind.REGROUP:
                engine.regroup(frame)
                send(work, Kind.REGROUP, frame.body)
            case _:
                raise WorkerLost("the replica's leader said something that a rank does not know")
