"""Why a credential is not taken: a closed set for metrics, and what the caller is told, which is less."""

from __future__ import annotations

from enum import StrEnum

from pdserve.errors import Overloaded, PdserveError, Unauthenticated

_HOW = "send a key as `authorization: Bearer KEY` or `x-api-key: KEY`."
_NOT_TAKEN = f"The credential is not valid here: {_HOW}"


class Reason(StrEnum):
    """Labels of pdserve_auth_failures."""

    MISSING = "missing"
    MALFORMED = "malformed"
    UNKNOWN_KEY = "unknown_key"
    WRONG_SECRET = "wrong_secret"  # noqa: S105 - a label
    EXPIRED = "expired"
    BAD_TOKEN = "bad_token"  # noqa: S105 - a label
    THROTTLED = "throttled"
    NOT_ADMIN = "not_admin"

    @property
    def is_guess(self) -> bool:
        """Whether such a refusal may have been an attempt to guess."""
        return self not in (Reason.MISSING, Reason.THROTTLED, Reason.NOT_ADMIN)


class Refused(Exception):
    """A credential was not taken. error: what the caller is told; which check failed is not in it."""

    def __init__(self, reason: Reason, error: PdserveError) -> None:
        super().__init__(reason)
        self.reason, self.error = reason, error


def refuse(reason: Reason) -> Refused:
    """The refusal of a credential that says no more than it must."""
    if reason is Reason.MISSING:
        return Refused(reason, Unauthenticated(f"This server wants a credential: {_HOW}"))
    if reason is Reason.EXPIRED:
        return Refused(reason, Unauthenticated("The credential has expired; ask for a new one."))
    return Refused(reason, Unauthenticated(_NOT_TAKEN))


def throttled(wait_s: float) -> Refused:
    """The refusal of an address that guessed too often."""
    message = "Too many credentials from this address were not valid: come back later."
    return Refused(Reason.THROTTLED, Overloaded(message, retry_after_s=wait_s))
