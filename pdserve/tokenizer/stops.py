"""Stop strings over streamed text: what may be the start of a stop string is held back until it is clear.

Here: matching only. Not here: decoding (`incremental`), and what happens to a request that is stopped.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.errors import InvalidRequest

MAX_STOPS = 16
MAX_STOP_BYTES = 256


def checked_stops(stops: Sequence[str]) -> tuple[str, ...]:
    """Stop strings within limits, without repeats. Raises InvalidRequest that names the field."""
    if len(stops) > MAX_STOPS:
        raise InvalidRequest.field("stop", f"has more than {MAX_STOPS} texts")
    for text in stops:
        if not text:
            raise InvalidRequest.field("stop", "holds an empty text")
        if len(text.encode("utf-8", "surrogatepass")) > MAX_STOP_BYTES:
            raise InvalidRequest.field("stop", f"holds a text of more than {MAX_STOP_BYTES} bytes")
    return tuple(dict.fromkeys(stops))


class StopMatcher:
    """Finds the first stop string in a stream of text pieces.

    The match that is complete first in the stream wins; of those that end at the same character, the longest.
    What was given out never holds a stop string nor part of the one that matched.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [(stop, _failure(stop)) for stop in checked_stops(stops)]
        self._matched = [0] * len(self._patterns)  # how much of each stop the text so far ends with
        self._held = ""
        self.stop: str | None = None

    def feed(self, piece: str) -> tuple[str, bool]:
        """Takes a piece of text. Returns what may be given out now, and whether a stop string was found.

        After a match nothing more comes out: further pieces are dropped.
        """
        if self.stop is not None:
            return "", True
        for at, char in enumerate(piece):
            longest = self._advance(char)
            if longest:
                text = self._held + piece[: at + 1]
                self.stop, self._held = text[len(text) - longest :], ""
                return text[: len(text) - longest], True
        text = self._held + piece
        keep = max(self._matched, default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """The text still held back, when the stream ended without a match."""
        text, self._held = self._held, ""
        return text

    def _advance(self, char: str) -> int:
        """Moves all patterns on by one character. Returns the length of the longest one completed, or 0."""
        longest = 0
        for n, (stop, failure) in enumerate(self._patterns):
            length = self._matched[n]
            while length and stop[length] != char:
                length = failure[length - 1]
            length += stop[length] == char
            if length == len(stop):
                longest = max(longest, length)
                length = failure[length - 1]
            self._matched[n] = length
        return longest


def _failure(pattern: str) -> list[int]:
    """For each end: the longest proper border. Source: Knuth, Morris, Pratt 1977."""
    borders = [0] * len(pattern)
    length = 0
    for at in range(1, len(pattern)):
        while length and pattern[at] != pattern[length]:
            length = borders[length - 1]
        length += pattern[at] == pattern[length]
        borders[at] = length
    return borders
