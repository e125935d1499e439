"""The destination end of the tcp transport: page frames land straight in the target pages.

What lives here: the reader and its one thread, which dials, asks, receives and verifies. What does not: who
may be read and what happens to a page afterwards (`kvtransfer.session`), the reads' states
(`kvtransfer.reads`).

A cancelled read ends here at once. If its page still comes, it goes to scratch memory; so ending a read never
waits for the source.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping

from kvtransfer.digest import PageDigester
from kvtransfer.hello import Refused
from kvtransfer.listener import Signal, Stalled
from kvtransfer.reads import Counters, Pending, ReadTable
from kvtransfer.sockets import dialled, split_address
from kvtransfer.stream import PeerClosed
from kvtransfer.tcp.visit import Visit
from kvtransfer.transport import Done, ReaderConfig, ReadRequest, ReadStatus
from kvtransfer.wire import WireError
from pdserve import failpoints
from pdserve.tls.sockets import Untrusted

log = logging.getLogger(__name__)


class TcpPageReader:
    """A `PageReader` over TCP. Dials when there is something to read, and again after a loss."""

    def __init__(
        self,
        config: ReaderConfig,
        digester: Callable[[bytes], PageDigester] = PageDigester,
        *,
        compiled: bool = True,
    ) -> None:
        """digester: see `ReadTable`. compiled: take pages by compiled code where it can: not over TLS, nor
        where faults may be asked for."""
        self._config = config
        self._compiled = compiled and config.tls is None and config.page_bytes > 0
        self._counters, self._wake = Counters(), Signal()
        self._reads = ReadTable(config, self._counters, digester)
        self._cancelled: deque[Pending] = deque()
        self._thread = threading.Thread(target=self._run, name="kv-recv", daemon=True)
        self._thread.start()

    def read(self, request: ReadRequest, done: Done) -> None:
        """See PageReader."""
        self._reads.add(request, done)
        self._wake.set()

    def cancel(self, read_id: int) -> None:
        """See PageReader."""
        asked = self._reads.cancel(read_id)
        if asked is not None:
            self._cancelled.append(asked)
            self._wake.set()

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
            self._wake.clear()  # before looking at what `close` changes before it sets it
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
        """One connection, from the dial for `first` to its end; reads that it leaves pending have failed."""
        try:
            host, port = split_address(self._config.endpoint)
            with dialled(self._config, host, port, self._wake, lambda: self._reads.closed) as sock:
                visit = Visit(
                    sock, self._config, self._reads, self._counters, self._wake, self._cancelled,
                    compiled=self._compiled and not failpoints.armed(),
                )  # fmt: skip
                visit.greet(first)
                visit.run()
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
        except (PeerClosed, OSError):
            detail = "peer lost"
        except Exception:
            log.exception("a page read failed")
            detail = "internal error"
        self._counters.add(detail)
        self._reads.end_all("closed" if self._reads.closed else detail)
