"""Workers as real processes, and their memory as a fault in it would change it: from outside, by /proc.

What lives here: starting and asking worker processes, `ForeignPool`. What does not: what a fault must lead to
(tests), the wire between workers (`tests.support.relay`, `tests.support.chaos`).
"""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

from pdserve.config.worker import WorkerConfig
from pdserve.types import PeerRef

_HEADER = struct.Struct("<8sQQQQQQ64s")  # see pdserve.kvcache.poolheader


class WorkerProcess:
    """A worker in a process of its own. Its methods block."""

    def __init__(self, config: WorkerConfig, **environ: str) -> None:
        """Starts it; `wait` returns once it serves. environ: further variables of its environment."""
        environ = {**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive", **environ}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.worker_process"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ, text=True,
        )  # fmt: skip
        self._say(config.to_json())
        self._peer: PeerRef | None = None

    def wait(self) -> WorkerProcess:
        """Until it serves."""
        self._peer = PeerRef(**self._answer()["peer"])
        return self

    @property
    def peer(self) -> PeerRef:
        """How to reach it."""
        assert self._peer is not None
        return self._peer

    @property
    def pool(self) -> ForeignPool:
        """Its page memory, as it is now."""
        return ForeignPool(self._process.pid)

    def status(self) -> dict[str, Any]:
        """`WorkerHost.status`."""
        self._say("status")
        return self._answer()

    def counter(self, name: str) -> int:
        """One of its counters; 0 if it never counted."""
        return int(self.status()["counters"].get(name, 0))

    def stop(self) -> None:
        """Ends it."""
        if self._process.poll() is None:
            self._say("stop")
        self._process.wait(60)

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the worker process ended"
        answer: dict[str, Any] = json.loads(line)
        return answer


class ForeignPool:
    """The page pool in another process's memory: read and written behind its back.

    The pool's own descriptor can not be written by anybody (it is sealed); the owner's mapping can.
    """

    def __init__(self, pid: int) -> None:
        self._mem = Path(f"/proc/{pid}/mem")
        maps = Path(f"/proc/{pid}/maps").read_text()
        found = re.search(r"^(\w+)-\w+ rw-s .*memfd:pdserve-kv", maps, re.MULTILINE)
        assert found is not None, "no pool is mapped there"
        self._start = int(found[1], 16)
        fields = _HEADER.unpack(self._read(0, _HEADER.size))
        _, _, self.pool_id, self.num_pages, self.page_bytes, self._stride, self._first, layout = fields
        self.layout = layout.rstrip(b"\0").decode()

    def read(self, page: int) -> bytes:
        """A page's payload."""
        return self._read(self._at(page), self.page_bytes)

    def write(self, page: int, at: int, data: bytes) -> None:
        """Changes bytes of a page's payload."""
        assert 0 <= at <= self.page_bytes - len(data)
        with self._mem.open("r+b", buffering=0) as memory:
            memory.seek(self._start + self._at(page) + at)
            memory.write(data)

    def flip(self, page: int, at: int, mask: int = 0x40) -> None:
        """Flips bits of one byte."""
        (old,) = self._read(self._at(page) + at, 1)
        self.write(page, at, bytes([old ^ mask]))

    def find(self, start: bytes) -> list[int]:
        """Pages whose payload starts with these bytes."""
        return [p for p in range(self.num_pages) if self._read(self._at(p), len(start)) == start]

    def _at(self, page: int) -> int:
        assert 0 <= page < self.num_pages
        return int(self._first + page * self._stride)

    def _read(self, at: int, size: int) -> bytes:
        with self._mem.open("rb", buffering=0) as memory:
            memory.seek(self._start + at)
            return memory.read(size)
