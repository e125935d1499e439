"""The destination end of the nixl transport: posts one-sided reads into our own pages and believes only
digests.

What lives here: the reader, its one thread, batches of reads under way and the verdict on what came. What
does not: NIXL itself (`agent`), the control connection (`link`), the reads' states (`kvtransfer.reads`).

A posted read may write its target until NIXL says that it is done or its agent is destroyed: only then
`done` is called. So a source that hangs keeps the target pinned; only a source that is gone (or NIXL's own
error, or `close`) ends reads early, by destroying the agent first. Cancel ends what was not posted.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from kvtransfer.hello import Refused
from kvtransfer.listener import Signal, Stalled
from kvtransfer.nixl.agent import Agent, NixlError, address_of
from kvtransfer.nixl.frames import Region, split_endpoint
from kvtransfer.nixl.link import Link
from kvtransfer.nixl.server import agent_name
from kvtransfer.reads import Counters, Pending, ReadTable
from kvtransfer.stream import PeerClosed
from kvtransfer.transport import Done, ReaderConfig, ReadRequest, ReadStatus
from kvtransfer.wire import WireError
from pdserve.errors import ConfigError
from pdserve.tls.sockets import Untrusted

log = logging.getLogger(__name__)
_MAX_FLIGHTS = 2  # one on the wire while the other one is digested
_FLIGHT_BYTES = 2 * 2**20
_FLIGHT_PAGES = 64
_FIRST_PAUSE_S, _LAST_PAUSE_S = 20e-6, 5e-3


class NixlPageReader:
    """A `PageReader` by NIXL. Connects when there is something to read, and again after a loss."""

    def __init__(self, config: ReaderConfig) -> None:
        self._config = config
        self._counters, self._wake = Counters(), Signal()
        self._reads = ReadTable(config, self._counters)
        self._thread = threading.Thread(target=self._run, name="kv-nixl", daemon=True)
        self._thread.start()

    def read(self, request: ReadRequest, done: Done) -> None:
        """See PageReader."""
        self._reads.add(request, done)
        self._wake.set()

    def cancel(self, read_id: int) -> None:
        """See PageReader."""
        self._reads.cancel(read_id)

    def counters(self) -> Mapping[str, int]:
        """See PageReader."""
        return self._counters.snapshot()

    def close(self) -> None:
        """See PageReader. May be called more than once, and from a `done`."""
        self._reads.close()
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._wake.clear()  # before looking at what a caller changes before it sets it
            if self._reads.closed:
                break
            first = self._reads.peek()
            if first is None:
                self._wake.wait()
            else:
                self._visit(first)
        self._reads.end_all("closed")
        self._wake.close()

    def _visit(self, first: Pending) -> None:
        """One connection, from the dial for `first` to its end; reads that it leaves pending have failed. The
        agent is gone before any read is ended that it had posted."""
        try:
            with Link(self._config, self._wake, lambda: self._reads.closed) as link:
                pull = Pull(self._config, self._reads, self._counters, link, link.greet(first.request))
                try:
                    pull.run()
                finally:
                    pull.close()
            return
        except Refused as refused:
            self._reads.end(first, ReadStatus.FAILED, detail=str(refused))
            return
        except Stalled:
            detail = "stalled"
        except Untrusted:
            detail = "not trusted"
        except WireError:
            detail = "protocol violation"
        except (PeerClosed, NixlError, OSError):
            detail = "peer lost"
        except ConfigError as error:
            log.error("%s", error)
            detail = "misconfigured"
        except Exception:
            log.exception("a page read failed")
            detail = "internal error"
        self._counters.add(detail)
        self._reads.end_all("closed" if self._reads.closed else detail)


@dataclass(slots=True, kw_only=True)
class _Flight:
    """Reads posted as one transfer. loose: registrations made for it alone."""

    reads: list[Pending]
    handle: int
    done: bool
    loose: list[tuple[int, int]]


class Pull:
    """Reads over one connection, in the hands of the reader's thread."""

    def __init__(
        self, config: ReaderConfig, reads: ReadTable, counters: Counters, link: Link, region: Region
    ) -> None:
        self._config, self._reads, self._counters = config, reads, counters
        self._link, self._region = link, region
        self._flights: deque[_Flight] = deque()
        self._flew = False
        self._pause_s = _FIRST_PAUSE_S
        self._local = (0, 0)
        host, _, _ = split_endpoint(config.endpoint)
        self._agent = Agent(f"reader-{secrets.token_hex(8)}", host, is_source=False)
        try:
            self._peer = self._introduce()
        except BaseException:
            self._agent.close()
            raise
        counters.add("connections")

    def _introduce(self) -> str:
        if self._config.local is not None:
            self._local = (address_of(self._config.local), self._config.local.nbytes)
            self._agent.register(*self._local)
        peer = self._agent.add_peer(self._region.metadata)
        if peer != agent_name(self._config.pool_id):
            raise WireError("the agent of another pool")
        return peer

    def close(self) -> None:
        """Destroys the agent: what was posted touches no target any more when this returns."""
        self._agent.close()

    def run(self) -> None:
        """Reads until the reader is closed, or the source left while nothing was under way. Raises Stalled,
        WireError, PeerClosed, NixlError or OSError at any other end."""
        closing_at: float | None = None
        while True:
            self._link.listen()
            if self._reads.closed:
                closing_at = closing_at or time.monotonic() + self._config.stall_s
                if not self._flights or time.monotonic() >= closing_at:
                    return
            else:
                self._post()
            if self._flights:
                self._land()
            elif not self._rest():
                return

    def _rest(self) -> bool:
        """Waits for something to do; False if the source left, which is no reader's loss."""
        try:
            self._link.rest()
        except PeerClosed:
            if self._flew or self._reads.peek() is None:
                return False
            raise
        return True

    def _post(self) -> None:
        # A transfer that was over at once leaves bytes in the cache: digest them before more come.
        while len(self._flights) < _MAX_FLIGHTS and not (self._flights and self._flights[-1].done):
            batch = self._batch()
            if not batch:
                return
            self._flights.append(self._launch(batch))

    def _batch(self) -> list[Pending]:
        limit = max(1, min(_FLIGHT_PAGES, _FLIGHT_BYTES // self._config.page_bytes))
        batch: list[Pending] = []
        while not batch and (asked := self._reads.ask(limit)):
            for pending in asked:
                if pending.request.source.page >= self._region.num_pages:
                    self._reads.end(pending, ReadStatus.FAILED, detail="no such page")
                elif self._reads.begin(pending):
                    batch.append(pending)
        return batch

    def _launch(self, batch: list[Pending]) -> _Flight:
        size = self._config.page_bytes
        pairs, loose = [], []
        for pending in batch:
            here = address_of(pending.request.target)
            pairs.append((self._region.address(pending.request.source.page), here))
            if not self._local[0] <= here <= here + size <= sum(self._local):
                self._agent.register(here, size)
                loose.append((here, size))
        handle, done = self._agent.post_read(self._peer, pairs, size)
        self._counters.add("transfers")
        self._pause_s = _FIRST_PAUSE_S
        return _Flight(reads=batch, handle=handle, done=done, loose=loose)

    def _land(self) -> None:
        """Ends the reads of the oldest flight if it is over; else waits, longer each time."""
        flight = self._flights[0]
        if not (flight.done or self._agent.is_done(flight.handle)):
            self._link.check()
            time.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)
            return
        self._flights.popleft()
        self._pause_s = _FIRST_PAUSE_S
        self._flew = True
        self._agent.release(flight.handle)
        for address, size in flight.loose:
            self._agent.unregister(address, size)
        for pending in flight.reads:
            self._reads.arrived(pending)
        for pending in flight.reads:
            self._verify(pending)

    def _verify(self, pending: Pending) -> None:
        """The digest decides; the generation only tells a page that was freed from one that is broken."""
        request = pending.request
        digest = self._reads.digest(pending)
        if (
            digest != request.digest
            and self._link.generation(request.source.page) != request.source.generation
        ):
            self._reads.end(pending, ReadStatus.STALE)
        else:
            self._reads.verify(pending, digest)
