"""Clients of the router's gRPC services: let in by the authenticator, recorded where they change things."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pdserve.errors import PermissionRefused
from pdserve.obs.tracecontext import PARENT, parent_of
from pdserve.rpc.access import Access
from pdserve.rpc.guard import Call
from router.audit import AuditLog
from router.auth.authenticator import Authenticator
from router.auth.refusals import Reason
from router.auth.throttle import address_of
from router.caller import CALLER, Caller

FLEET = Caller(tenant="fleet", key_id="fleet")
"""Our own processes where they call as clients do: `pdserve up` asks whether the workers have been met."""


class EdgeClients:
    """What the guard of a router's server asks (`pdserve.rpc.guard.Clients`)."""

    def __init__(self, auth: Authenticator, audit: AuditLog, count: Callable[[str], None]) -> None:
        """count: told the reason of a refusal."""
        self._auth, self._audit, self._count = auth, audit, count

    @contextmanager
    def admit(self, call: Call) -> Iterator[Callable[[Any], None]]:
        """Around one call: its handler finds who calls in CALLER, and whose trace it is in PARENT."""
        PARENT.set(parent_of(call.metadata))
        if call.access is not Access.ADMIN:
            CALLER.set(self._caller(call))
            yield _ignore
            return
        with self._audit.call(call.method.rpartition("/")[2], address_of(call.peer)) as entry:
            entry.caller = self._caller(call)
            if not entry.caller.admin:
                self._count(Reason.NOT_ADMIN)
                raise PermissionRefused("This call changes the fleet: it takes a key of an admin.")
            CALLER.set(entry.caller)
            yield entry.told

    def _caller(self, call: Call) -> Caller:
        return FLEET if call.of_fleet else self._auth.check(call.metadata, call.peer)


def _ignore(request: Any) -> None:
    """Calls that change nothing are not recorded."""
