"""The driver's side of the JSON-lines dialogue. Runs inside a peer's venv: standard library only.

The first line says hello. Then the runner sends {"op": "run", "prompts": [[id, ...], ...], "max_tokens": n}
or {"op": "quit"}; the answer to a run is {"times": [[seconds from the start, per token], ...]} or
{"error": text}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Times = list[list[float]]


def claim_stdout() -> Any:
    """Keeps the pipe to the runner for us; whatever the peer prints goes to stderr, which is a log file."""
    pipe = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return pipe


def serve(pipe: Any, hello: dict[str, Any], run: Callable[[list[list[int]], int], Times]) -> None:
    """Answers until told to quit or the runner is gone."""
    print(json.dumps(hello), file=pipe)
    for line in sys.stdin:
        order = json.loads(line)
        if order["op"] == "quit":
            return
        try:
            answer: dict[str, Any] = {"times": run(order["prompts"], order["max_tokens"])}
        except Exception as error:  # told to the runner, which reports it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=pipe)


class Stopwatch:
    """Arrival times of tokens by request, from the moment it was made."""

    def __init__(self, num_requests: int) -> None:
        self.times: Times = [[] for _ in range(num_requests)]
        self._start = time.perf_counter()

    def tokens(self, request: int, count: int) -> None:
        """Notes that `count` tokens of a request arrived now."""
        self.times[request] += [time.perf_counter() - self._start] * count
