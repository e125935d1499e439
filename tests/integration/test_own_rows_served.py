"""Workers whose ranks have sequences of their own, as others see them: whole pages, handed over both ways.

Real workers and ranks. The oracle is one device's engine; ledgers show that pages moved and nothing was
computed twice.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.plan import parse_layout
from pdserve.client import Client
from pdserve.models.loader import load_model
from pdserve.types import Role
from tests.integration.test_parallel_fleet import up
from tests.support import tiny_models, tiny_moe
from tests.support.bridge_kit import Cut, Pair, config
from tests.support.engine_driver import EngineDriver, generate
from tests.support.processes import WorkerProcess

SECRET = secrets.token_bytes(32)
PATIENT = {"PDSERVE_TESTING": "1", "PDSERVE_FAILPOINTS": "rank_silence=set:30"}
NEW_TOKENS = 12
PROMPTS = [tuple((n * 79 + i * 47 + i * i * 7) % 250 for i in range(30 + 25 * n)) for n in range(5)]
AGAIN = [(*PROMPTS[4][:96], *PROMPTS[n][:20]) for n in range(3)]
"""Some that begin as one of those does."""


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tiny_moe.mixtral(max_position_embeddings=1024)
    return str(tiny_models.save(made, tmp_path_factory.mktemp("mixtral")))


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tiny_moe.deepseek_v3(max_position_embeddings=1024)
    return str(tiny_models.save(made, tmp_path_factory.mktemp("deepseek")))


def expected(model: str, prompts: list[tuple[int, ...]], num_new: int = NEW_TOKENS) -> list[list[int]]:
    driver = EngineDriver(load_model(model, "float32"), num_pages=200, chunk_tokens=64)
    found = generate(driver, {str(n): list(tokens) for n, tokens in enumerate(prompts)}, num_new)
    return [found[str(n)][:num_new] for n in range(len(prompts))]


def rows(role: Role, model: str) -> WorkerProcess:
    return started(role, Cut(tp=2, page_size=16), model, rank_attention="rows")


def started(role: Role, cut: Cut, model: str, **settings: Any) -> WorkerProcess:
    return WorkerProcess(config(role, cut, model, SECRET, **settings), **PATIENT)


@contextmanager
def serving(*workers: WorkerProcess) -> Iterator[list[WorkerProcess]]:
    with ExitStack() as stack:
        for worker in workers:
            stack.callback(worker.stop)
        yield [worker.wait() for worker in workers]


async def check(pair: Pair, want: list[list[int]], again: list[list[int]]) -> None:
    """Both rounds of prompts over this pair."""
    target = parse_layout(pair.d.layout).page_size
    async with pair.connected():
        for asked, right, shared in ((PROMPTS, want, 0), (AGAIN, again, 96)):
            answers = await pair.generate(asked, NEW_TOKENS)
            assert [tokens for tokens, _ in answers] == right, f"{pair.name}: not the tokens of one device"
            for tokens, (_, ended) in zip(asked, answers, strict=True):
                hits = ended.ledger.decode_hit_tokens
                size = parse_layout(pair.p.layout).page_size
                assert hits == shared // target * target
                assert ended.ledger.decode_computed_prompt_tokens == 0
                assert ended.ledger.transfer.pages == -(-len(tokens) // size) - hits // size
                assert ended.ledger.transfer.path == pair.transport
        await pair.until_idle()


async def test_pages_are_handed_over_as_one_device_would(deepseek: str) -> None:
    """From such a worker to another, and from one device."""
    want, again = expected(deepseek, PROMPTS), expected(deepseek, AGAIN)
    one = started(Role.PREFILL, Cut(tp=1, page_size=16), deepseek)
    with serving(rows(Role.PREFILL, deepseek), rows(Role.DECODE, deepseek), one) as (prefill, decode, plain):
        for source, transport in ((prefill, "shm"), (plain, "tcp")):
            pair = Pair(secret=SECRET, prefill=source, decode=decode, transport=transport)
            await check(pair, want, again)


async def test_pages_are_laid_out_anew_for_ranks_that_divide_heads(mixtral: str) -> None:
    """And for pages of another size, which works as from one device."""
    want, again = expected(mixtral, PROMPTS), expected(mixtral, AGAIN)
    heads = started(Role.DECODE, Cut(tp=2, page_size=32), mixtral)
    with serving(rows(Role.PREFILL, mixtral), heads) as (prefill, decode):
        await check(Pair(secret=SECRET, prefill=prefill, decode=decode, transport="tcp"), want, again)


def test_pdserve_up_with_such_workers(mixtral: str) -> None:
    length = 40
    want = expected(mixtral, PROMPTS, length)
    flags = ("--aggregated", "1", "--aggregated-tp", "2", "--rank-attention", "rows")
    with up(Path(mixtral), *flags) as (_, address), Client(address) as client:
        streams = [
            client.generate(token_ids=ids, max_tokens=length, temperature=0.0, ignore_eos=True)
            for ids in PROMPTS
        ]
        assert [list(stream.result().token_ids) for stream in streams] == want
