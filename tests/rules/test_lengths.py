"""Functions and files stay short (conventions.md, Shape of code 1)."""

from __future__ import annotations

import ast

from tests.support.source_tree import PRODUCT, functions, sources

MAX_FUNCTION = 60
MAX_FILE = 400
USUAL_FUNCTION, USUAL_SHARE = 20, 0.85


def test_no_function_outside_kernels_is_long() -> None:
    found = [
        f"{source.name}: {name} has {lines} lines"
        for source in sources(*PRODUCT, "tests")
        if not source.name.startswith("pdserve/kernels/")
        for name, lines in functions(source.tree)
        if lines > MAX_FUNCTION
    ]
    assert found == []


def test_no_file_is_long() -> None:
    lengths = {source.name: source.text.count("\n") for source in sources(*PRODUCT, "tests")}
    assert [f"{name} has {n} lines" for name, n in lengths.items() if n > MAX_FILE] == []


def test_most_functions_are_very_short() -> None:
    lines = [n for source in sources(*PRODUCT) for _, n in functions(source.tree)]
    share = sum(n <= USUAL_FUNCTION for n in lines) / len(lines)
    assert share >= USUAL_SHARE, f"only {share:.0%} of the functions have at most {USUAL_FUNCTION} lines"


def test_every_module_says_what_lives_in_it() -> None:
    named = [s.name for s in sources(*PRODUCT) if s.text.strip() and not ast.get_docstring(s.tree)]
    assert named == []
