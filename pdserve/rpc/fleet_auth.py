"""Only members of the fleet may call the services between our processes: a token made from its secret.

What lives here: the token, and stubs that send it. What does not: who asks for it (`guard`), authority over
single requests (tickets, `kvtransfer.ticket`) and clients' keys (`router.auth`). The token proves possession
of the secret to a peer on the same host; between hosts it needs mutual TLS (docs/tls.md), which `--insecure`
does without.
"""

from __future__ import annotations

import functools
import hmac
from collections.abc import Callable
from typing import Any, TypeVar

METADATA_KEY = "pdserve-fleet"
_PURPOSE = b"pdserve internal rpc v1"

S = TypeVar("S")
Metadata = tuple[tuple[str, str], ...]


def fleet_token(secret: bytes) -> str:
    """Hex of an HMAC-SHA256: tells nothing about the secret."""
    return hmac.digest(secret, _PURPOSE, "sha256").hex()


def authenticated(stub: S, secret: bytes) -> S:
    """The same stub; each of its calls carries the fleet's token, before metadata of its own."""
    metadata = ((METADATA_KEY, fleet_token(secret)),)
    for name, method in list(vars(stub).items()):
        setattr(stub, name, functools.partial(_shown, method, metadata))
    return stub


def _shown(
    method: Callable[..., Any], token: Metadata, *args: Any, metadata: Metadata = (), **options: Any
) -> Any:
    return method(*args, metadata=(*token, *metadata), **options)
