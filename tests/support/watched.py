"""A real fleet under a real Prometheus: a router that wants a key, workers of a tiny model, and faults.

Processes take their faults from files, so that a test holds requests where it wants them while Prometheus
looks. What does not live here: what is sent, and what the panels must show.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from pdserve.client import Client, Stream
from pdserve.client.request import GenerateOptions
from pdserve.failpoints import TESTING, VARIABLE
from pdserve.types import Role
from router.auth.keys import format_keys, make_key
from tests.support import tiny_models
from tests.support.prometheus import Scraped, prometheus
from tests.support.stack import Stack

NUM_PAGES, PAGE, CHUNK, SEQUENCES = 48, 16, 64, 2
SHORT = 8
"""Prompts below this many tokens are computed on decode."""


@dataclass
class Watched:
    """key: the one that is let in."""

    stack: Stack
    prometheus: Scraped
    folder: Path
    key: str
    asked: int = 0

    def client(self, key: str | None = None) -> Client:
        """One that asks once. key: "" shows none."""
        return Client(self.stack.address, retry=None, api_key=self.key if key is None else key)

    def arm(self, text: str) -> None:
        """Changes the faults of every process; "" ends them."""
        beside = self.folder / "new"
        beside.write_text(text)
        beside.rename(self.folder / "faults")

    def prompt(self, length: int) -> list[int]:
        """Token ids that nobody sent before."""
        self.asked += 1
        return [(self.asked * 7919 + i * 104729) % 250 for i in range(length)]

    def start(
        self,
        client: Client,
        length: int,
        max_tokens: int,
        prompt: list[int] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """A request on its way, of exactly so many tokens. prompt: this one instead of a new one."""
        tokens = prompt or self.prompt(length)
        fixed: GenerateOptions = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        return client.generate(token_ids=tokens, **{**fixed, **options})


def metrics_url(stack: Stack) -> str:
    """Where the router's metrics are, as it says when it starts."""
    assert stack.router.stdout is not None
    line = next(line for line in stack.router.stdout if line.startswith("metrics on "))
    return line.split()[-1].removesuffix("/metrics")


@contextmanager
def watched(directory: Path) -> Iterator[Watched]:
    """One prefill and one decode worker, seen by Prometheus."""
    key, entry = make_key("shop", admin=True, note="", lives_s=None, now=time.time())
    keys, folder = directory / "keys", directory / "faults"
    keys.touch(mode=0o600)
    keys.write_bytes(format_keys([entry]))
    folder.mkdir()
    (folder / "faults").write_text("")
    flags = ("--api-key-file", str(keys), "--local-prefill-threshold", str(SHORT), "--max-queue", "2")
    stack = Stack.start(
        {Role.PREFILL: 1, Role.DECODE: 1},
        environ={"": {TESTING: "1", VARIABLE: f"@{folder / 'faults'}"}},
        router_flags=flags,
        model=str(tiny_models.save(tiny_models.llama(), directory / "model")),
        num_pages=NUM_PAGES,
        page_size=PAGE,
        prefill_chunk_tokens=CHUNK,
        max_num_seqs=SEQUENCES,
        metrics_port=0,
    )
    try:
        (directory / "prometheus").mkdir()
        with prometheus(directory / "prometheus", f"{metrics_url(stack)}/targets") as scraped:
            yield Watched(stack, scraped, folder, key)
    finally:
        stack.stop()
