"""The exception tree. Each error has one stable label and one gRPC status, in response, log and metric.

    PdserveError
    ├── InvalidRequest            INVALID_ARGUMENT     invalid_request (carries field violations)
    │   ├── PromptTooLong         INVALID_ARGUMENT     prompt_too_long
    │   ├── UnsupportedFeature    UNIMPLEMENTED        unsupported
    │   └── NeverFits             INVALID_ARGUMENT     never_fits
    ├── UnknownModel              NOT_FOUND            unknown_model
    ├── UnknownRequest            NOT_FOUND            unknown_request
    ├── Overloaded                RESOURCE_EXHAUSTED   overloaded (retry_after_s)
    ├── Unavailable               UNAVAILABLE          unavailable (retry_after_s)
    │   ├── Draining              UNAVAILABLE          draining
    │   └── WorkerLost            UNAVAILABLE          worker_lost
    ├── DeadlineExpired           DEADLINE_EXCEEDED    deadline_expired
    ├── Cancelled                 CANCELLED            cancelled
    ├── Unauthenticated           UNAUTHENTICATED      unauthenticated
    ├── PermissionRefused         PERMISSION_DENIED    permission_refused
    ├── StalePeer                 FAILED_PRECONDITION  stale_incarnation
    ├── Incompatible              FAILED_PRECONDITION  incompatible
    ├── ModelError                FAILED_PRECONDITION  model_error (a model file that can not be used)
    ├── ConfigError               FAILED_PRECONDITION  config_error
    └── InternalError             INTERNAL             internal

Messages tell the user what to do; no paths, addresses or object reprs of internals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field of a request that is wrong, and how to put it right."""

    field: str
    description: str


class PdserveError(Exception):
    """Root of all errors a caller can meet.

    label: stable name for logs, metrics and clients. status: name of the gRPC status code.
    retry_after_s: seconds after which a retry makes sense, or None.
    """

    label: ClassVar[str] = "internal"
    status: ClassVar[str] = "INTERNAL"

    def __init__(
        self, message: str, *, violations: tuple[FieldViolation, ...] = (), retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.violations = violations
        self.retry_after_s = retry_after_s


class InvalidRequest(PdserveError):
    label, status = "invalid_request", "INVALID_ARGUMENT"

    @classmethod
    def field(cls, name: str, description: str) -> InvalidRequest:
        """An error about one field."""
        return cls(f"{name}: {description}", violations=(FieldViolation(name, description),))


class PromptTooLong(InvalidRequest):
    label = "prompt_too_long"


class UnsupportedFeature(InvalidRequest):
    label, status = "unsupported", "UNIMPLEMENTED"


class NeverFits(InvalidRequest):
    label = "never_fits"


class UnknownModel(PdserveError):
    label, status = "unknown_model", "NOT_FOUND"


class UnknownRequest(PdserveError):
    label, status = "unknown_request", "NOT_FOUND"


class Overloaded(PdserveError):
    label, status = "overloaded", "RESOURCE_EXHAUSTED"


class Unavailable(PdserveError):
    label, status = "unavailable", "UNAVAILABLE"


class Draining(Unavailable):
    label = "draining"


class WorkerLost(Unavailable):
    label = "worker_lost"


class DeadlineExpired(PdserveError):
    label, status = "deadline_expired", "DEADLINE_EXCEEDED"


class Cancelled(PdserveError):
    label, status = "cancelled", "CANCELLED"


class Unauthenticated(PdserveError):
    label, status = "unauthenticated", "UNAUTHENTICATED"


class PermissionRefused(PdserveError):
    label, status = "permission_refused", "PERMISSION_DENIED"


class StalePeer(PdserveError):
    label, status = "stale_incarnation", "FAILED_PRECONDITION"


class Incompatible(PdserveError):
    label, status = "incompatible", "FAILED_PRECONDITION"


class ModelError(PdserveError):
    label, status = "model_error", "FAILED_PRECONDITION"


class ConfigError(PdserveError):
    label, status = "config_error", "FAILED_PRECONDITION"


class InternalError(PdserveError):
    label, status = "internal", "INTERNAL"


def _tree(root: type[PdserveError]) -> list[type[PdserveError]]:
    return [root, *(cls for child in root.__subclasses__() for cls in _tree(child))]


BY_LABEL: dict[str, type[PdserveError]] = {cls.label: cls for cls in _tree(PdserveError)[1:]}
"""The one table that turns a label back into an error class."""
