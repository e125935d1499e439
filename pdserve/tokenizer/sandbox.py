"""The Jinja environment of chat templates: what a template may do, and where each thing it does is counted.

Jinja's immutable sandbox keeps templates from Python's internals. On top of that: filters, methods and
globals are closed lists, and every loop step, call, operator and container passes the meter (`limits`). Not
here: the messages and their errors (`templates`).
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from pdserve.tokenizer.limits import MAX_INT_BITS, RenderLimit, meter, need_chars
from pdserve.tokenizer.sandbox_filters import FILTERS, check_width

_STR = frozenset(
    {
        *("strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "partition", "rpartition", "replace"),
        *(
            "startswith",
            "endswith",
            "removeprefix",
            "removesuffix",
            "find",
            "rfind",
            "index",
            "rindex",
            "count",
        ),
        *("upper", "lower", "title", "capitalize", "swapcase", "casefold", "join", "isdigit", "isalpha"),
        *("isalnum", "isspace", "isupper", "islower", "isnumeric", "isdecimal", "istitle", "isascii"),
    }
)
_DICT = frozenset({"items", "keys", "values", "get", "copy"})
_LIST = frozenset({"index", "count", "copy"})
_METHODS: dict[type, frozenset[str]] = {str: _STR, dict: _DICT, list: _LIST, tuple: _LIST}
_STRFTIME = re.compile(r"(?:[^%]|%[-_]?[A-Za-z%])*")


class TemplateRefusal(TemplateError):
    """The template itself says that the conversation is wrong (`raise_exception`)."""


class IgnoreGeneration(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the model wrote, for training; here: its body."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class SafeNamespace(Namespace):
    """`namespace()` without names that start with an underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError("a namespace may not hold names with a leading underscore")
        if isinstance(value, Namespace):
            raise RenderLimit("a namespace is put into another value")
        super().__setitem__(name, value)


class _Counted(NodeTransformer):
    """Puts a counting filter around each loop's iterable, each container, each `~` and each comparison."""

    # ruff: noqa: N802  (names are Jinja's)
    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filter(node.iter, "_each")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "_concat")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _filter(node.expr, "_step")
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "_made")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "_made")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "_made") if node.ctx == "load" else node

    def visit_Include(self, node: nodes.Node) -> nodes.Node:
        raise SecurityError("a chat template may not load other templates")

    visit_Import = visit_FromImport = visit_Extends = visit_Include


def _filter(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


@pass_context
def _each(_: Context, values: Iterable[Any]) -> Iterator[Any]:
    return meter().each(values)


@pass_context
def _made(_: Context, value: Any) -> Any:
    return meter().made(value)


@pass_context
def _step(_: Context, value: Any) -> Any:
    meter().step()
    return value


@pass_context
def _concat(_: Context, parts: list[Any]) -> str:
    texts = [str(part) for part in parts]
    need_chars(sum(map(len, texts)))
    return str(meter().made("".join(texts)))


@pass_context
def _output(_: Context, value: Any) -> str:
    return str(meter().made(str(value)))


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(str(message)[:300])


def strftime_at(now: datetime) -> Callable[[str], str]:
    """The template helper `strftime_now`, for one instant. Field widths are refused: they make huge texts."""

    def strftime_now(pattern: str) -> str:
        if len(pattern) > 256 or not _STRFTIME.fullmatch(pattern):
            raise SecurityError("the time format is not allowed")
        return now.strftime(pattern)

    return strftime_now


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Jinja for chat templates from model files. One per template; `strftime_now` comes with each render."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # nothing of a template is computed while it is compiled
            finalize=_output,
            extensions=[IgnoreGeneration, loopcontrols],
        )
        own = {"_each": _each, "_made": _made, "_step": _step, "_concat": _concat}
        self.filters = {**FILTERS, **own}
        kept = {name: self.globals[name] for name in ("range", "cycler", "joiner")}
        self.globals.clear()
        self.globals.update(kept, dict=_plain_dict, namespace=SafeNamespace, raise_exception=_raise_exception)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Counted().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, allowed in _METHODS.items():
            if isinstance(obj, kind):
                return attr in allowed
        return not isinstance(obj, (int, float)) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            check_width(value.__self__)
        return wrapped

    def getitem(self, obj: Any, argument: Any) -> Any:
        meter().step()
        return super().getitem(obj, argument)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter().step()
        if isinstance(obj, types.BuiltinMethodType) and isinstance(obj.__self__, str):
            _check_str_method(obj.__name__, obj.__self__, args)
        return meter().made(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_binop(operator, left, right)
        return meter().made(super().call_binop(context, operator, left, right))


def _plain_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _check_str_method(name: str, text: str, args: tuple[Any, ...]) -> None:
    if name == "replace" and len(args) >= 2:
        need_chars(replaced_size(text, *args[:2]))
    elif name == "join" and args and isinstance(args[0], (list, tuple)):
        need_chars(len(text) * len(args[0]))


def replaced_size(text: str, old: str, new: str) -> int:
    """An upper bound of the length of text.replace(old, new)."""
    return len(text) + text.count(old) * len(new)


def _check_binop(operator: str, left: Any, right: Any) -> None:
    if operator == "%" and isinstance(left, str):
        check_width(left)
    elif operator == "*":
        _check_product(left, right)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        if left.bit_length() * abs(right) > MAX_INT_BITS:
            raise RenderLimit("a number is too large")
    elif operator == "+" and isinstance(left, str) and isinstance(right, str):
        need_chars(len(left) + len(right))


def _check_product(left: Any, right: Any) -> None:
    for many, times in ((left, right), (right, left)):
        if isinstance(many, (str, list, tuple)) and isinstance(times, int):
            need_chars(len(many) * max(times, 0))
