"""Accepting: one thread that accepts, one bounded thread per connection, and a stop that all of them see.

What lives here: what the servers of all transports share. What does not: frames and pages.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable

from kvtransfer.reads import Counters
from kvtransfer.stream import PeerClosed
from kvtransfer.wire import WireError
from pdserve.tls.sockets import Untrusted

log = logging.getLogger(__name__)
_BACKLOG = 128
_ROOM_S = 0.1


class Signal:
    """A flag that a poll can wait for. Any thread may set it; `clear` is for its one waiter."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._flag = self._closed = False

    def fileno(self) -> int:
        """For poll: readable while set."""
        return self._fd

    def set(self) -> None:
        """Sets the flag; without effect once closed."""
        with self._lock:
            if not self._flag and not self._closed:
                self._flag = True
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Clears the flag."""
        with self._lock:
            if self._flag and not self._closed:
                self._flag = False
                os.eventfd_read(self._fd)

    def wait(self) -> None:
        """Waits until the flag is set."""
        poller = select.poll()  # select() knows no descriptor above 1,023
        poller.register(self._fd, select.POLLIN)
        poller.poll()

    def is_set(self) -> bool:
        """Whether the flag is set."""
        return self._flag

    def close(self) -> None:
        """Gives the descriptor back, when nobody waits any more."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._fd)


class Stalled(Exception):
    """The other end took longer than it may."""


class Waiter:
    """Waits for one socket or a signal, many times. For one thread."""

    def __init__(self, sock: socket.socket, signal: Signal) -> None:
        self._sock, self._mask = sock, 0
        self._poller = select.poll()
        self._poller.register(signal, select.POLLIN)

    def wait(self, mask: int, deadline: float) -> None:
        """Waits until the socket is ready for one of these poll events or the signal is set. Raises Stalled
        at `deadline`, monotonic seconds."""
        if mask != self._mask:
            self._poller.register(self._sock, mask)
            self._mask = mask
        if deadline == math.inf:
            self._poller.poll()
            return
        # What is ready already counts even after the deadline: a starved thread is not the peer's fault.
        left_s = max(0.0, deadline - time.monotonic())
        if not self._poller.poll(math.ceil(left_s * 1000)):
            raise Stalled


def wait_for(sock: socket.socket, mask: int, signal: Signal, deadline: float) -> None:
    """`Waiter.wait`, once."""
    Waiter(sock, signal).wait(mask, deadline)


class Listener:
    """Serves connections of a listening socket, each in a thread of its own.

    serve: called with each connection, non-blocking, in its thread; it returns or raises when the connection
    is over, at the latest soon after `stop` is set. Whatever it raises is counted and ends that connection.
    secure: called first, in the same thread, if connections are encrypted; gives the socket to serve and uses
    up the one it gets. Peers that have not got through it are strangers: when all places are taken, the one
    that has been at it the longest makes room, so that those who say nothing keep nobody out.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        serve: Callable[[socket.socket], None],
        stop: Signal,
        max_connections: int,
        counters: Counters,
        secure: Callable[[socket.socket], socket.socket] | None = None,
    ) -> None:
        self._sock, self._serve, self._stop = sock, serve, stop
        self._secure = secure
        self._counters = counters
        self._slots = threading.Semaphore(max_connections)
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._strangers: dict[threading.Thread, socket.socket] = {}
        self._acceptor = threading.Thread(target=self._accept_all, name="kv-accept", daemon=True)

    def start(self) -> None:
        """Listens and begins to accept."""
        self._sock.setblocking(False)
        self._sock.listen(_BACKLOG)
        self._acceptor.start()

    def close(self) -> None:
        """Stops accepting, ends every connection and returns when all threads are gone."""
        self._stop.set()
        self._acceptor.join()
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join()
        self._sock.close()

    def _accept_all(self) -> None:
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        poller.register(self._stop, select.POLLIN)
        wait = select.poll()
        wait.register(self._stop, select.POLLIN)
        while not self._stop.is_set():
            poller.poll()
            try:
                connection, _ = self._sock.accept()
            except BlockingIOError:
                continue
            except OSError:
                # Out of descriptors, or the peer is gone already: wait, lest the loop spin.
                self._counters.add("accept_errors")
                wait.poll(100)
                continue
            self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        if not (self._slots.acquire(blocking=False) or self._make_room()):
            self._counters.add("over_limit")
            connection.close()
            return
        self._counters.add("accepted")
        connection.setblocking(False)
        thread = threading.Thread(target=self._run, args=(connection,), name="kv-send", daemon=True)
        try:
            self._start(thread, connection)
        except (RuntimeError, OSError):  # no thread or descriptor to be had: this peer tries again
            self._counters.add("over_limit")
            with self._lock:
                self._threads.discard(thread)
            self._known(thread)
            self._slots.release()
            connection.close()

    def _start(self, thread: threading.Thread, connection: socket.socket) -> None:
        with self._lock:
            self._threads.add(thread)
            if self._secure is not None:
                # A descriptor of our own: the connection's may be another's by the time we want to end it.
                self._strangers[thread] = connection.dup()
        thread.start()

    def _make_room(self) -> bool:
        """Ends the oldest stranger; whether its place could be taken."""
        with self._lock:
            oldest = next(iter(self._strangers), None)
            if oldest is None:
                return False
            with self._strangers.pop(oldest) as end, contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._counters.add("displaced")
        return self._slots.acquire(timeout=_ROOM_S)

    def _known(self, thread: threading.Thread) -> None:
        """This thread's peer is no stranger any more, or gone."""
        with self._lock:
            end = self._strangers.pop(thread, None)
        if end is not None:
            end.close()

    def _run(self, connection: socket.socket) -> None:
        try:
            if self._secure is not None:
                try:
                    connection = self._secure(connection)
                finally:
                    self._known(threading.current_thread())
            self._serve(connection)
        except WireError:
            self._counters.add("violations")
        except Untrusted:
            self._counters.add("untrusted")
        except Stalled:
            self._counters.add("stalled")
            # Reset: what the kernel still holds for a peer that takes nothing must go too.
            with contextlib.suppress(OSError):  # used up by a TLS handshake that did not end
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except (PeerClosed, OSError):
            self._counters.add("closed_by_peer")
        except Exception:
            self._counters.add("errors")
            log.exception("a data plane connection failed")
        finally:
            connection.close()
            with self._lock:
                self._threads.discard(threading.current_thread())
            self._slots.release()
