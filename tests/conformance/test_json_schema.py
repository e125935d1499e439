"""JSON schemas against the JSON Schema Test Suite, and answers against the package `jsonschema`.

A schema is refused with a sentence or followed exactly: nothing that the suite calls invalid is ever let
through, and what a model with random weights answers at temperature 1 is valid whenever it ends.
"""

from __future__ import annotations

import json
from contextlib import ExitStack, suppress
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from pdserve.engine.runner import ModelRunner, page_layout
from pdserve.kvcache.pool import KVPool
from pdserve.models.loader import load_model
from pdserve.structured.compile import Compiled, compile_grammar
from pdserve.structured.masks import GrammarMasks
from pdserve.structured.refusal import Refused
from pdserve.structured.vocabulary import load_vocabulary
from pdserve.tokenizer.encode import Tokenizer
from pdserve.types import Grammar, GrammarKind, SamplingParams
from tests.support import tiny_models
from tests.support.byte_model import END_ID, VOCAB, byte_bundle
from tests.support.engine_driver import EngineDriver
from tests.support.tokenizer_files import ROOT

SUITE = ROOT.parent / "shared/data/conformance/json_schema_test_suite/tests/draft2020-12"
COPY = ROOT / "tests/data/json_schema_subset.json"
FOLLOWED = (
    "const.json", "enum.json", "exclusiveMaximum.json", "exclusiveMinimum.json", "items.json", "maximum.json",
    "minimum.json", "pattern.json", "prefixItems.json", "properties.json", "required.json", "type.json",
)  # fmt: skip
"""Files whose first groups all have a grammar."""
SEEDS = 5


@cache
def groups() -> tuple[tuple[str, dict[str, Any]], ...]:
    """(file, group) of the whole suite, or of the copy of a part."""
    if SUITE.is_dir():
        files = {path.name: json.loads(path.read_text()) for path in sorted(SUITE.glob("*.json"))}
    else:
        files = json.loads(COPY.read_text())
    return tuple((name, group) for name, found in files.items() for group in found)


def grammar_of(group: dict[str, Any]) -> Grammar:
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(group["schema"]))


@cache
def followed() -> tuple[tuple[str, dict[str, Any], Compiled], ...]:
    """The groups that have a grammar, over a vocabulary of bytes."""
    vocabulary = load_vocabulary(Tokenizer(byte_bundle()))
    found = []
    for name, group in groups():
        with suppress(Refused):
            found.append((name, group, compile_grammar(vocabulary, grammar_of(group))))
    return tuple(found)


def test_the_plain_keywords_are_followed_and_no_invalid_instance_is_let_through() -> None:
    valid: list[bool] = []
    for name, group, compiled in followed():
        for case in group["tests"]:
            text = json.dumps(case["data"], ensure_ascii=False, separators=(",", ":"))
            matcher = compiled.start()
            conforms = (
                matcher.consume_tokens(list(text.encode("utf-8", "replace"))) and matcher.is_accepting()
            )
            assert case["valid"] or not conforms, (name, group["description"], case["description"])
            valid += [conforms] if case["valid"] else []
    # Objects are written with their properties in the schema's order, so some valid instances are not made.
    assert valid.count(True) > 0.9 * len(valid)
    files = {name for name, _, _ in followed()}
    assert files >= set(FOLLOWED)
    assert len(followed()) > len(groups()) / 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights whose tokens are bytes."""
    made = tmp_path_factory.mktemp("bytes")
    model = tiny_models.llama(vocab_size=VOCAB, eos_token_id=END_ID, bos_token_id=END_ID + 1)
    tiny_models.save(model, made)
    (made / "tokenizer.json").write_bytes(byte_bundle().tokenizer_json)
    return made


def driver_of(folder: Path, masks: GrammarMasks) -> EngineDriver:
    model = load_model(str(folder), "float32")
    layout = page_layout(model.config, page_size=16, dtype="float32")
    runner = ModelRunner(model, KVPool.create(layout, 2000, pool_id=7), masks=masks)
    return EngineDriver(model, runner=runner, max_num_seqs=64)


def test_every_answer_of_a_random_model_that_ends_is_valid(folder: Path) -> None:
    masks = GrammarMasks(VOCAB)
    driver = driver_of(folder, masks)
    schemas = {}
    with ExitStack() as pins:
        for number, (_, group, compiled) in enumerate(followed()):
            grammar = grammar_of(group)
            if r"\\p{" in grammar.text:
                continue  # Python's `re`, by which jsonschema judges, does not know Unicode classes
            pins.enter_context(masks.pinned(grammar, compiled))
            for seed in range(SEEDS):
                name = f"{number}/{seed}"
                schemas[name] = json.loads(grammar.text, parse_float=Decimal)  # multipleOf in full
                sampling = SamplingParams(max_tokens=200, temperature=1.0, seed=seed, grammar=grammar)
                driver.submit(name, list(b"JSON: "), sampling)
        driver.run()
    assert not driver.failed
    ended = {name: ids for name, ids in driver.tokens.items() if ids[-1] == END_ID}
    for name, ids in ended.items():
        answer = json.loads(bytes(ids[:-1]), parse_float=Decimal)
        Draft202012Validator(schemas[name]).validate(answer)
    assert len(ended) > len(schemas) / 2
