"""Frames between a replica's leader and its ranks, over a Unix socket of this machine.

What lives here: kinds, lengths, descriptors beside a frame. What does not: what is in them, who sends when.

    u32 length of the body | u8 kind | body

Who is at the other end is known before any frame counts: the socket lies in a directory of this user alone,
the kernel names the peer's user, and the first frame carries the replica's token.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum

from pdserve.errors import WorkerLost

MAX_BYTES = 1 << 28
_HEAD = struct.Struct("<IB")
_GONE = "a rank of this replica is gone; it starts again"


class Kind(IntEnum):
    """What a frame is. HELLO, READY, FAILED and DONE come from a rank, the others from the leader."""

    HELLO = 1
    """JSON: rank, token, channel ("work" or "life"). The first frame of a connection."""
    READY = 2
    """JSON: what the rank loaded, with its pool's descriptor where it has one of its own."""
    FAILED = 3
    """JSON: label and message of the error that ends the rank."""
    PLAN = 4
    """u64 serial number, u32 version of the experts' tables, then a step plan."""
    DONE = 5
    """u64 serial number: the step is computed, and nothing of it touches a page any more. 0: built. Then
    words about experts (`tender`), if there are any."""
    STOP = 6
    """Empty: end."""
    MEET = 7
    """Empty: all ranks are ready, join the group. With the descriptor of its shared memory, if any."""
    POOL = 11
    """JSON: the id of the pool of all ranks, before MEET. With its descriptor."""
    ABORTED = 9
    """From a rank: u64 serial number of a step that was given up, for a rank is lost."""
    REGROUP = 10
    """JSON: the ranks that are left, a list. With the descriptor of their shared memory. A rank answers with
    the same, without a descriptor, once it has joined."""
    ORDERS = 8
    """Orders about experts (`tender`), before a plan; without an answer. With a ferry's descriptor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One frame. fd: the descriptor that came with it, now the reader's; or None."""

    kind: Kind
    body: bytes
    fd: int | None = None


def send(sock: socket.socket, kind: Kind, body: bytes = b"", *, fd: int | None = None) -> None:
    """Sends one frame, and a descriptor with it. Raises WorkerLost when the peer is gone or too slow."""
    data = _HEAD.pack(len(body), kind) + body
    try:
        if fd is None:
            sock.sendall(data)
        else:
            sent = socket.send_fds(sock, [data], [fd])
            sock.sendall(data[sent:])
    except OSError as error:
        raise WorkerLost(_GONE) from error


def receive(sock: socket.socket, *, with_fd: bool = False) -> Frame:
    """The next frame. Raises WorkerLost when the peer is gone, too slow, or says something else."""
    fds: list[int] = []
    try:
        if with_fd:
            head, fds, _, _ = socket.recv_fds(sock, _HEAD.size, 1, socket.MSG_CMSG_CLOEXEC)
        else:
            head = sock.recv(_HEAD.size)
        head += _exactly(sock, _HEAD.size - len(head)) if head else b""
        if not head:
            raise WorkerLost(_GONE)
        length, kind = _HEAD.unpack(head)
        if length > MAX_BYTES:
            raise WorkerLost("a rank of this replica said something that is too long")
        return Frame(kind=Kind(kind), body=_exactly(sock, length), fd=fds.pop() if fds else None)
    except (OSError, ValueError) as error:
        raise WorkerLost(_GONE) from error
    finally:
        for fd in fds:
            os.close(fd)


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    view, at = memoryview(data), 0
    while at < count:
        got = sock.recv_into(view[at:])
        if not got:
            raise WorkerLost(_GONE)
        at += got
    return bytes(data)
