"""The options that say what form an answer has, as one Grammar."""

from __future__ import annotations

import json
from typing import Any

from pdserve.errors import InvalidRequest
from pdserve.types import Grammar, GrammarKind

_FORMS = ("json_schema", "regex", "choice", "grammar")


def grammar_of(values: dict[str, Any]) -> Grammar | None:
    """Takes the form out of the options. Raises InvalidRequest for more than one."""
    given = {name: value for name in _FORMS if (value := values.pop(name, None)) is not None}
    if len(given) > 1:
        raise InvalidRequest.field("grammar", f"give at most one of {', '.join(_FORMS)}.")
    for name, value in given.items():
        return value if isinstance(value, Grammar) else _grammar(name, value)
    return None


def _grammar(name: str, value: Any) -> Grammar:
    if name == "choice":
        if isinstance(value, str) or not all(isinstance(text, str) for text in value):
            raise InvalidRequest.field("choice", "give a sequence of texts.")
        return Grammar(kind=GrammarKind.CHOICE, text=json.dumps(list(value), ensure_ascii=False))
    if name == "json_schema" and not isinstance(value, str):
        return Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(value, ensure_ascii=False))
    if not isinstance(value, str):
        raise InvalidRequest.field(name, "give a text.")
    kind = GrammarKind.LARK if name == "grammar" else GrammarKind(name)
    return Grammar(kind=kind, text=value)
