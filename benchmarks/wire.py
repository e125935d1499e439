"""What the kernel says of this process's TCP connections."""

from __future__ import annotations

import os
import socket
import struct

_BYTES_ACKED = struct.Struct("<Q")
_ACKED_AT = 120  # of tcp_info


def wire_bytes() -> int:
    """Bytes that this process sent over TCP and that arrived, over all its connections."""
    total, seen = 0, set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{fd}")
            if not name.startswith("socket:") or name in seen:
                continue
            seen.add(name)
            with socket.socket(fileno=os.dup(int(fd))) as sock:
                if sock.family is socket.AF_INET:
                    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += _BYTES_ACKED.unpack_from(info, _ACKED_AT)[0]
        except OSError:  # the directory's own descriptor
            continue
    return total
