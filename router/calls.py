"""The calls of one request to its workers: Reserve's stream, Prefill, cancels and the switch, as events.

What lives here: tasks, time-outs, and turning every way a call can end into one event. What does not: what
those events mean (`lifecycle`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import grpc

from pdserve import failpoints
from pdserve.errors import PdserveError
from pdserve.messages import PrefillRequest, Refused, Report, Reserve
from pdserve.rpc.convert import (
    decode_event_from_pb,
    key_to_pb,
    outcome_from_pb,
    prefill_result_from_pb,
    prefill_to_pb,
    report_from_pb,
    reserve_to_pb,
)
from pdserve.rpc.status import error_from_rpc
from pdserve.rpc.v1 import cluster_pb2, decode_pb2, prefill_pb2
from pdserve.types import Key, PeerRef
from router import events as ev
from router.roster import Roster

CONTROL_TIMEOUT_S = 5.0
REPORT_TIMEOUT_S = 1.0
LOST_MESSAGE = "A worker was lost; try again."
Metadata = tuple[tuple[str, str], ...]
_NOT_RETRYABLE = frozenset({"INVALID_ARGUMENT", "UNIMPLEMENTED", "NOT_FOUND", "DEADLINE_EXCEEDED"})


class Tasks:
    """Background tasks of the router, so that none is lost and all can be ended."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work` until it ends or `cancel_all`."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def cancel_all(self) -> None:
        """Cancels all tasks and waits for them."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Calls:
    """The calls of one request. `apply` takes each event; owned by the event loop."""

    def __init__(
        self, roster: Roster, tasks: Tasks, apply: Callable[[ev.Event], None], metadata: Metadata = ()
    ) -> None:
        """metadata: goes with the calls that are work, such as the trace they belong to."""
        self._roster, self._tasks, self._apply, self._metadata = roster, tasks, apply, metadata
        self._readers: dict[Key, asyncio.Task[None]] = {}

    # -- work --------------------------------------------------------------------------------------------

    def reserve(self, decode: PeerRef, message: Reserve, timeout_s: float) -> None:
        """Opens D's stream; its messages become events, and so does however it ends."""
        task = self._tasks.spawn(self._reserve(decode, message, timeout_s))
        self._readers[message.key] = task
        task.add_done_callback(lambda _: self._readers.pop(message.key, None))

    async def _reserve(self, decode: PeerRef, message: Reserve, timeout_s: float) -> None:
        broken = _lost(message.key)
        try:
            link = self._roster.links.get(decode.incarnation)
            await _stalled("dispatch")
            if link is not None:
                request = reserve_to_pb(message)
                stream = link.decode.Reserve(request, timeout=timeout_s, metadata=self._metadata)
                async for response in stream:
                    self._apply(decode_event_from_pb(response))
        except grpc.RpcError as error:
            broken = self._broken(decode, message.key, error_from_rpc(error))
        except PdserveError as error:
            broken = ev.DecodeBroken(key=message.key, label=error.label, message=error.message)
        finally:
            # Without effect if the stream ended properly; also when this task or the channel is closed.
            self._apply(broken)

    def _broken(self, decode: PeerRef, key: Key, error: PdserveError) -> ev.DecodeBroken:
        if error.status == "UNAVAILABLE":
            self._roster.suspect(decode.worker_id, decode.incarnation)
            return _lost(key)
        retryable = error.status not in _NOT_RETRYABLE
        return ev.DecodeBroken(key=key, label=error.label, message=error.message, retryable=retryable)

    def prefill(self, prefill: PeerRef, message: PrefillRequest, timeout_s: float) -> None:
        """Calls P; its answer, or the failure to get one, becomes an event."""
        self._tasks.spawn(self._prefill(prefill, message, timeout_s))

    async def _prefill(self, prefill: PeerRef, message: PrefillRequest, timeout_s: float) -> None:
        event: ev.Event = ev.PrefillBroken(key=message.key)
        try:
            link = self._roster.links.get(prefill.incarnation)
            if link is not None:
                request = prefill_to_pb(message)
                response = await link.prefill.Prefill(request, timeout=timeout_s, metadata=self._metadata)
                result = prefill_result_from_pb(response)
                event = ev.PrefillRefused(refused=result) if isinstance(result, Refused) else result
        except grpc.RpcError as error:
            if error_from_rpc(error).status == "UNAVAILABLE":
                self._roster.suspect(prefill.worker_id, prefill.incarnation)
        except PdserveError:
            event = ev.PrefillBroken(key=message.key)
        finally:
            self._apply(event)

    # -- control -----------------------------------------------------------------------------------------

    def cancel_decode(self, decode: PeerRef, key: Key, *, keep_stream: bool) -> None:
        """Tells D to stop. Without keep_stream its stream is broken too, which means the same."""
        self._tasks.spawn(self._cancel_decode(decode, key))
        reader = None if keep_stream else self._readers.get(key)
        if reader is not None and reader is not asyncio.current_task():
            reader.cancel()

    async def _cancel_decode(self, decode: PeerRef, key: Key) -> None:
        link = self._roster.links.get(decode.incarnation)
        if link is None:
            return
        request = decode_pb2.CancelDecodeRequest(key=key_to_pb(key), receiver_incarnation=decode.incarnation)
        try:
            await link.decode.CancelDecode(request, timeout=CONTROL_TIMEOUT_S)
        except grpc.RpcError as error:
            self._note(decode, error)

    def cancel_prefill(self, prefill: PeerRef, key: Key) -> None:
        """Tells P to stop."""
        self._tasks.spawn(self._cancel_prefill(prefill, key))

    async def _cancel_prefill(self, prefill: PeerRef, key: Key) -> None:
        link = self._roster.links.get(prefill.incarnation)
        if link is None:
            return
        request = prefill_pb2.CancelPrefillRequest(
            key=key_to_pb(key), receiver_incarnation=prefill.incarnation
        )
        try:
            await link.prefill.CancelPrefill(request, timeout=CONTROL_TIMEOUT_S)
        except grpc.RpcError as error:
            self._note(prefill, error)

    def switch_local(self, decode: PeerRef, key: Key) -> None:
        """Tells D that P is gone; its answer becomes an event."""
        self._tasks.spawn(self._switch_local(decode, key))

    async def _switch_local(self, decode: PeerRef, key: Key) -> None:
        answer = ev.SwitchAnswered(key=key, outcome=None)
        try:
            link = self._roster.links.get(decode.incarnation)
            if link is not None:
                request = decode_pb2.SwitchLocalRequest(
                    key=key_to_pb(key), receiver_incarnation=decode.incarnation
                )
                response = await link.decode.SwitchLocal(request, timeout=CONTROL_TIMEOUT_S)
                answer = ev.SwitchAnswered(key=key, outcome=outcome_from_pb(response.outcome))
        except grpc.RpcError as error:
            self._note(decode, error)
        except PdserveError:
            answer = ev.SwitchAnswered(key=key, outcome=None)
        finally:
            self._apply(answer)

    async def report(self, peer: PeerRef, key: Key) -> Report | None:
        """What a worker knows of a key now; None if nothing, or if it does not answer soon."""
        link = self._roster.links.get(peer.incarnation)
        if link is None:
            return None
        try:
            request = cluster_pb2.GetRequestRequest(key=key_to_pb(key))
            return report_from_pb(await link.worker.GetRequest(request, timeout=REPORT_TIMEOUT_S))
        except (grpc.RpcError, PdserveError):
            return None

    def _note(self, peer: PeerRef, error: grpc.RpcError) -> None:
        """A control call that failed only costs our trust in the worker: leases and keys do the rest."""
        if error_from_rpc(error).status == "UNAVAILABLE":
            self._roster.suspect(peer.worker_id, peer.incarnation)


async def _stalled(name: str) -> None:
    wait_s = failpoints.stall_s(name)
    if wait_s:
        await asyncio.sleep(wait_s)


def _lost(key: Key) -> ev.DecodeBroken:
    return ev.DecodeBroken(key=key, label="worker_lost", message=LOST_MESSAGE)
