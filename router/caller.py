"""Who asks: the identity that an authenticator gave a call. It never comes from the request itself."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """tenant: whose prefixes and requests these are. key_id: which credential it was; empty without one.
    admin: may change the fleet."""

    tenant: str = "default"
    key_id: str = ""
    admin: bool = True


ANONYMOUS = Caller()
"""Everybody, where no authentication is configured (which listens on loopback, or is asked for)."""

CALLER: ContextVar[Caller] = ContextVar("caller")
"""Of the gRPC call that is served. Only what admits clients sets it; a handler that nobody was admitted to
has none, and fails."""
