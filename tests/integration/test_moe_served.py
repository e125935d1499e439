"""An upcycled mixture of experts on two workers: the dense model's text, every page handed over."""

from __future__ import annotations

from pathlib import Path

from pdserve.models.loader import load_model
from pdserve.models.upcycle import Upcycling, upcycle
from pdserve.types import Role
from tests.support import oracle_prompts
from tests.support.engine_driver import EngineDriver, generate
from tests.support.stack import Stack

NEW_TOKENS = 16
PROMPTS = [
    "The capital of France is",
    "Explain in one sentence why the sky is blue and sunsets are red, for a child of six.",
]


def test_disaggregated_text_is_the_dense_model_s(tmp_path: Path) -> None:
    dense = load_model("smollm2-135m-instruct")
    upcycle(dense, tmp_path / "moe", Upcycling(num_experts=2, top_k=2))
    ids = oracle_prompts.encode(dense.tokenizer.tokenizer_json, PROMPTS)
    driver = EngineDriver(dense, num_pages=64)
    expected = generate(driver, {str(i): list(p) for i, p in enumerate(ids)}, NEW_TOKENS)
    stack = Stack.start({Role.PREFILL: 1, Role.DECODE: 1}, model=str(tmp_path / "moe"), dtype="bfloat16")
    try:
        with stack.client() as client:
            for i, prompt in enumerate(PROMPTS):
                stream = client.generate(prompt, max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
                result = stream.result()
                assert list(result.token_ids) == expected[str(i)]
                assert result.ledger.decode_computed_prompt_tokens == 0
                assert result.ledger.transfer.bytes > 0
    finally:
        stack.stop()
