"""Chat templates: a conversation to the text the model was trained on, within limits.

Renders as transformers does, or refuses with a typed error. Here: one compiled template and its errors. Not
here: what templates may do (`sandbox`), and keeping user text apart from control tokens (`guard`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables

from pdserve.errors import InvalidRequest, ModelError
from pdserve.tokenizer.bundle import MAX_TEMPLATE_BYTES
from pdserve.tokenizer.limits import MAX_CPU_S, MAX_MESSAGES, MAX_TEXT_CHARS, RenderLimit, measure, metered
from pdserve.tokenizer.sandbox import ChatEnvironment, TemplateRefusal, strftime_at

_REASONING = ("reasoning_content", "thinking", "reasoning")


# What a template raises when it meets messages of another shape than it expects.
_MISFITS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)


class ChatTemplate:
    """One chat template, compiled once; for any number of threads. Raises ModelError if it is not usable."""

    def __init__(self, source: str, *, cpu_s: float = MAX_CPU_S) -> None:
        if len(source.encode("utf-8", "replace")) > MAX_TEMPLATE_BYTES:
            raise ModelError("The model's chat template is too large.")
        self.source = source
        self._cpu_s = cpu_s
        self._environment = ChatEnvironment()
        try:
            self._compiled = self._environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelError(f"The model's chat template is not valid (line {error.lineno}).") from None
        except (TemplateError, RecursionError, ValueError, OverflowError, SyntaxError, TypeError):
            raise ModelError("The model's chat template can not be used.") from None

    @cached_property
    def literals(self) -> frozenset[str]:
        """All text constants in the template's expressions."""
        tree = self._environment.parse(self.source)
        return frozenset(n.value for n in tree.find_all(nodes.Const) if isinstance(n.value, str))

    @cached_property
    def names(self) -> frozenset[str]:
        """The variables that the template reads."""
        return frozenset(find_undeclared_variables(self._environment.parse(self.source)))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        now: datetime | None = None,
    ) -> str:
        """The conversation as text. variables: special tokens by name, add_generation_prompt, and the like.

        Raises InvalidRequest if the template refuses the messages or a limit is reached, ModelError if the
        template tries what it may not.
        """
        if not messages:
            raise InvalidRequest.field("messages", "is empty: send at least one message")
        if len(messages) > MAX_MESSAGES:
            raise InvalidRequest.field("messages", f"has more than {MAX_MESSAGES} entries")
        chat = [_prepared(message) for message in messages]
        given = {"tools": None, "documents": None, **variables, "messages": chat}
        try:
            measure(chat)
            measure(given["tools"])
            return self._run({**given, "strftime_now": strftime_at(now or datetime.now())})
        except RenderLimit as error:
            raise InvalidRequest.field("messages", f"the chat template was ended: {error}") from None
        except TemplateRefusal as error:
            raise InvalidRequest.field(
                "messages", f"the chat template refuses them: {error.message}"
            ) from None
        except (SecurityError, MemoryError):
            raise ModelError("The model's chat template tries something that is not allowed.") from None
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            AttributeError,
            RecursionError,
        ):
            message = "do not fit the model's chat template: check roles, their order and contents"
            raise InvalidRequest.field("messages", message) from None

    def _run(self, variables: dict[str, Any]) -> str:
        pieces: list[str] = []
        size = 0
        with metered(self._cpu_s):
            for piece in self._compiled.generate(variables):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_TEXT_CHARS:
                    raise RenderLimit("its result is too long")
        return "".join(pieces)


def _prepared(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: no keys without a value, and reasoning under the names they read."""
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = next((kept[key] for key in _REASONING if key in kept), None)
    if reasoning is None:
        return kept
    return {"thinking": reasoning, **kept, "reasoning_content": reasoning}
