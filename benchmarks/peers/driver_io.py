"""The driver's side of the JSON-lines dialogue. Runs inside a peer's venv: standard library only.

The first line says hello. Then the runner sends {"op": "run", "prompts": [[id, ...], ...], "max_tokens": n},
{"op": "load", ...the same, "at": [seconds, ...], "limit_s": seconds} or {"op": "quit"}; the answer to a run
or a load is {"times": [[seconds from the start, per token], ...]} or {"error": text}. A load sends each
prompt at its time, whatever became of the others, and gives up what is unfinished after limit_s.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

Times = list[list[float]]


class Batching(Protocol):
    """A peer's continuous batching, as a load drives it."""

    def add(self, request: int, prompt: Sequence[int], max_tokens: int) -> None:
        """Takes a request in."""
        ...

    def busy(self) -> bool:
        """Whether any request is unfinished."""
        ...

    def step(self) -> Iterable[tuple[int, int]]:
        """One step; (request, new tokens)."""
        ...

    def abort(self) -> None:
        """Drops all requests."""
        ...


def claim_stdout() -> Any:
    """Keeps the pipe to the runner for us; whatever the peer prints goes to stderr, which is a log file."""
    pipe = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return pipe


def flags_of(usual: dict[str, Any]) -> dict[str, Any]:
    """The settings: the driver's usual ones and those of the second argument (JSON) over them."""
    return {**usual, **(json.loads(sys.argv[2]) if len(sys.argv) > 2 else {})}


def serve(
    pipe: Any,
    hello: dict[str, Any],
    run: Callable[[list[list[int]], int], Times],
    batching: Batching | None = None,
) -> None:
    """Answers until told to quit or the runner is gone. batching: for loads, where the peer can do them."""
    print(json.dumps(hello), file=pipe)
    for line in sys.stdin:
        order = json.loads(line)
        if order["op"] == "quit":
            return
        try:
            if order["op"] == "load":
                times = play(batching, order) if batching is not None else []
            else:
                times = run(order["prompts"], order["max_tokens"])
            answer: dict[str, Any] = {"times": times}
        except Exception as error:  # told to the runner, which reports it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=pipe)


def play(batching: Batching, order: dict[str, Any]) -> Times:
    """A load: requests arrive by the clock, between two steps if one runs. order["at"]: in rising order."""
    prompts, at = order["prompts"], order["at"]
    watch, sent = Stopwatch(len(prompts)), 0
    while (now := watch.now()) < order["limit_s"]:
        while sent < len(at) and at[sent] <= now:
            batching.add(sent, prompts[sent], order["max_tokens"])
            sent += 1
        if batching.busy():
            for request, count in batching.step():
                watch.tokens(request, count)
        elif sent < len(at):
            time.sleep(max(0.0, min(at[sent], order["limit_s"]) - watch.now()))
        else:
            return watch.times
    batching.abort()
    return watch.times


class Stopwatch:
    """Arrival times of tokens by request, from the moment it was made."""

    def __init__(self, num_requests: int) -> None:
        self.times: Times = [[] for _ in range(num_requests)]
        self._start = time.perf_counter()

    def now(self) -> float:
        """Seconds from the start."""
        return time.perf_counter() - self._start

    def tokens(self, request: int, count: int) -> None:
        """Notes that `count` tokens of a request arrived now."""
        self.times[request] += [self.now()] * count
