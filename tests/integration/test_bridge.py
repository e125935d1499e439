"""Prefill and decode workers whose pages are cut differently hand over to each other: one device's tokens.

Tensor parallelism 1 to 3, pages of 16 and 32 tokens, on either side; shm and tcp. Workers are processes, and
so are their ranks; each is started once and paired with every other one. `make test` runs a model of the
default one's widths and heads with fewer layers, and workers that cover every pair of ranks, every pair of
page sizes and each transport; `make test-full` runs the whole product on the default model.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvtransfer.plan import compile_plan, parse_layout
from pdserve.messages import Ended
from pdserve.models.loader import load_model
from pdserve.types import Role
from tests.support import tiny_models
from tests.support.bridge_kit import Cut, Pair, config
from tests.support.direct import MODEL
from tests.support.engine_driver import EngineDriver, generate
from tests.support.processes import WorkerProcess

TRANSPORTS = ("shm", "tcp")
SECRET = secrets.token_bytes(32)
PATIENT = {"PDSERVE_TESTING": "1", "PDSERVE_FAILPOINTS": "rank_silence=set:30"}
"""A dozen processes start on two cores: a rank that is silent meanwhile is not lost."""
NEW_TOKENS = 8
SHARED = 48
"""Of the prompts that follow, the tokens that decode has by then: not a whole number of pages of 32."""

ALL = [Cut(tp=tp, page_size=size) for tp, size in itertools.product((1, 2, 3), (16, 32))]
PREFILLS = [Cut(tp=1, page_size=16), Cut(tp=2, page_size=32), Cut(tp=3, page_size=16)]
DECODES = [Cut(tp=1, page_size=32), Cut(tp=2, page_size=32), Cut(tp=3, page_size=16)]


def way(prefill: int, decode: int) -> str:
    """The transport of a pair of those: two that are cut alike, of two and of three ranks, take one each."""
    return TRANSPORTS[(prefill * decode + prefill + decode) % 2]


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple((seed * 79 + i * 47 + i * i * 7) % 250 for i in range(length))


FIRST = [prompt(1, 150), prompt(2, 64), prompt(3, 7)]
THEN = [(*prompt(1, SHARED), *prompt(4, 40)), (*prompt(2, SHARED), *prompt(5, 5))]


@contextmanager
def workers(role: Role, cuts: list[Cut], model: str) -> Iterator[list[WorkerProcess]]:
    with ExitStack() as stack:
        started = []
        for cut in cuts:
            started.append(WorkerProcess(config(role, cut, model, SECRET), **PATIENT))
            stack.callback(started[-1].stop)
        yield [worker.wait() for worker in started]


def expected(model: str, asked: list[tuple[int, ...]]) -> list[list[int]]:
    """What one device makes of the prompts: the oracle."""
    driver = EngineDriver(load_model(model, "float32"), num_pages=128, chunk_tokens=64)
    found = generate(driver, {str(n): list(tokens) for n, tokens in enumerate(asked)}, NEW_TOKENS)
    return [found[str(n)][:NEW_TOKENS] for n in range(len(asked))]


def check(pair: Pair, ended: Ended, length: int, hits: int) -> None:
    """The ledger shows a handover of every page of prefill's that holds a token which decode lacked."""
    ledger, source = ended.ledger, parse_layout(pair.p.layout)
    target = parse_layout(pair.d.layout)
    parts = {rank for rank, _ in compile_plan(source, target).source_pages(source.page_size)}
    pages = -(-length // source.page_size) - hits // source.page_size
    assert ledger.decode_computed_prompt_tokens == 0
    assert ledger.decode_hit_tokens == hits
    assert ledger.transfer.path == pair.transport
    assert ledger.transfer.pages == pages
    assert ledger.transfer.bytes == pages * sum(source.page_bytes(rank) for rank in parts)
    assert ledger.transfer.resent_pages == 0


def hit_tokens(pair: Pair, tokens: tuple[int, ...]) -> int:
    """Whole pages of decode's that are shared; the page that makes the next token is never one."""
    size = parse_layout(pair.d.layout).page_size
    return min(SHARED, len(tokens) - 1) // size * size


async def hand_over(pair: Pair, want: list[list[int]]) -> None:
    """Prompts that decode has nothing of, then some of which it has the beginning."""
    async with pair.connected():
        await _hand_over(pair, want)


async def _hand_over(pair: Pair, want: list[list[int]]) -> None:
    for asked, right in ((FIRST, want[: len(FIRST)]), (THEN, want[len(FIRST) :])):
        answers = await pair.generate(asked, NEW_TOKENS)
        assert [tokens for tokens, _ in answers] == right, f"{pair.name}: not the tokens of one device"
        for tokens, (_, ended) in zip(asked, answers, strict=True):
            check(pair, ended, len(tokens), 0 if asked is FIRST else hit_tokens(pair, tokens))
    await pair.until_idle()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tiny_models.llama(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, tie_word_embeddings=True, max_position_embeddings=1024,
    )  # fmt: skip
    folder: Path = tiny_models.save(made, tmp_path_factory.mktemp("smol"))
    return str(folder)


@pytest.fixture(scope="module")
def right(small: str) -> list[list[int]]:
    return expected(small, FIRST + THEN)


@pytest.fixture(scope="module")
def prefills(small: str) -> Iterator[list[WorkerProcess]]:
    with workers(Role.PREFILL, PREFILLS, small) as started:
        yield started


@pytest.mark.parametrize("number", range(len(DECODES)), ids=[str(cut) for cut in DECODES])
async def test_every_pair_of_ranks_gives_the_tokens_of_one_device(
    small: str, right: list[list[int]], prefills: list[WorkerProcess], number: int
) -> None:
    with workers(Role.DECODE, [DECODES[number]], small) as (decode,):
        for other, prefill in enumerate(prefills):
            pair = Pair(secret=SECRET, prefill=prefill, decode=decode, transport=way(other, number))
            await hand_over(pair, right)


def test_the_subset_covers_every_pair_of_ranks_and_of_sizes_and_each_transport() -> None:
    both = itertools.product(enumerate(PREFILLS), enumerate(DECODES))
    pairs = [(p, d, way(i, j)) for (i, p), (j, d) in both]
    assert {(p.tp, d.tp) for p, d, _ in pairs} == set(itertools.product((1, 2, 3), repeat=2))
    assert {(p.page_size, d.page_size) for p, d, _ in pairs} == set(itertools.product((16, 32), repeat=2))
    assert {transport for p, d, transport in pairs if p != d} == set(TRANSPORTS)
    assert {transport for p, d, transport in pairs if p == d} == set(TRANSPORTS), "alike, of several ranks"


@pytest.fixture(scope="module")
def default_right() -> list[list[int]]:
    return expected(MODEL, FIRST + THEN)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("cut", ALL, ids=map(str, ALL))
async def test_the_whole_product_on_the_default_model(
    default_right: list[list[int]], cut: Cut, transport: str
) -> None:
    with workers(Role.DECODE, [cut], MODEL) as (decode,):
        for other in ALL:  # one after the other: each has the model in memory
            with workers(Role.PREFILL, [other], MODEL) as (prefill,):
                pair = Pair(secret=SECRET, prefill=prefill, decode=decode, transport=transport)
                await hand_over(pair, default_right)
