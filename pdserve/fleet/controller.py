"""The fleet controller: one named Ray actor that keeps the wanted workers running.

Decisions are the Supervisor's (pure); here they meet Ray. Methods take and give JSON text. The controller
may die at any time: Ray restarts it, it reads the wanted counts from the cluster's key-value store and finds
its workers by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import time
from typing import Any

from pdserve.config import WorkerConfig
from pdserve.fleet.actor import WorkerActor
from pdserve.fleet.placement import actor_options, ensure_group, remove_group
from pdserve.fleet.spec import FleetSpec
from pdserve.fleet.store import forget_wanted, load_wanted, running_workers, save_wanted
from pdserve.fleet.supervise import Command, Forget, Retire, SlotState, Start, Supervisor
from pdserve.obs.logging import fields, log_as
from pdserve.types import Role

log = logging.getLogger("pdserve.fleet")

NOTE_EVERY_S = 0.5
CREATE_PATIENCE_S = 5.0
"""Ray makes places and actors by a word to its store; one that takes longer is not waited for at an end."""
REJOIN_S = 180.0
"""A controller that starts again, on a new head perhaps, waits so long for its owner, who may have lost the
cluster too: it notices that after a minute and has to start and join again."""
_LOST = {"label": "worker_lost", "message": "the worker's process ended"}
_OVER = {"label": "unavailable", "message": "the worker starts again: its incarnation was over"}
_LATE = {"label": "unavailable", "message": "the worker did not serve in time"}


class FleetController:
    """See the module. All state belongs to the actor's event loop."""

    async def __init__(self, spec_json: str) -> None:  # type: ignore[misc]  # Ray awaits it
        self._spec = FleetSpec.from_json(spec_json)
        log_as(next(iter(self._spec.templates.values())), "controller")
        wanted = await asyncio.to_thread(load_wanted, self._spec.name) or self._spec.wanted
        self._supervisor = Supervisor(
            wanted,
            min_backoff_s=self._spec.min_backoff_s,
            max_backoff_s=self._spec.max_backoff_s,
            fleet=self._spec.name,
        )
        self._actors: dict[str, Any] = {}
        self._placed: set[str] = set()
        self._creations: dict[str, asyncio.Future[Any]] = {}
        self._heard_at = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._version = 0
        self._closing = False
        running = await asyncio.to_thread(running_workers, self._spec.name)
        for worker_id, role, actor in running:
            self._supervisor.adopt(worker_id, role, time.monotonic())
            self._spawn(self._watch(worker_id, actor))
        self._spawn(self._run())
        if self._spec.owner_lease_s:
            again = REJOIN_S if running else 0.0
            self._spawn(self._end_with_owner(max(again, self._spec.owner_lease_s)))

    # ---- what callers ask -------------------------------------------------------------------------

    async def status(self) -> str:
        """JSON: wanted counts and every slot with its state, record, restarts and last error; whether all is
        as wanted (all_serving), and whether no wanted worker is missing (enough_serving)."""
        now = time.monotonic()
        slots = [
            {
                **dataclasses.asdict(slot),
                "since": round(now - slot.since, 3),
                "start_at": round(max(0.0, slot.start_at - now), 3),
            }
            for slot in self._supervisor.slots.values()
        ]
        return json.dumps(
            {
                "wanted": self._supervisor.wanted,
                "workers": slots,
                "restarts": self._supervisor.restarts,
                "all_serving": self._supervisor.all_serving(),
                "enough_serving": not self._closing and self._supervisor.enough_serving(),
            }
        )

    async def wait_changed(self, timeout_s: float, owner: bool = False) -> str:
        """The status after the next change, or after the time given. owner: who started the fleet asks."""
        if owner:
            self._heard_at = time.monotonic()
        await self._change_after(self._version, timeout_s)
        return await self.status()

    async def silent_s(self) -> float:
        """Seconds since its owner's last word; negative for a fleet that outlives its owner."""
        return time.monotonic() - self._heard_at if self._spec.owner_lease_s else -1.0

    async def adopt(self, spec_json: str) -> bool:
        """A new owner, who wants the same as the last one, takes over. False: it wants another, or we end."""
        if self._closing or FleetSpec.from_json(spec_json) != self._spec:
            return False
        self._heard_at = time.monotonic()
        return True

    async def scale(self, role: str, count: int) -> str:
        """Wants `count` workers of a role; returns the status."""
        if count < 0 or Role(role) not in self._spec.templates:
            raise ValueError("no such role in this fleet, or a negative count")
        self._supervisor.scale(Role(role), count)
        await self._wanted_changed()
        return await self.status()

    async def drain(self, worker_id: str) -> bool:
        """Drains and ends one worker and wants one fewer of its role. False: no such worker."""
        command = self._supervisor.drain(worker_id, time.monotonic())
        if command is not None:
            self._carry_out(command)
        await self._wanted_changed()
        return command is not None

    async def move(self, worker_id: str) -> bool:
        """Drains and ends one worker, while another takes its part elsewhere; returns when it has ended.
        False: no such worker, or it is ending already."""
        command = self._supervisor.move(worker_id, time.monotonic())
        if command is None:
            return False
        await self._notify()
        await self._go(command)
        return True

    async def settings(self, worker_id: str) -> str:
        """What the worker's process says about its own settings, as JSON."""
        return str(await self._actors[worker_id].settings.remote())

    async def shutdown(self, timeout_s: float) -> bool:
        """Drains and ends every worker. True: all had finished their work in time."""
        self._closing = True
        self._spec = dataclasses.replace(self._spec, drain_timeout_s=timeout_s)
        for role in Role:
            self._supervisor.scale(role, 0)
        slots = list(self._supervisor.slots)
        drained = await asyncio.gather(*(self._end(worker_id) for worker_id in slots))
        await asyncio.gather(*(self._give_back(worker_id) for worker_id in slots))
        return all(drained)

    async def _end_with_owner(self, patience_s: float) -> None:
        """Drains and ends the fleet, and this actor, once its owner has been silent for the whole lease.
        patience_s: for its first word."""
        began = self._heard_at
        while not self._closing:
            lease_s = patience_s if self._heard_at == began else self._spec.owner_lease_s
            left = self._heard_at + lease_s - time.monotonic()
            if left <= 0:
                log.warning("the fleet's owner is gone: it drains and ends")
                await self.shutdown(self._spec.drain_timeout_s)
                await asyncio.to_thread(_end_myself, self._spec.name)
                return
            await asyncio.sleep(left)

    # ---- the loop ---------------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self._closing:
            seen, now = self._version, time.monotonic()
            for command in self._supervisor.due(now):
                self._carry_out(command)
            due = self._supervisor.next_due()
            await self._change_after(seen, None if due is None else max(0.0, due - now))

    async def _change_after(self, seen: int, timeout_s: float | None) -> None:
        """Returns once something changed that `seen` does not know of, or when time is up."""
        async with self._changed:
            waiting = self._changed.wait_for(lambda: self._version != seen)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(waiting, timeout_s)

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, Start):
            self._spawn(self._start(command))
        else:
            self._spawn(self._go(command))

    async def _go(self, command: Retire | Forget) -> None:
        if isinstance(command, Retire):
            await self._end(command.worker_id)
        else:
            await self._ended(command.worker_id, _LOST)

    async def _start(self, command: Start) -> None:
        template = self._spec.templates[command.role]
        config = dataclasses.replace(template, worker_id=command.worker_id)
        creation = asyncio.ensure_future(asyncio.to_thread(_create, config, self._spec))
        self._creations[command.worker_id] = creation
        try:
            actor = await creation
        except Exception as err:  # Ray raises many kinds; each means "not now"
            log.warning(
                "a worker can not be placed: %s", type(err).__name__, extra=fields(worker=command.worker_id)
            )
            await self._ended(command.worker_id, {"label": "unavailable", "message": "Ray can not place it"})
            return
        slot = self._supervisor.slots.get(command.worker_id)
        if self._closing or slot is None or slot.state is SlotState.RETIRING:
            await asyncio.to_thread(_kill, actor)  # no longer wanted when it was there
            await self._ended(command.worker_id, _LOST)
            return
        await self._watch(command.worker_id, actor)

    async def _watch(self, worker_id: str, actor: Any) -> None:
        """Follows one process from its start to its end."""
        self._actors[worker_id] = actor
        error, retired = _LOST, False
        try:
            reply = await self._started(worker_id, actor)
            if "record" in reply:
                self._supervisor.serving(worker_id, reply["record"], time.monotonic())
                await self._notify()
                reason = await _result(actor.lifetime.remote())
                retired = True
                log.warning("an incarnation is over: %s", reason, extra=fields(worker=worker_id))
            error = reply.get("error", _LOST)
        except TimeoutError:
            error = _LATE
        except Exception as err:  # the process is gone: Ray says so with several kinds
            log.info("a worker ended: %s", type(err).__name__, extra=fields(worker=worker_id))
        if self._actors.get(worker_id) is actor:
            del self._actors[worker_id]
            self._placed.discard(worker_id)
        await asyncio.to_thread(_kill, actor)
        await self._ended(worker_id, _OVER if retired else error, retired=retired)

    async def _started(self, worker_id: str, actor: Any) -> dict[str, Any]:
        """The answer to `start`; meanwhile the worker's notes are kept. Raises TimeoutError."""
        await self._wait_placed(worker_id, actor)
        answer = asyncio.ensure_future(_result(actor.start.remote()))
        deadline = time.monotonic() + self._spec.start_timeout_s
        while not answer.done() and time.monotonic() < deadline:
            with contextlib.suppress(Exception):  # the answer tells what is wrong
                note = await asyncio.wait_for(_result(actor.note.remote()), deadline - time.monotonic())
                if self._supervisor.noted(worker_id, note):
                    await self._notify()
            await asyncio.wait({answer}, timeout=NOTE_EVERY_S)
        if not answer.done():
            answer.cancel()
            raise TimeoutError
        reply: dict[str, Any] = json.loads(answer.result())
        return reply

    async def _wait_placed(self, worker_id: str, actor: Any) -> None:
        """Returns when the worker's process runs. A node of its own may have to be made first."""
        if self._spec.exclusive_nodes and self._supervisor.noted(worker_id, "waiting for a node"):
            await self._notify()
        limit = None if self._spec.exclusive_nodes else self._spec.start_timeout_s
        await asyncio.wait_for(_result(actor.note.remote()), limit)
        self._placed.add(worker_id)

    async def _give_back(self, worker_id: str) -> None:
        """Gives the worker's place back, after a start that is under way has asked for it."""
        if (creation := self._creations.get(worker_id)) is not None:
            await asyncio.wait({creation}, timeout=CREATE_PATIENCE_S)
        await asyncio.to_thread(remove_group, worker_id)

    async def _end(self, worker_id: str) -> bool:
        """Drains, stops and kills one worker; its watch sees the end. True if all its work was done."""
        actor = self._actors.get(worker_id)
        if actor is None:
            return True
        if worker_id not in self._placed:  # it has no process yet, and no work
            await asyncio.to_thread(_kill, actor)
            return True
        drained = False
        try:
            patience = self._spec.drain_timeout_s
            drained = await asyncio.wait_for(_result(actor.drain.remote(patience)), patience + 5.0)
            await asyncio.wait_for(_result(actor.stop.remote()), 5.0)
        except Exception as err:  # dead already, or stuck: it is killed either way
            log.warning(
                "a worker did not stop by itself: %s", type(err).__name__, extra=fields(worker=worker_id)
            )
        await asyncio.to_thread(_kill, actor)
        return bool(drained)

    async def _ended(self, worker_id: str, error: dict[str, str], *, retired: bool = False) -> None:
        slot = self._supervisor.slots.get(worker_id)
        if slot is not None and slot.state is SlotState.RETIRING:
            # Before the slot goes: one that comes after it may have the same name.
            await self._give_back(worker_id)
        self._supervisor.ended(worker_id, error, time.monotonic(), retired=retired)
        await self._notify()

    async def _wanted_changed(self) -> None:
        await asyncio.to_thread(save_wanted, self._spec.name, self._supervisor.wanted)
        await self._notify()

    async def _notify(self) -> None:
        self._version += 1
        async with self._changed:
            self._changed.notify_all()

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _result(ref: Any) -> Any:
    return await ref


def _create(config: WorkerConfig, spec: FleetSpec) -> Any:
    import ray

    options = actor_options(config, ensure_group(config, spec))
    return ray.remote(WorkerActor).options(**options).remote(config.to_json(), spec.worker_host)


def _kill(actor: Any) -> None:
    import ray

    ray.kill(actor, no_restart=True)


def _end_myself(fleet: str) -> None:
    import ray

    forget_wanted(fleet)
    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
