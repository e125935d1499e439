"""Keeps what users wrote apart from what the template wrote, so that no user text becomes a control token.

The template is rendered twice where that matters: once as it is, and once with each user character that could
be part of a special token replaced by a private character. If both results have the same shape, the second
tells for every character who wrote it. The first is never changed, so honest chats come out as they should.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from pdserve.errors import InvalidRequest
from pdserve.tokenizer.limits import MAX_DEPTH, MAX_INPUT_CHARS, MAX_MESSAGES
from pdserve.tokenizer.templates import ChatTemplate

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython", "observation"})
_TYPES = frozenset({"text", "function", "object", "array", "string", "number", "integer", "boolean", "null"})
_OWN_KEYS = frozenset({"arguments", "parameters"})
"""Within these the user chooses the names of members too."""
_SCHEMA_KEYS = frozenset(
    {"type", "properties", "required", "description", "enum", "const", "items", "title", "default", "format"}
    | {"anyOf", "oneOf", "allOf", "additionalProperties", "minimum", "maximum", "$ref", "$defs"}
)
"""Names that templates look for in a schema; from a closed set, so no user text."""
_PRIVATE = range(0xF0000, 0xFFFFE)  # private-use plane 15
_KEPT = frozenset(' \t\r\n\f\v"\\')  # templates trim these or escape them in JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A rendered chat. tainted: the same with the user's characters replaced, or None where none matter."""

    text: str
    tainted: str | None


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Checked messages and tools, and the special tokens they must not be able to write."""

    messages: tuple[Mapping[str, Any], ...]
    control_texts: tuple[str, ...]
    tools: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def checked(
        cls,
        messages: Sequence[Mapping[str, Any]],
        control_texts: tuple[str, ...],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Conversation:
        """Raises InvalidRequest for messages or tools that no template may see."""
        if not 0 < len(messages) <= MAX_MESSAGES:
            raise InvalidRequest.field("messages", f"send between 1 and {MAX_MESSAGES}")
        for message in messages:
            if message.get("role") not in ROLES:
                raise InvalidRequest.field("messages.role", f"must be one of {', '.join(sorted(ROLES))}")
        made = cls(messages=tuple(messages), control_texts=control_texts, tools=tuple(tools))
        if sum(map(len, made.user_texts)) > MAX_INPUT_CHARS:
            raise InvalidRequest.field("messages", "are too long")
        return made

    @cached_property
    def user_texts(self) -> tuple[str, ...]:
        """All texts the user chose."""
        return tuple(text for value in (*self.messages, *self.tools) for text in _texts(value))

    @cached_property
    def harmless(self) -> bool:
        """Whether no user text can be part of a special token, whatever the template writes next to it."""
        keys = set().union(*map(_key_chars, self.control_texts))
        inner = "\0".join(self.control_texts)
        return all(
            keys.isdisjoint(text) and (not text.strip() or text.strip() not in inner)
            for text in self.user_texts
        )

    @cached_property
    def alphabet(self) -> frozenset[str]:
        """The characters to replace: enough of each special token's that none can be written without one."""
        return frozenset(c for text in self.control_texts for c in (set(text) - _KEPT or text))

    def replaced(self, table: Mapping[int, str], kept: re.Pattern[str]) -> Conversation:
        """The same with characters of user texts replaced, except in what `kept` matches."""
        messages = tuple(_replace(message, table, kept) for message in self.messages)
        tools = tuple(_replace(tool, table, kept) for tool in self.tools)
        return Conversation(messages=messages, control_texts=self.control_texts, tools=tools)

    def render(self, template: ChatTemplate, variables: Mapping[str, Any], now: datetime) -> str:
        """What the template makes of it. Raises InvalidRequest or ModelError."""
        tools = list(self.tools) or None
        return template.render(self.messages, {**variables, "tools": tools}, now=now)


def _texts(value: Any, key: str = "", depth: int = 0, own: bool = False) -> Iterator[str]:
    """All texts of the user in a value. own: the names of its members are the user's."""
    if depth > MAX_DEPTH:
        raise InvalidRequest.field("messages", "are nested too deeply")
    if isinstance(value, str):
        if not _is_structure(key, value):
            yield value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            if own and isinstance(name, str):
                yield from () if name in _SCHEMA_KEYS else (name,)
            elif not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,128}", name, re.ASCII):
                raise InvalidRequest.field("messages", "have a name that is not allowed")
            yield from _texts(part, name, depth + 1, own or name in _OWN_KEYS)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _texts(part, "", depth + 1, own)
    elif value is not None and not isinstance(value, (bool, int, float)):
        raise InvalidRequest.field("messages", "hold a value that is not a text, number, list or object")


def _is_structure(key: str, value: str) -> bool:
    """Values from closed sets: templates compare them and write them into control tokens."""
    return (key == "role" and value in ROLES) or (key == "type" and value in _TYPES)


def _replace(
    value: Any, table: Mapping[int, str], kept: re.Pattern[str], key: str = "", own: bool = False
) -> Any:
    if isinstance(value, str):
        return value if _is_structure(key, value) else _replaced_text(value, table, kept)
    if isinstance(value, Mapping):
        return {
            _replaced_text(name, table, kept) if own and name not in _SCHEMA_KEYS else name: _replace(
                part, table, kept, name, own or name in _OWN_KEYS
            )
            for name, part in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_replace(part, table, kept, "", own) for part in value]
    return value


def _replaced_text(text: str, table: Mapping[int, str], kept: re.Pattern[str]) -> str:
    parts = kept.split(text)  # the pattern has one group: every second part is a match
    return "".join(p if n % 2 else p.translate(table) for n, p in enumerate(parts))


def _key_chars(control: str) -> set[str]:
    """Characters of which a user text must hold one to contribute to this token, unless it lies within it."""
    if not control[0].isalnum() and not control[-1].isalnum() and not (control[0] + control[-1]).isspace():
        return {c for c in control if not c.isalnum() and not c.isspace()}
    return set(control)


def render_guarded(
    template: ChatTemplate, conversation: Conversation, variables: Mapping[str, Any]
) -> Rendered:
    """Renders a conversation and tells its user text apart. Raises InvalidRequest, also if it can not."""
    now = datetime.now()  # one instant for all renders
    text = conversation.render(template, variables, now)
    if conversation.harmless:
        return Rendered(text=text, tainted=None)
    table = _private_table(conversation, text)
    back = {ord(private): chr(char) for char, private in table.items()}
    for kept in (_nothing(), _harmless_literals(template, conversation.control_texts)):
        try:
            tainted = conversation.replaced(table, kept).render(template, variables, now)
        except InvalidRequest:
            continue  # this template looks into the text; the next attempt leaves more of it readable
        if tainted.translate(back) == text:
            return Rendered(text=text, tainted=tainted)
    message = "hold text that the model's chat template rewrites so that it could pass for control tokens"
    raise InvalidRequest.field("messages", message)


def _private_table(conversation: Conversation, text: str) -> dict[int, str]:
    used = set(text).union(*conversation.user_texts)
    free = (chr(point) for point in _PRIVATE if chr(point) not in used)
    try:
        return {ord(char): next(free) for char in sorted(conversation.alphabet)}
    except StopIteration:
        raise InvalidRequest.field("messages", "hold too many private-use characters") from None


def _nothing() -> re.Pattern[str]:
    return re.compile(r"((?!))")


def _harmless_literals(template: ChatTemplate, controls: tuple[str, ...]) -> re.Pattern[str]:
    """The template's own words, such as </think>, that can not be any part of a special token."""
    words = [w for w in template.literals if w and not any(_overlaps(w, c) for c in controls)]
    words.sort(key=lambda w: (-len(w), w))
    return re.compile(f"({'|'.join(map(re.escape, words))})") if words else _nothing()


def _overlaps(word: str, control: str) -> bool:
    if word in control or control in word:
        return True
    sizes = range(1, min(len(word), len(control)))
    return any(word[-n:] == control[:n] or word[:n] == control[-n:] for n in sizes)
