"""A replica of several ranks, as its leader starts, watches and ends it.

What lives here: the order of starting, and ending as a unit. What does not: processes' own ways (`children`,
`pdserve.fleet.rank_actor`), steps (`runner`), a rank's life (`member`).

    leader                                     rank r
    launch all ranks                           connect: work, life
    load the model                             load the model, make the pool
    admit every rank                ◀── READY  (digest, numerics, the pool's descriptor)
                                   [POOL ──▶   the one pool's, where ranks have sequences of their own]
                                    MEET ──▶   (the group's shared memory)
    ─────────────────────── both join the group, then build ───────────────────────
    warm up                         PLAN ──▶   compute, together
                                    ◀── DONE
    arm the beats                              (by the first beat that says so)

One rank lost is the replica lost: the leader kills the others, stopped ones too, and says so once. Ranks
notice a lost leader by themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtransfer.shm.server import private_directory
from pdserve.config.worker import WorkerConfig
from pdserve.engine.masks import TokenMasks
from pdserve.errors import ConfigError, WorkerLost
from pdserve.kvcache.homes import Homes
from pdserve.kvcache.layout import PageLayout, rank_pool_id
from pdserve.kvcache.pool import KVPool
from pdserve.models.loaded import LoadedModel
from pdserve.parallel.group import TIMEOUT_S
from pdserve.parallel.shards import thread_share
from pdserve.parallel.shm_group import ShmGroup, make_segment
from pdserve.parallel.surviving_group import SurvivingGroup
from pdserve.ranks.beats import Beats
from pdserve.ranks.config import Launch, RankConfig, RankProcess, meeting
from pdserve.ranks.door import Door, Seat
from pdserve.ranks.frames import Frame, Kind, receive, send
from pdserve.ranks.meeting import RankGroup, joint_numerics, meet
from pdserve.ranks.placing import first_table, tender_of
from pdserve.ranks.pools import ReplicaPools, divided_pool, pool_pages, rank_layouts
from pdserve.ranks.rebalancing import Rebalancing
from pdserve.ranks.runner import SERIAL, ParallelRunner, expect_done, failure
from pdserve.ranks.survival import Survival
from pdserve.ranks.tender import Tender

START_S = 280.0
"""How long ranks may take until they have loaded; a fleet waits a little longer for the worker."""


class Replica:
    """The ranks behind one worker. `launch`, `start` and `close` belong to one thread."""

    def __init__(
        self, config: WorkerConfig, directory: Path, launch: Launch, on_lost: Callable[[str], None]
    ) -> None:
        self._config, self._directory = config, directory
        self._notify = on_lost
        self._lock = threading.Lock()
        self._over = self._serves = False
        self._seats: dict[int, Seat] = {}
        self._beats: Beats | None = None
        self._group: RankGroup | None = None
        self._tender: Tender | None = None
        self._survival: Survival | None = None
        self._pools: ReplicaPools | None = None
        token = secrets.token_hex(32)
        self._door = Door(directory, token, config.tp)
        self._processes: dict[int, RankProcess] = {
            rank: launch(RankConfig.of(config, rank, directory, token)) for rank in range(1, config.tp)
        }

    @classmethod
    def launch(
        cls, config: WorkerConfig, run_dir: str, launch: Launch, on_lost: Callable[[str], None]
    ) -> Replica:
        """Starts the ranks' processes, which load while we do; returns at once.

        on_lost: called once, from any thread, when a replica that served is over. Raises ConfigError.
        """
        directory = private_directory(str(Path(run_dir) / f"ranks-{secrets.token_hex(6)}"))
        return cls(config, directory, launch, on_lost)

    @property
    def pools(self) -> ReplicaPools:
        """All ranks' pages; from `start` on."""
        assert self._pools is not None
        return self._pools

    def start(
        self, model: LoadedModel, pool_id: int, masks: TokenMasks | None = None
    ) -> tuple[ParallelRunner, KVPool]:
        """Meets the ranks; a runner over all of them, and rank 0's pool with that id. masks: of grammars;
        None: requests with one fail.

        Raises what a rank raised (ModelError, ConfigError), or WorkerLost. Call `close` then.
        """
        config, deadline = self._config, time.monotonic() + START_S
        layouts = rank_layouts(config, model.config)
        num_pages = pool_pages(config, layouts)
        self._seats = self._door.admit(deadline, self._ended)
        lives = {rank: seat.life for rank, seat in self._seats.items()}
        self._beats = Beats(lives, self._lost, spare=self._spared)
        self._beats.start()
        pool = self._make_pools(model, layouts, num_pages, pool_id, deadline)
        self._group = self._meet()
        runner = self._runner(model, pool, self._group, masks)
        pool.close_to_writers()
        return runner, pool

    def serve(self) -> None:
        """Everything is loaded and warm: from now on a silent rank is a dead one."""
        assert self._beats is not None
        self._serves = True
        self._beats.arm()

    def kill(self) -> None:
        """Ends all ranks that have come in at once, whatever they do. Any thread; waits for nothing."""
        for rank in self._seats:
            self._kill_rank(rank)

    def close(self) -> None:
        """Ends the ranks and gives everything back. In any state; call when no step runs."""
        with self._lock:
            self._over = True
        self._door.close()
        if self._tender is not None:
            self._tender.close()
        for seat in self._seats.values():
            with contextlib.suppress(WorkerLost):
                send(seat.work, Kind.STOP)
        if self._beats is not None:
            self._beats.close()
        self._wait_ended(time.monotonic() + 2.0)
        self.kill()
        for process in self._processes.values():
            process.kill()
        if self._group is not None:
            self._group.close()
        if self._pools is not None:
            self._pools.close()
        for seat in self._seats.values():
            seat.work.close()
            os.close(seat.pidfd)
        self._seats = {}
        shutil.rmtree(self._directory, ignore_errors=True)

    def _make_pools(
        self, model: LoadedModel, layouts: Sequence[PageLayout], num_pages: int, pool_id: int, deadline: float
    ) -> KVPool:
        """Rank 0's pool, when every rank has its own too or is told where its part of ours is."""
        config = self._config
        if config.attention_rows:
            pool = divided_pool(layouts[0], Homes.over(num_pages, config.num_homes), pool_id)
            self._pools = ReplicaPools([pool])
            for rank, frame in self._ready(deadline).items():
                _check_loaded(frame, model, config, num_pages)
                send(self._seats[rank].work, Kind.POOL, json.dumps(pool_id).encode(), fd=pool.fd)
            return pool
        pool = KVPool.create(layouts[0], num_pages, pool_id)
        pool.prefault()
        pools = [pool]
        for rank, frame in self._ready(deadline).items():
            _check_loaded(frame, model, config, num_pages)
            pools.append(_adopted(frame, layouts[rank], rank_pool_id(pool_id, rank)))
        self._pools = ReplicaPools(pools)
        return pool

    def _meet(self) -> RankGroup:
        """Brings all ranks together in their group."""
        fd = make_segment(self._config.tp) if self._config.rank_exchange == "shm" else None
        for seat in self._seats.values():
            send(seat.work, Kind.MEET, fd=fd)
        return meet(self._config, 0, meeting(self._directory), fd)

    def _runner(
        self, model: LoadedModel, pool: KVPool, group: RankGroup, masks: TokenMasks | None
    ) -> ParallelRunner:
        table = first_table(self._config, model.config)
        works = [seat.work for seat in self._seats.values()]
        runner = ParallelRunner(
            model,
            pool,
            group=group,
            ranks=works,
            on_lost=self._lost,
            deterministic=self._config.deterministic,
            placement=table,
            attention=self._config.rank_attention,
            threads=thread_share(self._config.threads, self._config.tp, 0),
            masks=masks,
        )
        for seat in self._seats.values():  # from now on nobody has to wait long for anybody
            seat.work.settimeout(START_S)
            expect_done(receive(seat.work), SERIAL.pack(0))
            seat.work.settimeout(TIMEOUT_S)
        if table is not None:
            self._tender = tender_of(runner, table, 0)
            rebalancing = Rebalancing(table, self._tender, works)
            if isinstance(group, SurvivingGroup):
                ranks = {rank: seat.work for rank, seat in self._seats.items()}
                self._survival = Survival(group, ranks, lambda: rebalancing.status.table, self._kill_rank)
            runner.rebalance_with(rebalancing, self._tender, self._survival)
        return runner

    def _spared(self, rank: int, reason: str) -> bool:
        """Beats' thread."""
        return self._serves and self._survival is not None and self._survival.spare(rank, reason)

    def _kill_rank(self, rank: int) -> None:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._seats[rank].pidfd, signal.SIGKILL)

    def _lost(self, reason: str) -> None:
        """Any thread, once: the end of the replica as a unit."""
        with self._lock:
            if self._over:
                return
            self._over = True
        self.kill()
        if isinstance(self._group, ShmGroup | SurvivingGroup):
            self._group.abort()  # a step that runs waits for nobody
        if self._serves:
            self._notify(f"a rank of the replica is lost: {reason}")

    def _ended(self) -> int | None:
        return next((rank for rank, process in self._processes.items() if process.ended()), None)

    def _ready(self, deadline: float) -> dict[int, Frame]:
        """What every rank loaded."""
        waiting = {seat.work.fileno(): rank for rank, seat in self._seats.items()}
        found: dict[int, Frame] = {}
        poller = select.poll()
        for fd in waiting:
            poller.register(fd, select.POLLIN)
        while len(found) < len(waiting):
            if time.monotonic() > deadline:
                raise WorkerLost("the ranks of this replica did not start in time")
            for fd, _ in poller.poll(200):
                frame = receive(self._seats[waiting[fd]].work, with_fd=True)
                if frame.kind is Kind.FAILED:
                    raise failure(frame)
                found[waiting[fd]] = frame
                poller.unregister(fd)
        return dict(sorted(found.items()))

    def _wait_ended(self, deadline: float) -> None:
        """Ranks that were told to stop do so in a moment."""
        for rank, seat in self._seats.items():
            poller = select.poll()
            poller.register(seat.pidfd, select.POLLIN)
            while not self._processes[rank].ended() and time.monotonic() < deadline:
                if poller.poll(20):
                    break


def _check_loaded(frame: Frame, model: LoadedModel, config: WorkerConfig, num_pages: int) -> None:
    """Raises unless the rank loaded what we did."""
    told = json.loads(frame.body)
    numerics = joint_numerics(config)
    if frame.kind is not Kind.READY or (frame.fd is None) != config.attention_rows:
        raise WorkerLost("a rank of this replica is out of step")
    if (told["model"], told["numerics"], told["pages"]) != (model.digest, numerics, num_pages):
        if frame.fd is not None:
            os.close(frame.fd)
        raise ConfigError("the ranks of this replica loaded different models or kernels; start it again")


def _adopted(frame: Frame, layout: PageLayout, pool_id: int) -> KVPool:
    """The rank's pool; from now on of that id."""
    assert frame.fd is not None
    return KVPool.adopt(frame.fd, layout, int(json.loads(frame.body)["pool"]), as_id=pool_id)
