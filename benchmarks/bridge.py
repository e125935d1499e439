"""What a handover's data plane pays for pages of another layout: a decode worker's reads with staging and
re-layout, beside reads of as many bytes that are taken as they are.

What lives here: both ends in this process, with the product's servers, readers and `decode_worker.reads`;
progress on stderr, a table on stdout, JSON in benchmarks/results. What does not: the copies by themselves
(`benchmarks.relayout`), sessions and compute.

    python -m benchmarks.bridge [--rounds 7] [--tokens 1024] [--wall] [--out NAME]

The default model's pages in bfloat16, of (ranks, page size) at the source and here. A round pulls a prompt
whose pages are cut as ours are, then the same prompt cut otherwise; the ratio is the median of paired ones.
Time is the processor's, of both ends together, since a busy machine says little by the wall; --wall is the
wall. Copies are those of the plan for a page of the source, over all ranks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import secrets
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import machine, now
from benchmarks.relayout import RESULTS, layout, say
from decode_worker.reads import Reads
from decode_worker.spread import Spread
from kvtransfer.effects import StartRead
from kvtransfer.plan import Origin, ReplicaLayout, bridge_plan, bridged, layout_text, same
from kvtransfer.port import BETWEEN_RANKS
from kvtransfer.transport import ReadStatus, ServerConfig, transport
from pdserve.kvcache.layout import rank_pool_id
from pdserve.kvcache.pool import KVPool
from pdserve.types import Key, PageName, PeerRef
from prefill_worker.sources import RankSource

KEY = Key(request_id="benchmark")
SIDES = ((1, 16), (1, 32), (2, 16), (3, 16), (3, 32))
WAIT_S = 60.0


class Open:
    """Pages that everybody may have and that never change."""

    def authorise(self, ticket: bytes, key: Key) -> bool:
        return True

    def pin(self, page: int, generation: int, key: Key, pin_id: str) -> bool:
        return True

    def unpin(self, pin_id: str) -> None:
        return None


def pools(cut: ReplicaLayout, tokens: int, pool_id: int) -> list[KVPool]:
    """A pool for each rank, filled."""
    made = []
    for rank in range(len(cut.ranks)):
        pool = KVPool.create(cut.rank_pages(rank), cut.pages_for(tokens), rank_pool_id(pool_id, rank))
        for page in range(pool.num_pages):
            view = np.frombuffer(pool.page_view(page), np.uint8)
            view[:] = np.random.default_rng(page).integers(0, 120, view.size, np.uint8)
        made.append(pool)
    return made


class Far:
    """The source: its pools, page servers and digests."""

    def __init__(self, cut: ReplicaLayout, tokens: int, directory: str) -> None:
        self.cut, self.text, self.pool_id = cut, layout_text(cut), secrets.randbits(64)
        guard: Any = Open()
        sources = [RankSource(r, pool, guard) for r, pool in enumerate(pools(cut, tokens, self.pool_id))]
        self.servers = {
            name: [transport(name).server(source, ServerConfig(directory=directory)) for source in sources]
            for name in ("shm", "tcp")
        }
        for server in itertools.chain.from_iterable(self.servers.values()):
            server.start()
        size = cut.page_size
        self.digests = [
            [source.digest(page, page, min(size, tokens - page * size)) for source in sources]
            for page in range(cut.pages_for(tokens))
        ]

    def peer(self, name: str) -> PeerRef:
        """How to reach it by one transport."""
        ends = BETWEEN_RANKS.join(server.endpoint() for server in self.servers[name])
        return PeerRef(
            worker_id=secrets.token_hex(4), incarnation=1, control="", host_id="here", layout=self.text,
            **{name: ends},
        )  # fmt: skip

    def close(self) -> None:
        """Ends its servers."""
        for server in itertools.chain.from_iterable(self.servers.values()):
            server.close()


@dataclass(frozen=True, slots=True)
class Parts:
    """What `Reads` asks of its worker."""

    pools: tuple[KVPool, ...]
    context: Any
    transports: tuple[str, ...] = ("shm", "tcp")
    host_id: str = "here"
    tls: None = None


@dataclass(frozen=True, slots=True)
class Context:
    layout: str


class Near:
    """The decode worker's data plane."""

    def __init__(self, cut: ReplicaLayout, tokens: int) -> None:
        self.cut, self.text, self.tokens = cut, layout_text(cut), tokens
        self.parts = Parts(tuple(pools(cut, tokens, 1)), Context(self.text))
        self._handlers: dict[type, Callable[[Any], None]] = {}
        self._left, self._lock, self._over = 0, threading.RLock(), threading.Event()
        self.loop = self
        role: Any = self
        port: Any = self
        self._reads = Reads(port, role)

    def on(self, effect: type, handler: Callable[[Any], None]) -> None:
        self._handlers[effect] = handler

    def feed_soon(self, make: Callable[[float], list[Any]]) -> None:
        with self._lock:
            make(0.0)

    def read_done(self, read_id: int, status: ReadStatus, *_: object) -> list[Any]:
        """A read ended."""
        assert status is ReadStatus.GOOD, status
        self._left -= 1
        if not self._left:
            self._over.set()
        return []

    def pull(self, far: Far, peer: PeerRef, clock: Callable[[], float]) -> float:
        """Seconds for the whole prompt."""
        effects = self._effects(far, peer)
        self._left = len(effects)
        self._over.clear()
        before = clock()
        with self._lock:
            for effect in effects:
                self._handlers[StartRead](effect)
        assert self._over.wait(WAIT_S)
        return clock() - before

    def _effects(self, far: Far, peer: PeerRef) -> list[StartRead]:
        origin: Origin = bridged(far.text, self.text)
        if far.text == self.text:
            origin = same(self.cut.page_size, len(self.cut.ranks))
        spread = Spread(origin=origin, rows=self.tokens, page_size=self.cut.page_size)
        table = tuple(np.random.default_rng(3).permutation(self.cut.pages_for(self.tokens)).tolist())
        numbers = itertools.count()
        return [
            StartRead(
                read_id=next(numbers), peer=peer, key=KEY, ticket=b"t",
                source=PageName(pool_id=far.pool_id, page=index, generation=0), index=index,
                valid_rows=min(origin.page_size, self.tokens - index * origin.page_size),
                digest=far.digests[index][rank], target_page=table[spread.lacking(index)[0]], rank=rank,
                num_ranks=origin.num_ranks, relay=spread.relay(index, table),
            )
            for index in range(spread.num_source_pages)
            for rank in origin.parts
        ]  # fmt: skip

    def close(self) -> None:
        """Ends its readers."""
        self._reads.stop()


def measure(source: tuple[int, int], target: tuple[int, int], args: Any) -> list[dict[str, Any]]:
    """One pair of cuts by every transport."""
    clock = time.perf_counter if args.wall else time.process_time
    one, other = layout("bfloat16", *source), layout("bfloat16", *target)
    plan = bridge_plan(layout_text(one), layout_text(other))
    copies = len(plan.copies) * one.page_size / plan.span_tokens
    size = sum(one.page_bytes(rank) for rank in range(len(one.ranks))) * one.pages_for(args.tokens)
    found = []
    with tempfile.TemporaryDirectory() as directory:
        near = Near(other, args.tokens)
        like, unlike = Far(other, args.tokens, directory), Far(one, args.tokens, directory)
        for name in ("shm", "tcp"):
            peers = like.peer(name), unlike.peer(name)
            rounds = [
                (near.pull(like, peers[0], clock), near.pull(unlike, peers[1], clock))
                for _ in range(args.rounds + 1)
            ][1:]  # fmt: skip
            found.append(
                {
                    "source": source, "target": target, "transport": name, "copies_per_page": copies,
                    "same_gb_s": size / statistics.median(a for a, _ in rounds) / 1e9,
                    "bridged_gb_s": size / statistics.median(b for _, b in rounds) / 1e9,
                    "of_same": statistics.median(a / b for a, b in rounds),
                }
            )  # fmt: skip
        near.close()
        like.close()
        unlike.close()
    return found


def main(argv: list[str]) -> int:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--wall", action="store_true")
    parser.add_argument("--out", default="bridge")
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for source, target in itertools.product(SIDES, SIDES):
        if source == target:
            continue
        say(f"{source} to {target}")
        rows += measure(source, target, args)
    print("| source | here | way | copies per source page | as they are GB/s | re-laid GB/s | of it |")
    for row in rows:
        cuts = " | ".join(f"TP {tp}, {size}" for tp, size in (row["source"], row["target"]))
        figures = f"{row['copies_per_page']:.1f} | {row['same_gb_s']:.1f} | {row['bridged_gb_s']:.1f}"
        print(f"| {cuts} | {row['transport']} | {figures} | {row['of_same']:.2f} |")
    told = {
        "date": now().isoformat(timespec="seconds"),
        "machine": machine(),
        "settings": vars(args),
        "rows": rows,
    }
    Path(RESULTS / f"{args.out}.json").write_text(json.dumps(told, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
