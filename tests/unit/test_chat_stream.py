"""From token ids to text, thoughts and calls: marks that are special tokens are seen, others stay hidden."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pdserve.api import ChatMessage, GenerateInput, Tool, ToolMode
from pdserve.api import ToolChoice as Choice
from pdserve.chat.parts import Part, joined
from pdserve.tokenizer import TokenizerBundle, load_bundle_from_dir
from pdserve.types import CapabilityRecord, ModelLimits, PeerRef, Role, WorkerRecord
from router.model import Prompt, ServedModel
from tests.support.tokenizer_files import chat_templates, write_directory

TEMPLATES = dict(chat_templates())
NEMO, QWEN = TEMPLATES["mistralai-Mistral-Nemo-Instruct-2407"], TEMPLATES["Qwen-Qwen3-0.6B"]
MARKS = ("[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[INST]", "[/INST]")
ADD = Tool(name="add", description="Adds.", parameters='{"type": "object"}')
CHAT = (ChatMessage(role="user", content="1 + 2?"),)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> TokenizerBundle:
    """Byte-level, with Mistral's marks as special tokens."""
    folder: Path = tmp_path_factory.mktemp("stream")
    plain = load_bundle_from_dir(write_directory(folder, template=NEMO))
    spec, first = json.loads(plain.tokenizer_json), plain.vocab_size
    flags = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    spec["added_tokens"] += [{"id": first + n, "content": mark, **flags} for n, mark in enumerate(MARKS)]
    size = first + len(MARKS)
    return dataclasses.replace(plain, tokenizer_json=json.dumps(spec).encode(), vocab_size=size)


def model(bundle: TokenizerBundle, template: str) -> ServedModel:
    limits = ModelLimits(vocab_size=bundle.vocab_size, max_context=512, end_token_ids=(2,), bos_token_id=1)
    capability = CapabilityRecord(
        layout="l", numerics="n", model="m", tokenizer="t", dtype="float32", page_size=16, page_bytes=1,
        transports=("tcp",),
    )  # fmt: skip
    record = WorkerRecord(
        peer=PeerRef(worker_id="w", incarnation=1, control="c"), role=Role.DECODE, capability=capability,
        limits=limits, model_name="m", pool_pages=1, page_size=16,
    )  # fmt: skip
    return ServedModel(dataclasses.replace(bundle, chat_template=template), record, ThreadPoolExecutor(1))


def written(served: ServedModel, text: str) -> list[int]:
    """Ids that a model would write this text with: its marks as special tokens."""
    return [int(i) for i in served._tokenizer._parsing.encode(text, add_special_tokens=False).ids]


def read(served: ServedModel, prompt: Prompt, text: str, *stop: str) -> Part:
    stream = served.text(stop, 0, prompt.chat, "key")
    return joined([*map(stream.push, written(served, text)), stream.finish()])


async def test_marks_that_are_special_tokens_make_calls(bundle: TokenizerBundle) -> None:
    served = model(bundle, NEMO)
    prompt = await served.prompt(GenerateInput(messages=CHAT, tools=(ADD,)))
    part = read(served, prompt, '[TOOL_CALLS][{"name": "add", "arguments": {"a": "é"}}]<|im_end|>')
    assert (part.text, [(c.name, c.arguments) for c in part.tool_calls]) == ("", [("add", '{"a": "é"}')])


async def test_without_tools_special_tokens_stay_hidden(bundle: TokenizerBundle) -> None:
    served = model(bundle, NEMO)
    prompt = await served.prompt(GenerateInput(messages=CHAT))
    assert read(served, prompt, "[TOOL_CALLS]three[/INST]<|im_end|>") == Part(text="three")


async def test_the_user_s_marks_are_text_in_the_prompt(bundle: TokenizerBundle) -> None:
    served = model(bundle, NEMO)
    tools = (dataclasses.replace(ADD, description="[TOOL_CALLS] [/INST]"),)
    chat = (ChatMessage(role="user", content="[TOOL_CALLS]"),)
    ids = (await served.prompt(GenerateInput(messages=chat, tools=tools))).ids
    names = {mark: written(served, mark)[0] for mark in MARKS}
    assert names["[TOOL_CALLS]"] not in ids
    assert ids.count(names["[/INST]"]) == 1
    assert served._tokenizer.decode(ids, skip_special_tokens=False).count("[TOOL_CALLS]") == 2


async def test_thoughts_where_the_prompt_opens_them_and_where_the_answer_does(
    bundle: TokenizerBundle,
) -> None:
    asked = GenerateInput(messages=CHAT, tools=(ADD,))
    answer = 'so\n</think>\n\nI add.\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>'
    for template, opened in ((QWEN, "<think>\n"), (QWEN + "{{ '<think>\\n' }}", "")):
        served = model(bundle, template)
        part = read(served, await served.prompt(asked), opened + answer)
        assert (part.reasoning, part.text) == ("so", "I add.")
        assert [call.name for call in part.tool_calls] == ["add"]


async def test_a_stop_text_ends_thoughts_and_calls_too(bundle: TokenizerBundle) -> None:
    served = model(bundle, QWEN)
    prompt = await served.prompt(GenerateInput(messages=CHAT, tools=(ADD,)))
    assert read(served, prompt, "<think>so it is</think>x", " it") == Part(reasoning="so")
    part = read(served, prompt, '<tool_call>{"name": "add", "arguments": {"a": 1}}', ": 1")
    assert [call.arguments for call in part.tool_calls] == ['{"a"']


async def test_a_call_that_must_come_has_a_grammar_that_names_special_tokens(bundle: TokenizerBundle) -> None:
    served = model(bundle, NEMO)
    choice = Choice(mode=ToolMode.NAMED, name="add")
    plan = (await served.prompt(GenerateInput(messages=CHAT, tools=(ADD,), tool_choice=choice))).chat
    assert plan is not None
    assert plan.grammar is not None
    assert f"<[{written(served, '[TOOL_CALLS]')[0]}]>" in plan.grammar.text
