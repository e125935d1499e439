#!/usr/bin/env python3
"""Writes tests/data/beams_smollm2.json: transformers' beams with the default model, in float32.

Run from the repository root: OMP_NUM_THREADS=2 .venv/bin/python scripts/make_beam_oracle.py
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pdserve.models.gguf_file import read_gguf
from pdserve.models.registry import locate
from pdserve.tokenizer import Tokenizer
from pdserve.tokenizer.from_gguf import bundle_from_metadata
from scripts.make_oracle import MODEL, load_reference

PATH = Path(__file__).resolve().parents[1] / "tests" / "data" / "beams_smollm2.json"
NEW_TOKENS = 6
PROMPTS = ("The capital of France is", "Once upon a time, in a village by the sea,", "def fib(n):\n")
SEARCHES = tuple(
    (prompt, width, float(number)) for number, prompt in enumerate(PROMPTS) for width in (2, 4, 8)
)
"""(prompt, width, length penalty)."""


def beams(model: Any, ids: list[int], width: int, penalty: float) -> list[list[int]]:
    """transformers' beams, best first, without what fills up those that ended early."""
    row, end = torch.tensor([ids]), model.generation_config.eos_token_id
    with torch.inference_mode():
        rows = model.generate(
            row, attention_mask=torch.ones_like(row), num_beams=width, num_return_sequences=width,
            do_sample=False, early_stopping=False, max_new_tokens=NEW_TOKENS, length_penalty=penalty,
            pad_token_id=end,
        )  # fmt: skip
    made = [found[len(ids) :].tolist() for found in rows]
    return [ids[: ids.index(end) + 1] if end in ids else ids for ids in made]


def search_all(model: Any) -> list[dict[str, Any]]:
    """All searches with what they find."""
    metadata = read_gguf(locate(MODEL).path).metadata
    tokenizer = Tokenizer(bundle_from_metadata(metadata, fallback_name=MODEL))
    found = []
    for prompt, width, penalty in SEARCHES:
        ids = tokenizer.encode(prompt)
        best = beams(model, ids, width, penalty)
        found.append({"prompt": prompt, "ids": ids, "width": width, "penalty": penalty, "beams": best})
    return found


def main() -> None:
    made_by = {"transformers": version("transformers"), "torch": version("torch")}
    result = {
        "model": MODEL,
        "made_by": made_by,
        "new_tokens": NEW_TOKENS,
        "searches": search_all(load_reference()),
    }
    PATH.write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
