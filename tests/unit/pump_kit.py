"""A frame pump at one end of a socket pair, with reads that it was lent."""

from __future__ import annotations

import os
import socket
from contextlib import closing
from typing import Any

from kvtransfer.digest import page_digest, page_header
from kvtransfer.listener import Signal
from kvtransfer.reads import Counters, ReadTable
from kvtransfer.tcp.pump import PagePump
from kvtransfer.transport import ReadDone, ReaderConfig, ReadRequest
from kvtransfer.wire import Kind, pack
from pdserve.types import Key, PageName

EXTENT: dict[str, Any] = {"layout": "ab12", "layer_first": 1, "layer_last": 3, "shard": 2}
ANSWERS = frozenset({Kind.PAGE, Kind.STALE, Kind.DENIED, Kind.DROPPED})
KEY = Key(request_id="r")
GUARD = 64
WAIT_S = 20


def config(page_bytes: int) -> ReaderConfig:
    return ReaderConfig(endpoint="", pool_id=1, page_bytes=page_bytes, **EXTENT)


class Bench:
    """A pump at one end of a socket pair; its reads have the sequences from `first` on."""

    def __init__(
        self,
        page_bytes: int,
        num_reads: int,
        *,
        first: int = 1,
        digests: bool = True,
        pair: tuple[socket.socket, socket.socket] | None = None,
    ) -> None:
        self.here, self.there = pair or socket.socketpair()
        self.here.setblocking(False)
        self.page_bytes, self.first = page_bytes, first
        self.wake, self.waits = Signal(), False
        self.table = ReadTable(config(page_bytes), Counters())
        self.done: list[ReadDone] = []
        self.landed: list[tuple[int, int, bytes]] = []
        self.pump = PagePump(
            self.here, self.wake, expect=ANSWERS, page_bytes=page_bytes, may_wait=lambda: self.waits,
            header=page_header(**EXTENT) if digests else None, landed=self.landed.extend,
        )  # fmt: skip
        self.memory = [bytearray(b"\xa5" * (page_bytes + 2 * GUARD)) for _ in range(num_reads)]
        for number in range(num_reads):
            self.table.add(self.request(number), self.done.append)
        self.reads = self.table.ask(num_reads)
        for number, pending in enumerate(self.reads):
            pending.sequence = first + number
        self.table.lend(self.reads, self.pump.lend, self.pump.call_off)

    def request(self, number: int) -> ReadRequest:
        target = memoryview(self.memory[number])[GUARD : GUARD + self.page_bytes]
        return ReadRequest(
            read_id=number, key=KEY, ticket=b"", source=PageName(pool_id=1, page=number, generation=1),
            index=number, valid_rows=16, digest=b"", target=target,
        )  # fmt: skip

    def page(self, number: int, content: bytes) -> bytes:
        """A whole frame with the page of a read."""
        return pack(Kind.PAGE, sequence=self.first + number, payload_bytes=self.page_bytes) + content

    def holds(self, number: int, content: bytes) -> bool:
        """Whether a read's target holds just that, and its surroundings nothing."""
        return bytes(self.memory[number]) == b"\xa5" * GUARD + content + b"\xa5" * GUARD

    def untouched(self, number: int) -> bool:
        return self.holds(number, b"\xa5" * self.page_bytes)

    def close(self) -> None:
        self.here.close()
        self.there.close()
        self.wake.close()


def bench(page_bytes: int = 3000, num_reads: int = 3, **more: Any) -> closing[Bench]:
    return closing(Bench(page_bytes, num_reads, **more))


def contents(num: int, size: int) -> list[bytes]:
    return [os.urandom(size) for _ in range(num)]


def digest(content: bytes, index: int) -> bytes:
    return page_digest(memoryview(content), index=index, valid_rows=16, **EXTENT)
