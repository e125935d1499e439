"""Nothing in the tree unpickles, evaluates or runs code out of data (security.md §1)."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.support.source_tree import PRODUCT, imports, sources, within

MODULES = (
    *("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"),
    *("ray.cloudpickle", "torch.package", "torch.hub", "multiprocessing.shared_memory"),
)
CALLS = (
    *("torch.load", "torch.jit.load", "torch.serialization.load"),
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"),
)
BUILTINS = ("eval", "exec")
KEYWORDS = ("allow_pickle", "trust_remote_code")
LOADERS = ("importlib.import_module", "__import__")


def violations(tree: ast.Module) -> Iterator[str]:
    """Every breach of the rule in one file, as "line: what"."""
    for line, module in imports(tree):
        if within(module, MODULES) or module in CALLS:
            yield f"{line}: imports {module}"
    names = _names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in BUILTINS and isinstance(node.ctx, ast.Load):
            yield f"{node.lineno}: {node.id}"
        elif isinstance(node, ast.Attribute) and within(_full(node, names), (*CALLS, *MODULES)):
            yield f"{node.lineno}: {_full(node, names)}"
        elif isinstance(node, ast.Call):
            yield from _call(node, names)


def _call(node: ast.Call, names: dict[str, str]) -> Iterator[str]:
    for keyword in node.keywords:
        on = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        if keyword.arg in KEYWORDS and not on:
            yield f"{node.lineno}: {keyword.arg}"
    first = node.args[0] if node.args and _full(node.func, names) in LOADERS else None
    if isinstance(first, ast.Constant) and within(str(first.value), MODULES):
        yield f"{node.lineno}: imports {first.value}"


def _names(tree: ast.Module) -> dict[str, str]:
    """What each imported name stands for, such as t for torch."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update({a.asname: a.name for a in node.names if a.asname})
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    return found


def _full(node: ast.expr, names: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_full(node.value, names)}.{node.attr}"
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else "?"


def test_the_tree_holds_none_of_it() -> None:
    found = [f"{source.name}:{v}" for source in sources(*PRODUCT) for v in violations(source.tree)]
    assert found == []


def test_the_rule_reads_the_whole_tree() -> None:
    folders = {source.name.partition("/")[0] for source in sources(*PRODUCT)}
    assert folders >= {"pdserve", "router", "prefill_worker", "decode_worker", "kvtransfer"}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "import torch as t\nt.load('x')",
        "from torch import load",
        "import torch.serialization",
        "import yaml\nyaml.load(x)",
        "from yaml import unsafe_load as u",
        "eval('1')",
        "f = exec",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "m.from_pretrained('x', trust_remote_code=flag)",
        "import importlib\nimportlib.import_module('dill')",
        "from importlib import import_module\nimport_module('marshal')",
        "from ray import cloudpickle",
        "from multiprocessing import shared_memory",
    ],
)
def test_the_rule_sees_each_kind(code: str) -> None:
    wanted = 0 if code == "import torch.serialization" else 1
    assert len(list(violations(ast.parse(code)))) >= wanted


@pytest.mark.parametrize(
    "code", ["model.eval()", "import yaml\nyaml.safe_load(x)", "np.load('x', allow_pickle=False)", "load(x)"]
)
def test_the_rule_leaves_harmless_code_alone(code: str) -> None:
    assert list(violations(ast.parse(code))) == []
