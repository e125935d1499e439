"""One generate request on its way: opened on a router, and again elsewhere as long as nothing was made of it.

What lives here: what streams of both clients share, short of waiting. What does not: reading (`stream`,
`aio_stream`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pdserve.api import Admitted, Chunk, GenerateInput, PromptInfo
from pdserve.client.connect import Routers
from pdserve.client.metadata import trace_id_of
from pdserve.client.request import GRACE_S, to_wire
from pdserve.client.result import Collector
from pdserve.errors import Cancelled, PdserveError, Unavailable, UnsupportedFeature

_NO_RESUME = UnsupportedFeature.field(
    "resume_window_s", "resuming is not supported yet; send the request anew."
)


def rpc_failure(error: Exception) -> tuple[PdserveError, bool]:
    """The error behind a failed call, and whether a router said it rather than the connection. Raises
    Unavailable where the client is closed, and what is no failure of a call as it is."""
    import grpc

    from pdserve.rpc.status import DETAILS_KEY, error_from_rpc

    if isinstance(error, ValueError | grpc.aio.UsageError):  # what grpc raises on a closed channel
        raise Unavailable("The client is closed.") from None
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        raise error
    trailers: Any = error.trailing_metadata() or ()
    silent = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
    told = any(key == DETAILS_KEY for key, _ in trailers)
    return error_from_rpc(error), told or error.code() not in silent


class Sending:
    """A request and its stream of events, on whatever router it runs."""

    def __init__(self, routers: Routers, source: GenerateInput) -> None:
        """Raises InvalidRequest for what no message can carry, before anything is sent."""
        self._routers = routers
        self._metadata = routers.sent_with()
        trace_id = source.trace_id or trace_id_of(self._metadata)
        self._source = replace(source, trace_id=trace_id)
        self._request = to_wire(self._source)
        self.collected = Collector()
        self._tries = routers.tries(source.deadline_s)
        self._cancelled = False
        self._call: Any = None

    def open(self) -> Any:
        """Starts the call on the next router; iterating over it gives the messages. Raises Unavailable if the
        client is closed, and Cancelled."""
        if self._cancelled:
            raise Cancelled("The request was cancelled.")
        if self._call is not None:  # a later try has less time
            self._request.deadline_s = self._tries.left_s()
        pool, router = self._routers.pool, self._tries.take()
        try:
            self._call = call = router.stub().Generate(
                self._request, timeout=self._tries.left_s() + GRACE_S, metadata=self._metadata
            )
        except Exception as error:
            pool.done(router)
            raise rpc_failure(error)[0] from None
        call.add_done_callback(lambda _: pool.done(router))
        if self._cancelled:
            call.cancel()
        return call

    def take(self, message: Any) -> Chunk | None:
        """Takes a message; returns it if it is a chunk."""
        from pdserve.rpc.convert.generate import stream_event_from_pb

        event = stream_event_from_pb(message)
        if isinstance(event, Admitted) and self._tries.router is not None:
            self._tries.reached()
            self._routers.pool.admitted(event.request_id, self._tries.router)
        return self.collected.take(event)

    def after(self, error: Exception) -> float:
        """Seconds to wait before the next `open`. Raises the PdserveError of a call not to be made again."""
        found, answered = rpc_failure(error)
        wait_s = self._tries.failed(found, answered=answered, begun=self.collected.admitted is not None)
        if wait_s is None or self._cancelled:
            raise found from None
        return wait_s

    def cancel(self) -> None:
        """Ends the call, and lets no other begin."""
        self._cancelled = True
        if self._call is not None:
            self._call.cancel()


class StreamFacts:
    """What a stream tells besides its chunks."""

    def __init__(self, sending: Sending) -> None:
        self._sending = sending

    @property
    def request_id(self) -> str | None:
        """The id to abort it by; None until the router has admitted it."""
        admitted = self._sending.collected.admitted
        return admitted.request_id if admitted is not None else None

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of the prompt; None until the router has admitted it."""
        admitted = self._sending.collected.admitted
        return admitted.prompt_tokens if admitted is not None else None

    @property
    def prompt(self) -> PromptInfo | None:
        """The prompt, if it or its log-probabilities were asked for; None until it has come."""
        return self._sending.collected.prompt

    @property
    def resume_token(self) -> str:
        """By which a broken stream would go on. Not supported yet: raises UnsupportedFeature."""
        raise _NO_RESUME
