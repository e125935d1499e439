"""Every example, run as a user runs it, against one served fleet with a real model."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.models.registry import locate
from pdserve.types import Role
from tests.support.stack import Stack

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


TEMPLATE = ROOT / "tests" / "data" / "chat_templates" / "Qwen-Qwen2.5-7B-Instruct.jinja"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The default model with a chat template of its kind that has tools."""
    model = tmp_path_factory.mktemp("model") / "smollm2-tools.gguf"
    source = locate("smollm2-135m-instruct").path
    rename = ["-m", "gguf.scripts.gguf_new_metadata", "--chat-template", TEMPLATE.read_text()]
    subprocess.run([sys.executable, *rename, str(source), str(model)], check=True, capture_output=True)
    running = Stack.start({Role.PREFILL: 1, Role.DECODE: 1}, model=str(model))
    yield running
    running.stop()


def run(name: str, stack: Stack, said: str = "") -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), stack.address],
        cwd=ROOT, input=said, capture_output=True, text=True, check=False, timeout=120,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_first_call(stack: Stack) -> None:
    out = run("first_call", stack)
    assert "serves smollm2-tools" in out
    assert "Paris" in out
    assert "8 tokens, the first after" in out


def test_streaming(stack: Stack) -> None:
    out = run("streaming", stack)
    assert re.search(r"\S.*\n\[length, 24 tokens\]\n$", out, re.DOTALL)


def test_many_prompts(stack: Stack) -> None:
    lines = [line for line in run("many_prompts", stack).splitlines() if line.startswith("'")]
    assert len(lines) == 7
    assert lines[0].startswith("'The cat said:': ")
    assert lines[6].startswith("'': '[")
    assert all("[" not in line for line in lines[:6])


def test_chat_loop(stack: Stack) -> None:
    out = run("chat_loop", stack, "Hello!\nWhat is water?\n\n")
    told = re.findall(r"\[(\d+) of (\d+) prompt tokens from the cache\]", out)
    assert len(told) == 2
    assert 0 < int(told[1][0]) < int(told[1][1])


def test_cancel(stack: Stack) -> None:
    out = run("cancel", stack)
    assert [line.partition(":")[0] for line in out.splitlines()] == ["left after", "cancelled", "deadline"]
    stack.until_idle()


def test_embeddings(stack: Stack) -> None:
    rows = [line.split() for line in run("embeddings", stack).splitlines()]
    assert len(rows) == 3
    assert all(-1.0 <= float(row[0]) <= 1.0 and float(row[1]) < 0 for row in rows)


def test_structured_output(stack: Stack) -> None:
    person, answer, number = run("structured_output", stack).splitlines()
    value = ast.literal_eval(person)
    assert set(value) == {"name", "age"}
    assert 0 <= value["age"] <= 120
    assert answer in {"yes", "no"}
    assert re.fullmatch(r"[0-9]{3}-[0-9]{4}", number)


def test_tools(stack: Stack) -> None:
    out = run("tools", stack)
    found = re.match(r"add\((.*?)\) = (\d+)\n", out, re.DOTALL)
    assert found is not None, out
    numbers = json.loads(found[1])
    assert numbers["a"] + numbers["b"] == int(found[2])


def test_every_example_is_run() -> None:
    here = Path(__file__).read_text()
    for file in EXAMPLES.glob("*.py"):
        assert f"def test_{file.stem}(stack" in here, file.name
