"""The real prompts of the model oracle: Spec-Bench questions, the long ones joined from several.

What lives here: which questions make which prompt, and their token ids. What does not: what a model answers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

_ROOT = Path(__file__).resolve().parents[2]
_FULL = _ROOT.parent / "shared" / "data" / "prompts" / "spec_bench.jsonl"
SUBSET = _ROOT / "tests" / "data" / "spec_bench_subset.jsonl"
ORACLE = _ROOT / "tests" / "data" / "oracle_smollm2.json"
NEW_TOKENS = 64

QUESTIONS: tuple[tuple[int, ...], ...] = (
    (381,), (361,), (329,), (85,), (84,), (91,), (104,), (105,), (117,), (115,), (122,), (124,), (135,),
    (134,), (133,), (144,), (147,), (157,), (480,), (437,), (503,), (519, 506), (503, 506, 519, 508),
    (501, 502, 503, 504, 505),
)  # fmt: skip
"""Question ids of each prompt; several are joined by blank lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of the oracle. name: its question ids."""

    name: str
    text: str


def source_path() -> Path:
    """The whole data set where it is at hand, else the copy of what is used here."""
    return _FULL if _FULL.is_file() else SUBSET


def read_questions(path: Path) -> dict[int, str]:
    """First turn by question id."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["question_id"]: row["turns"][0] for row in rows}


def prompts() -> tuple[Prompt, ...]:
    """All prompts, in order."""
    questions = read_questions(source_path())
    return tuple(
        Prompt(name="+".join(map(str, ids)), text="\n\n".join(questions[i] for i in ids)) for ids in QUESTIONS
    )


def encode(tokenizer_json: bytes, texts: list[str]) -> list[list[int]]:
    """Token ids as the model's tokenizer makes them."""
    tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    return [encoding.ids for encoding in tokenizer.encode_batch(texts)]
