"""How models write calls of tools and their thoughts: the formats that are JSON, as data, by name.

Sources: the chat templates that teach them. Not here: which one a model has (`profile`), following an answer
(`parser`), making a model write a call (`grammar`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A run of calls: begin, opening, a call, (more, a call)..., end. White space may lie between any two.

    Without name_end a call is a JSON object with a name and arguments (the member `arguments`). With it a
    call is head, the name, name_end, args_begin, a JSON object, args_end. id_mark: in the name, what stands
    behind it is an id of the model's own. bare: an answer that starts with the object needs no begin.
    """

    name: str
    begin: str
    opening: str = ""
    more: str = ""
    end: str = ""
    arguments: str = "arguments"
    head: tuple[str, ...] = ()
    name_end: str = ""
    id_mark: str = ""
    args_begin: tuple[str, ...] = ()
    args_end: tuple[str, ...] = ()
    bare: bool = False

    @property
    def markers(self) -> frozenset[str]:
        """Texts that can be special tokens, which decoders hide."""
        single = (self.begin, self.opening, self.more, self.end, self.name_end, self.id_mark)
        return frozenset((*single, *self.head, *self.args_begin, *self.args_end)) - {""}


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkTags:
    """What a model's thoughts stand between."""

    begin: str
    end: str


HERMES = ToolFormat(name="hermes", begin="<tool_call>", end="</tool_call>")
_ALL = (
    HERMES,
    ToolFormat(name="mistral", begin="[TOOL_CALLS]", opening="[", more=",", end="]"),
    ToolFormat(name="mistral11", begin="[TOOL_CALLS]", name_end="[ARGS]", id_mark="[CALL_ID]"),
    ToolFormat(name="llama3", begin="<|python_tag|>", more=";", arguments="parameters", bare=True),
    ToolFormat(name="granite", begin="<|tool_call|>", opening="[", more=",", end="]"),
    ToolFormat(
        name="deepseek",
        begin="<｜tool▁calls▁begin｜>",
        opening="<｜tool▁call▁begin｜>",
        head=("function", "<｜tool▁sep｜>"),
        name_end="\n",
        args_begin=("```json",),
        args_end=("```", "<｜tool▁call▁end｜>"),
        more="<｜tool▁call▁begin｜>",
        end="<｜tool▁calls▁end｜>",
    ),
    ToolFormat(
        name="deepseek31",
        begin="<｜tool▁calls▁begin｜>",
        opening="<｜tool▁call▁begin｜>",
        name_end="<｜tool▁sep｜>",
        args_end=("<｜tool▁call▁end｜>",),
        more="<｜tool▁call▁begin｜>",
        end="<｜tool▁calls▁end｜>",
    ),
)
FORMATS = {each.name: each for each in _ALL}
"""By the name that `--tool-format` takes."""
THINK_TAGS = (
    ThinkTags(begin="<think>", end="</think>"),
    ThinkTags(begin="[THINK]", end="[/THINK]"),
    ThinkTags(begin="<seed:think>", end="</seed:think>"),
)
