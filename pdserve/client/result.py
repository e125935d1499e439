"""The whole answer to one request, and collecting it from the events of its stream."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.api import Admitted, Chunk, End, StreamEvent, Timings
from pdserve.errors import InternalError
from pdserve.types import FinishReason, Ledger, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A finished completion. epochs: tries it took, 1 when nothing failed."""

    request_id: str
    client_request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    ledger: Ledger
    epochs: int


@dataclass(slots=True)
class Collector:
    """Builds the result. Checks that no token is missing or comes twice."""

    admitted: Admitted | None = None
    end: End | None = None
    _ids: list[int] = field(default_factory=list)
    _text: list[str] = field(default_factory=list)

    def take(self, event: StreamEvent) -> Chunk | None:
        """Takes the next event; returns it if it is a chunk. Raises InternalError for a gap in the stream."""
        match event:
            case Chunk():
                if event.index != len(self._ids):
                    raise InternalError("The server's stream has a gap; please report this.")
                self._ids += event.token_ids
                self._text.append(event.text)
                return event
            case Admitted():
                self.admitted = event
            case End():
                self.end = event
        return None

    def result(self) -> Result:
        """The result of a stream that ended. Raises InternalError if the server closed it without an end."""
        if self.admitted is None or self.end is None:
            raise InternalError("The server closed the stream without a result; please report this.")
        return Result(
            request_id=self.admitted.request_id,
            client_request_id=self.admitted.client_request_id,
            text="".join(self._text),
            token_ids=tuple(self._ids),
            finish_reason=self.end.finish_reason,
            usage=self.end.usage,
            timings=self.end.timings,
            ledger=self.end.ledger,
            epochs=self.end.epochs,
        )
