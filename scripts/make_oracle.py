#!/usr/bin/env python3
"""Writes tests/data/oracle_smollm2.json: transformers' greedy answers, in float32, to the oracle's prompts.

Run from the repository root: OMP_NUM_THREADS=2 .venv/bin/python scripts/make_oracle.py
`gap` is the smallest difference between the best and the second logit over the 64 tokens: how far the answer
is from a tie. It also writes tests/data/spec_bench_subset.jsonl, the questions that the prompts are made of.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pdserve.models.gguf_file import read_gguf
from pdserve.models.registry import locate
from pdserve.tokenizer.from_gguf import bundle_from_metadata
from tests.support import oracle_prompts

MODEL = "smollm2-135m-instruct"


def load_reference() -> PreTrainedModel:
    """The default model through transformers' own GGUF reader, in float32."""
    path = locate(MODEL).path
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    )
    return model.eval()


def answer(model: PreTrainedModel, token_ids: list[int]) -> tuple[list[int], float]:
    """(greedy tokens, smallest gap between the two best logits)."""
    with torch.inference_mode():
        out: Any = model.generate(
            torch.tensor([token_ids]),
            attention_mask=torch.ones(1, len(token_ids), dtype=torch.int64),
            max_new_tokens=oracle_prompts.NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
    best = torch.cat(out.logits).topk(2, dim=-1).values
    return out.sequences[0, len(token_ids) :].tolist(), float((best[:, 0] - best[:, 1]).min())


def write_subset() -> None:
    wanted = {i for ids in oracle_prompts.QUESTIONS for i in ids}
    lines = oracle_prompts.source_path().read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if json.loads(line)["question_id"] in wanted]
    oracle_prompts.SUBSET.write_text("\n".join(kept) + "\n", encoding="utf-8")


def main() -> None:
    write_subset()
    bundle = bundle_from_metadata(read_gguf(locate(MODEL).path).metadata, fallback_name=MODEL)
    prompts = oracle_prompts.prompts()
    encoded = oracle_prompts.encode(bundle.tokenizer_json, [p.text for p in prompts])
    model = load_reference()
    answers = []
    for number, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True), 1):
        tokens, gap = answer(model, ids)
        answers.append({"name": prompt.name, "num_tokens": len(ids), "gap": round(gap, 6), "tokens": tokens})
        print(f"{number}/{len(prompts)}: {len(ids)} tokens, gap {gap:.4f}", flush=True)
    made_by = {"transformers": version("transformers"), "torch": version("torch")}
    result = {"model": MODEL, "made_by": made_by, "answers": answers}
    oracle_prompts.ORACLE.write_text(json.dumps(result, indent=None) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
