"""NIXL's own pace, beside which ours over it is measured: all pages by one READ, nothing else.

What lives here: reads without queue, digest or callback, against a source that our nixl transport serves.
What does not: the benchmark around it (`benchmarks.transfer`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from kvtransfer.listener import Signal
from kvtransfer.nixl.agent import Agent, address_of
from kvtransfer.nixl.frames import split_endpoint
from kvtransfer.nixl.link import Link
from kvtransfer.transport import ReaderConfig, ReadRequest


class RawReads:
    """Reads pages 0 to n-1 of a source into n targets, again and again. For one thread."""

    def __init__(
        self, link: Link, config: ReaderConfig, hello: ReadRequest, targets: Sequence[memoryview]
    ) -> None:
        region = link.greet(hello)
        host, _, _ = split_endpoint(config.endpoint)
        self._size = config.page_bytes
        self._agent = Agent("raw-reads", host, is_source=False)
        self._peer = self._agent.add_peer(region.metadata)
        here = [address_of(target) for target in targets]
        self._agent.register(min(here), max(here) + self._size - min(here))
        self._pairs = [(region.address(page), address) for page, address in enumerate(here)]

    def pull(self) -> None:
        """One transfer of all pages, with as many descriptors; polled without a pause."""
        handle, done = self._agent.post_read(self._peer, self._pairs, self._size)
        while not done:
            done = self._agent.is_done(handle)
        self._agent.release(handle)

    def close(self) -> None:
        """Destroys the agent."""
        self._agent.close()


@contextlib.contextmanager
def raw_reads(config: ReaderConfig, hello: ReadRequest, targets: Sequence[memoryview]) -> Iterator[RawReads]:
    """hello: any read with a good ticket. targets: parts of one mapping, equally long, one for each page."""
    wake = Signal()
    with (
        contextlib.closing(wake),
        Link(config, wake, lambda: False) as link,
        contextlib.closing(RawReads(link, config, hello, targets)) as reads,
    ):
        yield reads
