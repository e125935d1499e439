"""The default flow over nixl with real workers: tokens and KV bits equal the local run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import psutil
import pytest

from kvtransfer.session.guard import cache_salt
from pdserve.kvcache.prefix import content_keys
from pdserve.types import HandoverMode, Role
from tests.support import direct as dx


@pytest.fixture(scope="module")
def fleet() -> Iterator[dx.Direct]:
    made = dx.Direct.start(transports=("nixl",))
    yield made
    made.stop()


async def test_many_handovers_at_once_equal_the_local_runs(fleet: dx.Direct) -> None:
    prompts = [tuple(100 + (n * 7919 + i * 104729) % 40000 for i in range(40 + 31 * n)) for n in range(4)]
    handed = await asyncio.gather(*(dx.generate(fleet.ask(prompt)) for prompt in prompts))
    engine = fleet.decode._engine
    assert engine is not None
    ctx, parts = engine.parts.context, engine.parts
    for prompt, (tokens, ended) in zip(prompts, handed, strict=True):
        pages = -(-len(prompt) // 16)
        transfer = ended.ledger.transfer
        assert (transfer.path, transfer.pages) == ("nixl", pages)
        assert transfer.bytes == pages * parts.layout.page_bytes
        assert ended.ledger.decode_computed_prompt_tokens == 0
        keys = content_keys(prompt, 16, salt=cache_salt(dx.TENANT), model=ctx.model, numerics=ctx.numerics)
        assert fleet.page_bytes(Role.DECODE, keys) == fleet.page_bytes(Role.PREFILL, keys)
        local, _ = await dx.generate(fleet.ask(prompt, mode=HandoverMode.LOCAL, use_prefix_cache=False))
        assert tokens == local
    await fleet.until_idle()
    ends = psutil.Process().net_connections("inet")  # UCX would listen on every interface by itself
    assert {c.laddr.ip.removeprefix("::ffff:") for c in ends if c.status == "LISTEN"} == {"127.0.0.1"}
