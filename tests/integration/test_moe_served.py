"""Mixtures of experts over two workers: tokens of the engine alone, every page handed over.

The upcycled default model must say what the dense one says; a tiny DeepSeek moves pages of latent rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.models.loaded import LoadedModel
from pdserve.models.loader import load_model
from pdserve.models.upcycle import Upcycling, upcycle
from pdserve.types import SamplingParams
from tests.support import direct as dx
from tests.support import tiny_models, tiny_moe
from tests.support.engine_driver import EngineDriver, generate

NEW_TOKENS = 16


def upcycled(folder: Path) -> LoadedModel:
    """Makes the mixture; returns the dense model."""
    dense = load_model(dx.MODEL)
    upcycle(dense, folder, Upcycling(num_experts=2, top_k=2))
    return dense


def deepseek(folder: Path) -> LoadedModel:
    """Latent pages; returns the same model."""
    return load_model(str(tiny_models.save(tiny_moe.deepseek_v3(), folder)))


@pytest.mark.parametrize("make", [upcycled, deepseek])
async def test_disaggregated_tokens_are_those_of_one_engine(
    make: Callable[[Path], LoadedModel], tmp_path: Path
) -> None:
    model = make(tmp_path / "moe")
    prompts = {f"p{n}": [(n * 7 + i * 31) % 250 for i in range(n)] for n in (5, 40, 100)}
    expected = generate(EngineDriver(model, num_pages=64), prompts, NEW_TOKENS)
    fleet = dx.Direct.start(model=str(tmp_path / "moe"), dtype="bfloat16", num_pages=64)
    try:
        for name, token_ids in prompts.items():
            sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
            tokens, ended = await dx.generate(fleet.ask(tuple(token_ids), sampling=sampling))
            assert tokens == expected[name]
            assert ended.ledger.decode_computed_prompt_tokens == 0
            assert ended.ledger.transfer.pages == -(-len(token_ids) // 16)
        await fleet.until_idle()
    finally:
        fleet.stop()
