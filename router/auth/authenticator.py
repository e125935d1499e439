"""One question for gRPC and HTTP alike: whose call is this? The tenant comes from here and nowhere else.

What lives here: finding the credential among the headers, and which kind of it is asked. What does not: the
kinds (`keys`, `jwt`), what a caller may do (`pdserve.rpc.access`), and the counting of guesses (`throttle`).
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Iterable

from pdserve.clock import Clock, MonotonicClock
from pdserve.errors import ConfigError
from router.auth.keys import PREFIX, Changed, KeyFile
from router.auth.refusals import Reason, Refused, refuse
from router.auth.throttle import Throttle
from router.caller import ANONYMOUS, Caller
from router.config import RouterConfig

Headers = Iterable[tuple[str, str | bytes]]
"""Names and values of HTTP headers or gRPC metadata; names in any case."""
MIN_API_KEY_CHARS = 16
MAX_CREDENTIAL_CHARS = 8192
_HEADERS = ("authorization", "x-api-key")
_OPERATOR = Caller(key_id="api-key")
"""Who has the one key of --api-key."""


class Authenticator:
    """Asks the key file, the one key and the JWT issuer, whichever are configured. One event loop's."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        count: Callable[[str], None] = lambda reason: None,
        keys_changed: Changed = lambda added, removed: None,
        clock: Clock | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """count: told the reason of each refusal. keys_changed: told ids that came and went. now: seconds
        since 1970, for expiries of keys.

        Raises ConfigError for files that can not be used.
        """
        self._count = count
        if config.api_key and len(config.api_key) < MIN_API_KEY_CHARS:
            raise ConfigError(f"api_key: must have at least {MIN_API_KEY_CHARS} characters")
        self._one = _digest(config.api_key) if config.api_key else b""
        self._keys = None
        if config.api_key_file:
            self._keys = KeyFile(config.api_key_file, now=now, on_change=keys_changed)
        self._tokens = _tokens(config)
        self._throttle = Throttle(config.auth_failures_per_minute, clock or MonotonicClock())

    @property
    def required(self) -> bool:
        """Whether callers must show something; if not, everybody is ANONYMOUS."""
        return bool(self._one or self._keys or self._tokens)

    def check(self, headers: Headers, peer: str = "") -> Caller:
        """Who calls, by `authorization: Bearer …` or `x-api-key: …`. peer: the address it comes from.

        Raises Unauthenticated, or Overloaded with a time to wait for an address that guessed too often.
        """
        if not self.required:
            return ANONYMOUS
        try:
            credential = _credential(headers)
            self._throttle.check(peer)
            return self._ask(credential)
        except Refused as refused:
            if refused.reason.is_guess:
                self._throttle.failed(peer)
            self._count(refused.reason)
            raise refused.error from None

    def _ask(self, credential: str) -> Caller:
        if credential.startswith(PREFIX) and self._keys is not None:
            return self._keys.caller(credential)
        if self._one and hmac.compare_digest(_digest(credential), self._one):
            return _OPERATOR
        if self._tokens is not None:
            return self._tokens(credential)
        raise refuse(Reason.UNKNOWN_KEY)


def _tokens(config: RouterConfig) -> Callable[[str], Caller] | None:
    """What checks JWTs; its packages are loaded only where an issuer is configured."""
    if not config.jwt_issuer:
        return None
    try:
        from router.auth.jwt import JwtSettings, TokenChecker
    except ImportError:
        raise ConfigError("jwt_issuer: needs more packages: pip install 'pdserve[jwt]'") from None
    settings = JwtSettings(
        issuer=config.jwt_issuer,
        audience=config.jwt_audience,
        jwks_file=config.jwt_jwks_file,
        tenant_claim=config.jwt_tenant_claim,
        admin_claim=config.jwt_admin_claim,
    )
    return TokenChecker(settings).caller


def _digest(key: str) -> bytes:
    """Compared in place of the key: the time tells nothing of its length."""
    return hashlib.sha256(key.encode()).digest()


def _credential(headers: Headers) -> str:
    """The one credential that was shown. Raises Refused."""
    shown = {_bare(name.lower(), value) for name, value in headers if name.lower() in _HEADERS}
    if not shown:
        raise refuse(Reason.MISSING)
    credential = shown.pop()
    if shown or not credential or len(credential) > MAX_CREDENTIAL_CHARS or not credential.isascii():
        raise refuse(Reason.MALFORMED)
    return credential


def _bare(name: str, value: str | bytes) -> str:
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    if name == "x-api-key":
        return text.strip()
    scheme, _, rest = text.strip().partition(" ")
    return rest.strip() if scheme.lower() == "bearer" else ""
