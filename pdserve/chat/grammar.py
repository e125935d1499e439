"""The grammar that makes a model call a tool: its format around each tool's own schema, in llguidance's Lark.

Pure text. Not here: compiling it and following it (`pdserve.structured`). Every call has the spelling that
the format's templates teach; the schemas decide the arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from pdserve.api import Tool, ToolChoice, ToolMode
from pdserve.chat.formats import ThinkTags, ToolFormat
from pdserve.errors import InvalidRequest
from pdserve.types import MAX_GRAMMAR_BYTES, Grammar, GrammarKind

MAX_CALLS = 16
"""Calls that an answer may have at most where one is required."""
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


def grammar_for(
    form: ToolFormat,
    tools: Sequence[Tool],
    choice: ToolChoice,
    think: ThinkTags | None,
    special_ids: Mapping[str, int],
) -> Grammar:
    """One call of the tool named, or up to MAX_CALLS of any where the mode is required.

    think: of thoughts that the prompt ends within, so that they come first. special_ids: special tokens by
    text, which a grammar names by their ids. Raises InvalidRequest if the schemas make it too large.
    """
    named = choice.mode is ToolMode.NAMED
    rules = _Rules(form, special_ids)
    calls = [rules.call(tool) for tool in tools if not named or tool.name == choice.name]
    text = rules.text(" | ".join(calls), 1 if named else MAX_CALLS, think)
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest.field("tools", f"have schemas of more than {MAX_GRAMMAR_BYTES} bytes in all.")
    return Grammar(kind=GrammarKind.LARK, text=text)


def tools_error(error: InvalidRequest) -> InvalidRequest:
    """What is wrong with a grammar, told of the tools that it was made of."""
    told = error.violations[0].description if error.violations else error.message
    return type(error).field("tools", f"a call of them can not be enforced: {told}")


class _Rules:
    """The rules of one grammar as they are made."""

    def __init__(self, form: ToolFormat, special_ids: Mapping[str, int]) -> None:
        self._form, self._special_ids = form, special_ids
        self._rules: list[str] = []

    def call(self, tool: Tool) -> str:
        """The name of a new rule for a call of this tool."""
        form, number = self._form, len(self._rules)
        schema = {**json.loads(tool.parameters), "type": "object"} if tool.parameters else _NOTHING
        if form.name_end:
            before, after = (*form.head, tool.name, form.name_end, *_fenced(form)), _fence_end(form)
        else:
            before = (f'{{"name": {json.dumps(tool.name)}, "{form.arguments}": ',)
            after = ("}",)
        parts = [self._terms(before), f"args{number}", self._terms(after)]
        self._rules.append(
            f"call{number}: {' '.join(filter(None, parts))}\nargs{number}: %json {_json(schema)}"
        )
        return f"call{number}"

    def text(self, calls: str, most: int, think: ThinkTags | None) -> str:
        """The whole grammar. calls: the rules of single calls, of which there are 1 to `most`."""
        form = self._form
        opening = self._terms(() if form.bare else (form.begin, *_spaced(form), form.opening))
        closing = self._terms((*_spaced(form), form.end) if form.end else ())
        one = " ".join(filter(None, (opening, "call", closing)))
        if form.more:
            more = f"({self._terms((form.more, _between(form)))} call){{0,{most - 1}}}"
            run = " ".join(filter(None, (opening, "call", more, closing)))
        else:
            between = self._terms(("\n",)) if form.end else ""
            run = f"{one} ({between} {one}){{0,{most - 1}}}"
        rules = [f"start: {'thoughts ' if think else ''}{run if most > 1 else one}", f"call: {calls}"]
        if think:
            rules.append(self._thoughts(think))
        return "\n".join([*rules, *self._rules]) + "\n"

    def _thoughts(self, think: ThinkTags) -> str:
        if think.end in self._special_ids:
            return f"thoughts: /(.|\\n)*/ {self._terms((think.end,))} /\\n*/"
        end = "".join(f"\\x{ord(char):02x}" for char in think.end)
        return f"thoughts: thought /\\n*/\nthought[lazy]: /(.|\\n)*{end}/"

    def _terms(self, texts: Sequence[str]) -> str:
        """Texts one after the other; those that are special tokens by their ids."""
        out: list[str] = []
        plain = ""
        for text in texts:
            if text in self._special_ids:
                out += [*_quoted(plain), f"<[{self._special_ids[text]}]>"]
                plain = ""
            else:
                plain += text
        return " ".join([*out, *_quoted(plain)])


def _quoted(text: str) -> list[str]:
    return [json.dumps(text, ensure_ascii=False)] if text else []


def _json(schema: Mapping[str, object]) -> str:
    return json.dumps(schema, ensure_ascii=False)


def _spaced(form: ToolFormat) -> tuple[str, ...]:
    """What stands between Hermes' tags and the object."""
    return ("\n",) if form.name == "hermes" else ()


def _between(form: ToolFormat) -> str:
    """White space behind the mark between two calls."""
    return "" if form.name_end else " "


def _fenced(form: ToolFormat) -> tuple[str, ...]:
    return (*form.args_begin, "\n") if form.args_begin else ()


def _fence_end(form: ToolFormat) -> tuple[str, ...]:
    return ("\n", *form.args_end) if form.args_begin else form.args_end
