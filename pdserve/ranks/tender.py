"""What a rank does for a rebalance: orders of its leader in, words about them out with each step.

What lives here: carrying orders out, in the order in which they come, between two steps; all ranks get those
that need all of them at the same point. What does not: choosing them (`rebalancing`), copying (`ferry`).

    order     | fields                                  | word, later
    open      | lane_bytes (and the ferry's descriptor) |
    give      | copy, layer, expert, lane               | given: copy, sum
    take      | copy, layer, expert, lane, sum          | taken: copy, same
    stop      | copy                                    | given or taken all the same, with nothing in it
    drop      | layer, expert                           |
    try       | tables, copies                          | canary: same, with the step that met rows
    probe     |                                         | canary: same
    untry     |                                         |
    install   | tables, version                         |

Orders and words are JSON.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from pdserve.errors import WorkerLost
from pdserve.models.expert_bank import Block, ExpertBank, Homes
from pdserve.ranks.ferry import Ferry, Ferryman, Job

Order = dict[str, Any]
Word = dict[str, Any]


class Tender:
    """Of one rank. The compute thread calls it; `words` may come from the ferryman's thread meanwhile."""

    def __init__(self, bank: ExpertBank, ferryman: Ferryman | None = None) -> None:
        self._bank = bank
        self._ferry: Ferry | None = None
        self._ferryman = ferryman or Ferryman()
        self._lock = threading.Lock()
        self._words: list[Word] = []
        self._jobs: dict[int, Job] = {}

    @property
    def version(self) -> int:
        """Of the tables that serve."""
        return self._bank.version

    @property
    def block_bytes(self) -> int:
        """Of one expert of one layer."""
        return self._bank.block_bytes

    def order(self, order: Order, fd: int | None = None) -> None:
        """Carries one out. fd: of an `open`; may be closed afterwards. Raises WorkerLost for no order."""
        match order["do"]:
            case "open" if fd is not None:
                self._ferry = Ferry(fd, order["lane_bytes"])
            case "give":
                self._give(order)
            case "take":
                self._take(order)
            case "stop":
                self._stop(order["copy"])
            case "drop":
                self._bank.drop([(order["layer"], order["expert"])])
            case "try":
                self._bank.begin_trial(_tables(order), [tuple(copy) for copy in order["copies"]])
            case "untry":
                self._bank.end_trial()
            case "probe":
                self._bank.probe()
            case "install":
                self._bank.end_trial()
                self._bank.install(_tables(order), order["version"])
            case _:
                raise WorkerLost("a rank of this replica is out of step")

    def words(self) -> list[Word]:
        """What there is to say since the last time; after each step."""
        with self._lock:
            words, self._words = self._words, []
        for word in words:
            self._jobs.pop(word["copy"], None)
        same = self._bank.verdict()
        if same is not None:
            self._bank.end_trial()
            words.append({"word": "canary", "same": same})
        return words

    def close(self) -> None:
        """No more copying."""
        self._ferryman.close()

    def _give(self, order: Order) -> None:
        block = self._bank.block(order["layer"], order["expert"])
        copy = order["copy"]
        self._sail(
            order,
            block,
            out=True,
            done=lambda checksum: self._say({"word": "given", "copy": copy, "sum": checksum}),
        )

    def _take(self, order: Order) -> None:
        block = self._bank.expect(order["layer"], order["expert"])
        copy, wanted = order["copy"], order["sum"]
        self._sail(
            order,
            block,
            out=False,
            done=lambda checksum: self._say({"word": "taken", "copy": copy, "same": checksum == wanted}),
        )

    def _sail(self, order: Order, block: Block, *, out: bool, done: Callable[[int | None], None]) -> None:
        assert self._ferry is not None
        lane = self._ferry.lane(order["lane"])
        job = Job(pieces=block.pieces(), lane=lane, out=out, keep=(block, self._ferry), done=done)
        self._jobs[order["copy"]] = job
        self._ferryman.add(job)

    def _stop(self, copy: int) -> None:
        if copy in self._jobs:
            self._jobs[copy].given_up.set()

    def _say(self, word: Word) -> None:
        with self._lock:
            self._words.append(word)


def _tables(order: Order) -> dict[int, Homes]:
    return {
        int(layer): [[(slot, share) for slot, share in of_expert] for of_expert in homes]
        for layer, homes in order["tables"].items()
    }


def encode(value: object) -> bytes:
    """Orders or words as bytes."""
    return json.dumps(value).encode()


def decode(data: bytes) -> list[dict[str, Any]]:
    """The inverse. Raises WorkerLost for what is none."""
    try:
        found = json.loads(data) if data else []
    except ValueError:
        raise WorkerLost("a rank of this replica is out of step") from None
    if not isinstance(found, list):
        raise WorkerLost("a rank of this replica is out of step")
    return found
