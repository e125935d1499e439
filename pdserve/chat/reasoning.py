"""What a model thought before it answered, told apart from the answer as the text comes.

Thoughts are at the start of the answer or nowhere: behind the opening tag, or from the first character where
the prompt ends inside them. Line breaks around the tags belong to neither part. Not here: calls of tools.
"""

from __future__ import annotations

from enum import StrEnum

from pdserve.chat.formats import ThinkTags
from pdserve.tokenizer.stops import StopMatcher


class _At(StrEnum):
    START = "start"
    INSIDE = "inside"
    BEHIND = "behind"
    ANSWER = "answer"


class ReasoningParser:
    """Splits one answer's text. inside: the prompt ends within the thoughts."""

    def __init__(self, tags: ThinkTags, *, inside: bool) -> None:
        self._tags = tags
        self._at = _At.INSIDE if inside else _At.START
        self._end = StopMatcher([tags.end])
        self._begun = ""  # of the opening tag
        self._spaces: list[str] = []  # white space before it
        self._breaks: list[str] = []  # at the end of the thoughts so far
        self._thought = False

    def feed(self, text: str) -> tuple[str, str]:
        """Takes more of the answer. Returns what became certain of the answer and of the thoughts."""
        answer: list[str] = []
        thoughts: list[str] = []
        for at, char in enumerate(text):
            if self._at is _At.ANSWER:
                answer.append(text[at:])
                break
            if self._at is _At.START:
                answer.append(self._start(char))
            elif self._at is _At.INSIDE:
                thoughts.append(self._inside(char))
            elif char != "\n":
                self._at = _At.ANSWER
                answer.append(char)
        return "".join(answer), "".join(thoughts)

    def finish(self) -> tuple[str, str]:
        """What was held back at the answer's end."""
        if self._at is _At.START:
            return "".join(self._spaces) + self._begun, ""
        return "", self._trimmed(self._end.finish()) if self._at is _At.INSIDE else ""

    def _start(self, char: str) -> str:
        if not self._begun and char.isspace():
            self._spaces.append(char)
            return ""
        self._begun += char
        if self._tags.begin == self._begun:
            self._at = _At.INSIDE
        elif not self._tags.begin.startswith(self._begun):
            self._at = _At.ANSWER
            return "".join(self._spaces) + self._begun
        return ""

    def _inside(self, char: str) -> str:
        text, found = self._end.feed(char)
        if found:
            self._at = _At.BEHIND
        return self._trimmed(text)

    def _trimmed(self, text: str) -> str:
        """Thoughts without line breaks at their start; those at the end so far wait."""
        text = text if self._thought else text.lstrip("\n")
        kept = text.rstrip("\n")
        out = ""
        if kept:
            self._thought = True
            out, self._breaks = "".join(self._breaks) + kept, []
        if len(kept) < len(text):
            self._breaks.append(text[len(kept) :])
        return out
