"""A peer as a child process: one engine in one variant. Frozen whenever it is not its turn."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.install import PEERS, PeerError, interpreter, last_words, redact
from benchmarks.peers.specs import Engine, Variant
from benchmarks.peers.weights import WEIGHTS

START_TIMEOUT_S = 600.0
RUN_TIMEOUT_S = 300.0


class Peer:
    """A started driver. Between runs its process group is stopped, so that nothing of it spins."""

    def __init__(self, engine: Engine, variant: Variant) -> None:
        """Starts the driver and waits until it has loaded. Raises PeerError."""
        self.engine = engine
        self.name = f"{engine.name} {variant.name}"
        self._log = PEERS / f"{self.name.replace(' ', '-')}.log"
        names = {"venv": PEERS / engine.name, "cpus": ",".join(map(str, sorted(os.sched_getaffinity(0))))}
        env = {key: value.format(**names) for key, value in variant.env.items()}
        started = time.perf_counter()
        driver = PEERS.parent / "peers" / engine.driver
        command = [str(interpreter(engine)), str(driver), str(WEIGHTS / variant.model)]
        command += [json.dumps(dict(variant.flags))] if variant.flags else []
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "DO_NOT_TRACK": "1", **env},
                start_new_session=True,
            )
        try:
            self.hello = self._answer(START_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise
        shown = {key: value.format(**{**names, "venv": "VENV"}) for key, value in variant.env.items()}
        self.hello |= {"env": shown, "model": variant.model}
        self.hello["start_s"] = round(time.perf_counter() - started, 1)
        self._signal(signal.SIGSTOP)

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[float]]:
        """Sends all prompts at once; token arrival times per request. Raises PeerError."""
        return self._ask({"op": "run", "prompts": prompts, "max_tokens": max_tokens})

    def load(
        self, prompts: Sequence[Sequence[int]], at_s: Sequence[float], max_tokens: int, limit_s: float
    ) -> list[list[float]]:
        """Sends each prompt at its time; token times per request, those within limit_s. Raises PeerError."""
        order = {"op": "load", "prompts": prompts, "at": at_s, "max_tokens": max_tokens, "limit_s": limit_s}
        return self._ask(order)

    def _ask(self, order: dict[str, Any]) -> list[list[float]]:
        self._signal(signal.SIGCONT)
        try:
            self._send(order)
            answer = self._answer(RUN_TIMEOUT_S)
        finally:
            self._signal(signal.SIGSTOP)
        if "error" in answer:
            raise PeerError(f"{self.name}: {redact(answer['error'])[:300]}")
        times: list[list[float]] = answer["times"]
        return times

    def stop(self) -> None:
        """Ends the driver and everything it started."""
        self._signal(signal.SIGCONT)
        try:
            self._send({"op": "quit"})
            self._process.wait(timeout=10)
        except (PeerError, subprocess.TimeoutExpired):
            pass
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _send(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise PeerError(f"{self.name}: {last_words(self._log)}") from None

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                self._signal(signal.SIGKILL)  # a late answer must not be taken for the next one's
                raise PeerError(f"{self.name}: no answer within {timeout_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"{self.name}: {last_words(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return
