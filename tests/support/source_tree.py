"""The project's source as syntax trees, for the rule tests. Here: finding and reading; not the rules."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = (
    *("pdserve", "router", "prefill_worker", "decode_worker", "kvtransfer"),
    *("planner", "benchmarks", "scripts"),
)
GENERATED = ROOT / "pdserve" / "rpc" / "v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file. name: its path from the root, with slashes."""

    name: str
    text: str
    tree: ast.Module


def sources(*folders: str) -> tuple[Source, ...]:
    """All Python files of these top folders, without generated code and hidden folders."""
    return tuple(source for folder in folders for source in _folder(folder))


@cache
def _folder(folder: str) -> tuple[Source, ...]:
    found = []
    for path in _python_files(ROOT / folder):
        inner = path.relative_to(ROOT)
        text = path.read_text(encoding="utf-8")
        found.append(Source(name=inner.as_posix(), text=text, tree=ast.parse(text, inner.as_posix())))
    return tuple(found)


def _python_files(folder: Path) -> Iterator[Path]:
    for base, names, files in os.walk(folder):
        # Hidden folders hold environments of other programs; they are not ours and large.
        names[:] = sorted(n for n in names if not n.startswith(".") and Path(base, n) != GENERATED)
        yield from (Path(base, name) for name in sorted(files) if name.endswith(".py"))


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module) of every import in a tree, inside functions too. `from a import b` gives a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def within(module: str, parents: frozenset[str] | tuple[str, ...]) -> bool:
    """Whether a module is one of `parents` or inside one."""
    return any(module == parent or module.startswith(parent + ".") for parent in parents)


def functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(name, lines) of every function, from its `def` to its end."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1
