"""Workers with int8 pages as processes of their own: the tokens of one engine alone, and half the bytes.

The handover matrix has hits, chunks, preemption and transports; here are processes, bfloat16, 8-bit weights
beside the pages, and a fleet in which one worker has other pages.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdserve.client import GenerateOptions, Result
from pdserve.types import Role
from tests.support.stack import Stack

PROMPT = "The history of the lighthouse begins with " + "a fire on a hill, and " * 20
OPTIONS: GenerateOptions = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
PAGE_BYTES = {"bfloat16": 30 * 2 * 3 * 16 * 64 * 2, "int8": 30 * 2 * 3 * 16 * (64 + 4)}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    made = Stack.start(
        {Role.PREFILL: 1, Role.DECODE: 1}, dtype="bfloat16", weights="w8a8", kv_dtype="int8", num_pages=120
    )
    yield made
    made.stop()


def generate(stack: Stack) -> Result:
    with stack.client() as client:
        return client.generate(PROMPT, no_prefix_cache=True, **OPTIONS).result()


def test_pages_are_handed_over_in_half_the_bytes(stack: Stack) -> None:
    result = generate(stack)
    moved = result.ledger.transfer
    assert len(result.token_ids) == OPTIONS["max_tokens"]
    assert result.ledger.decode_computed_prompt_tokens == 0
    assert (moved.path, moved.bytes) == ("shm", moved.pages * PAGE_BYTES["int8"])
    assert PAGE_BYTES["int8"] / PAGE_BYTES["bfloat16"] == pytest.approx(0.53, abs=0.002)
    assert generate(stack).token_ids == result.token_ids
    stack.until_idle()


def test_a_worker_with_other_pages_is_not_paired(stack: Stack) -> None:
    """It is there, it is said why, and requests go on between those that fit."""
    wanted = generate(stack).token_ids
    stack.launch("odd", Role.DECODE, kv_dtype=None)
    stack.wait_started("odd")
    status = stack.until(lambda status: bool(status.pairing_problems))
    assert any(
        "the KV dtype differs: int8 at prefill, bfloat16 at decode" in problem
        for problem in status.pairing_problems
    )
    for _ in range(3):
        result = generate(stack)
        assert result.token_ids == wanted
        assert result.ledger.decode_worker == "decode-0"
        assert result.ledger.decode_computed_prompt_tokens == 0
