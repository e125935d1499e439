"""The filters chat templates may use: Jinja's own, those that can make large results checked beforehand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS as JINJA_FILTERS
from jinja2.runtime import Context
from jinja2.utils import pass_context

from pdserve.tokenizer.limits import MAX_NODES, RenderLimit, meter, need_chars

_PLAIN = (
    *("abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "groupby"),
    *("int", "items", "last", "length", "lower", "map", "max", "min", "reject", "rejectattr", "reverse"),
    *("safe", "select", "selectattr", "string", "sum", "title", "trim", "truncate", "unique"),
    *("upper", "urlencode", "wordcount"),
)
_WIDTH = re.compile(r"\d{4}|\*|\{[^{}]*\{")


def check_width(pattern: str) -> None:
    """Refuses a format text that pads to a large or computed width."""
    if _WIDTH.search(pattern):
        raise SecurityError("the format is not allowed")


def _check_replace(text: Any, old: Any, new: Any, *_: Any) -> None:
    need_chars(len(str(text)) + str(text).count(str(old)) * len(str(new)))


def _check_indent(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    size = len(width) if isinstance(width, str) else int(width)
    need_chars(len(str(text)) + (str(text).count("\n") + 1) * size)


def _check_round(_: Any, precision: Any = 0, *__: Any, **___: Any) -> None:
    if not isinstance(precision, int) or abs(precision) > 20:
        raise RenderLimit("a number is too large")


def _check_list(value: Any, *_: Any, **__: Any) -> None:
    if isinstance(value, str) and len(value) > MAX_NODES:
        raise RenderLimit("a list is too long")


def _check_format(text: Any, *_: Any, **__: Any) -> None:
    check_width(str(text))


def _guarded(function: Callable[..., Any], check: Callable[..., None] | None = None) -> Callable[..., Any]:
    """One of Jinja's filters with its result metered. It is called as Jinja would call it."""
    pass_arg = getattr(function, "jinja_pass_arg", None)
    kind = pass_arg.name if pass_arg is not None else ""

    @pass_context
    def run(context: Context, *args: Any, **kwargs: Any) -> Any:
        meter().step()
        if check is not None:
            check(*args, **kwargs)
        lead = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        first = (lead[kind],) if kind else ()
        result = function(*first, *args, **kwargs)
        return meter().each(result) if isinstance(result, Iterator) else meter().made(result)

    return run


@pass_context
def _join(context: Context, value: Any, d: str = "", attribute: str | int | None = None) -> Any:
    items = list(meter().each(value))
    need_chars(len(str(d)) * len(items))
    meter().made(items)
    plain: Callable[..., Any] = JINJA_FILTERS["join"]
    return meter().made(plain(context.eval_ctx, items, d, attribute))


@pass_context
def _tojson(
    _: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> Any:
    """JSON as models were trained on it: no HTML escapes, other letters kept."""
    too_wide = indent > 16 if isinstance(indent, int) else len(indent or "") > 16
    if too_wide or sum(map(len, separators or ())) > 32:
        raise RenderLimit("the JSON is too wide")
    return meter().made(
        json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
    )


FILTERS: dict[str, Callable[..., Any]] = {
    **{name: _guarded(JINJA_FILTERS[name]) for name in _PLAIN},
    "replace": _guarded(JINJA_FILTERS["replace"], _check_replace),
    "indent": _guarded(JINJA_FILTERS["indent"], _check_indent),
    "round": _guarded(JINJA_FILTERS["round"], _check_round),
    "format": _guarded(JINJA_FILTERS["format"], _check_format),
    "list": _guarded(JINJA_FILTERS["list"], _check_list),
    "sort": _guarded(JINJA_FILTERS["sort"], _check_list),
    "join": _join,
    "tojson": _tojson,
}
"""By name. A template that names another filter does not compile."""
