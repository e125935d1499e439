"""The rebalancer's driver against pretended ranks: late words, damaged copies, canaries that differ.

Ranks hold the names of experts in place of weights. After each step all ranks have the same tables, every
home holds its expert, and no lane has two users.
"""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.parallel.placement import plan
from pdserve.parallel.placement_table import Home, Placement, Topology, contiguous
from pdserve.ranks.frames import Kind, receive
from pdserve.ranks.rebalancing import Rebalancing
from pdserve.ranks.tender import Order, Word, decode

LAYERS, EXPERTS, RANKS, SLOTS = 3, 6, 3, 3
TABLE = contiguous(LAYERS, EXPERTS, Topology(num_nodes=1, ranks_per_node=RANKS), SLOTS)
LIMIT = 3000


@dataclass
class Luck:
    """What goes wrong, and how late words are."""

    chance: random.Random
    damage: float
    differ: float
    clock: float = 0.0

    def late(self) -> int:
        return self.chance.randrange(4)


@dataclass
class Rank:
    """What a rank holds by layer and expert, what is to come, and words that will be said. Rank 0's is the
    leader's tender."""

    number: int
    luck: Luck
    lanes: dict[int, tuple[int, Any]]
    sailing: set[int]
    block_bytes: int = 8
    version: int = 0
    coming: dict[tuple[int, int], Any] = field(default_factory=dict)
    words: list[tuple[int, Word]] = field(default_factory=list)
    trial: bool = False

    def __post_init__(self) -> None:
        self.tables = {n: plain(TABLE.layers[n]) for n in range(LAYERS)}
        self.held = {
            (n, e): (n, e)
            for n, layer in enumerate(TABLE.layers)
            for e, homes in enumerate(layer)
            if any(home.rank == self.number for home in homes)
        }

    def order(self, order: Order, fd: int | None = None) -> None:
        copy, key = order.get("copy"), (order.get("layer"), order.get("expert"))
        match order["do"]:
            case "open":
                assert fd is not None
            case "give":
                assert self.lanes.get(order["lane"], (0, 0))[0] not in self.sailing, "a lane has one user"
                self.lanes[order["lane"]] = (copy, self.held[key])
                self.later({"word": "given", "copy": copy, "sum": 1})
            case "take":
                owner, value = self.lanes[order["lane"]]
                assert owner == copy
                assert key not in self.coming
                self.coming[key] = value
                good = self.luck.chance.random() >= self.luck.damage
                self.later({"word": "taken", "copy": copy, "same": good})
            case "stop":
                pass
            case "drop":
                self.coming.pop(key, None)
            case "try":
                self.trial = True
            case "untry":
                self.trial = False
            case "probe":
                pass
            case "install":
                self.install(order)

    def install(self, order: Order) -> None:
        self.trial, self.version = False, order["version"]
        for name, homes in order["tables"].items():
            layer = int(name)
            own = {e for e, h in enumerate(homes) for slot, _ in h if slot // SLOTS == self.number}
            value = {(layer, e): self.held.get((layer, e), self.coming.get((layer, e))) for e in own}
            self.held = {key: x for key, x in self.held.items() if key[0] != layer} | value
            for e in own:
                self.coming.pop((layer, e), None)
            self.tables[layer] = [[list(home) for home in of_expert] for of_expert in homes]

    def later(self, word: Word) -> None:
        self.sailing.add(word["copy"])
        self.words.append((self.luck.late(), word))

    def said(self, same: bool) -> list[Word]:
        now = [word for wait, word in self.words if wait == 0]
        self.words = [(wait - 1, word) for wait, word in self.words if wait > 0]
        self.sailing -= {word["copy"] for word in now}
        if self.trial:
            self.trial = False
            now.append({"word": "canary", "same": same})
        return now


def plain(layer: Any) -> list[list[list[float]]]:
    return [[[home.slot, home.share] for home in homes] for homes in layer]


class Host:
    def __init__(self, luck: Luck) -> None:
        self.luck = luck
        lanes: dict[int, tuple[int, Any]] = {}
        sailing: set[int] = set()
        self.ranks = [Rank(number, luck, lanes, sailing) for number in range(RANKS)]
        pairs = [socket.socketpair() for _ in range(RANKS - 1)]
        self.ours, self.theirs = [a for a, _ in pairs], [b for _, b in pairs]
        for sock in self.theirs:
            sock.setblocking(False)
        self.driver = Rebalancing(TABLE, self.ranks[0], self.ours, clock=lambda: luck.clock)  # type: ignore[arg-type]

    def close(self) -> None:
        for sock in [*self.ours, *self.theirs]:
            sock.close()

    def step(self) -> None:
        self.driver.before_step()
        for sock, rank in zip(self.theirs, self.ranks[1:], strict=True):
            obey(sock, rank)
        self.check()
        same = self.luck.chance.random() >= self.luck.differ
        self.driver.after_step([rank.said(same) for rank in self.ranks])
        self.luck.clock += 0.01

    def check(self) -> None:
        table = self.driver.status.table
        for rank in self.ranks:
            assert rank.version == self.driver.version
            for n in range(LAYERS):
                assert rank.tables[n] == plain(table.layers[n])
                for e, homes in enumerate(table.layers[n]):
                    for home in homes:
                        assert home.rank != rank.number or rank.held[n, e] == (n, e)


def obey(sock: socket.socket, rank: Rank) -> None:
    try:
        frame = receive_now(sock)
    except BlockingIOError:
        return
    assert frame.kind is Kind.ORDERS
    for order in decode(frame.body):
        rank.order(order, frame.fd)


def receive_now(sock: socket.socket) -> Any:
    if not sock.recv(1, socket.MSG_PEEK):
        raise AssertionError
    sock.setblocking(True)
    try:
        return receive(sock, with_fd=True)
    finally:
        sock.setblocking(False)


def target(seed: int, table: Any) -> Any:
    row = [100.0 / (rank + 1) ** 1.2 for rank in range(EXPERTS)]
    loads = [random.Random(seed + layer).sample(row, EXPERTS) for layer in range(LAYERS)]
    return plan(loads, table.topology, SLOTS, current=table).table


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999), damage=st.sampled_from([0.0, 0.2]), differ=st.sampled_from([0.0, 0.3]),
    plans=st.lists(st.integers(0, 99), min_size=1, max_size=4),
)  # fmt: skip
def test_every_home_holds_its_expert_whatever_goes_wrong(
    seed: int, damage: float, differ: float, plans: list[int]
) -> None:
    host = Host(Luck(random.Random(seed), damage, differ))
    try:
        for number in plans:
            before = host.driver.status.table
            wanted = target(number, before)
            host.driver.offer(wanted, wanted.copies_from(before))
            steps = 0
            while host.driver.busy:
                host.step()
                steps += 1
                assert steps < LIMIT
            host.luck.clock += 60.0  # past the rest after a failure
            if not damage and not differ:
                assert host.driver.status.table == wanted
        assert sum(host.driver.status.outcomes.values()) == len(plans)
    finally:
        host.close()


def test_a_loss_drops_what_is_under_way_and_counts_it_as_such() -> None:
    """Rank 2 holds replicas alone, so that the replica goes on."""
    held = ((0, 1, 2), (3, 4, 5), (0, 1, 3))
    homes: list[list[Home]] = [[] for _ in range(EXPERTS)]
    for rank, experts in enumerate(held):
        for place, expert in enumerate(experts):
            share = 0.5 if expert in held[2] else 1.0
            homes[expert].append(Home(rank=rank, slot=rank * SLOTS + place, share=share))
    layer = tuple(map(tuple, homes))
    table = Placement(topology=TABLE.topology, slots_per_rank=SLOTS, layers=(layer,) * LAYERS)
    pairs = [socket.socketpair() for _ in range(RANKS - 1)]
    tender = Rank(0, Luck(random.Random(1), 0, 0), {}, set())
    driver = Rebalancing(table, tender, [ours for ours, _ in pairs])  # type: ignore[arg-type]
    driver.offer(target(5, table))
    driver.before_step()
    assert driver.busy
    driver.lose(2)
    assert driver.status.outcomes == {"rank_lost": 1}
    assert driver.status.last == "rank_lost"
    assert driver.status.lost == {2}
    for ours, theirs in pairs:
        ours.close()
        theirs.close()
