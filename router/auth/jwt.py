"""JSON Web Tokens (RFC 7519) of one issuer, checked against the keys of a file (JWKS, RFC 7517).

Nothing is fetched: the file is replaced by whoever keeps it, and read again then. Only asymmetric signatures
count, so that a public key can not be used as a shared secret (RFC 8725 §2.1). Needs the extra `jwt`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jwt
from cryptography.exceptions import UnsupportedAlgorithm

from pdserve.errors import ConfigError
from router.auth.keys import is_tenant
from router.auth.refusals import Reason, Refused, refuse
from router.auth.watched import WatchedFile
from router.caller import Caller

ALGORITHMS = ("RS256", "ES256", "EdDSA")
MIN_RSA_BITS = 2048
LEEWAY_S = 10.0
"""How far the issuer's clock may be off."""
SETTING = "jwt_jwks_file"
_REQUIRED = ("exp", "iss", "aud")


@dataclass(frozen=True, slots=True, kw_only=True)
class JwtSettings:
    """tenant_claim: whose text is the tenant. admin_claim: of admins this claim is true, or, as "name=word",
    has the word in its list or text of words; "": nobody is one."""

    issuer: str
    audience: str
    jwks_file: str
    tenant_claim: str
    admin_claim: str = ""


def parse_jwks(content: bytes) -> Mapping[str, jwt.PyJWK]:
    """Public keys by key id. Keys for other uses or algorithms are left out. Raises ConfigError."""
    try:
        raw: Any = json.loads(content)
        listed = [item for item in raw["keys"] if isinstance(item, dict)]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"{SETTING}: is not a JSON Web Key Set") from None
    found: dict[str, jwt.PyJWK] = {}
    for item in listed:
        key = _public_key(item)
        if key is not None and isinstance(key.key_id, str) and key.key_id:
            found[key.key_id] = key
    if not found:
        raise ConfigError(f"{SETTING}: has no key with a kid for {', '.join(ALGORITHMS)}")
    return found


def _public_key(item: dict[str, Any]) -> jwt.PyJWK | None:
    if item.get("use", "sig") != "sig" or item.get("kty") == "oct" or "d" in item:
        return None
    try:
        key = jwt.PyJWK(item)
    except (jwt.PyJWTError, UnsupportedAlgorithm, ValueError, TypeError, KeyError, NotImplementedError):
        return None
    strong = item.get("kty") != "RSA" or key.key.key_size >= MIN_RSA_BITS
    return key if strong and key.algorithm_name in ALGORITHMS else None


class TokenChecker:
    """Whose token this is. One event loop's."""

    def __init__(self, settings: JwtSettings) -> None:
        """Raises ConfigError."""
        self._settings = settings
        self._file = WatchedFile(SETTING, settings.jwks_file, parse_jwks, private=False)

    def caller(self, token: str) -> Caller:
        """Who has this token. Raises Refused."""
        claims = self._claims(token)
        tenant, subject = claims.get(self._settings.tenant_claim), claims.get("sub")
        if not isinstance(tenant, str) or not is_tenant(tenant):
            raise refuse(Reason.BAD_TOKEN)
        key_id = f"jwt:{subject}" if isinstance(subject, str) and is_tenant(subject) else "jwt"
        return Caller(tenant=tenant, key_id=key_id, admin=self._is_admin(claims))

    def _claims(self, token: str) -> dict[str, Any]:
        try:
            key_id = jwt.get_unverified_header(token).get("kid")
            key = self._file.current().get(key_id) if isinstance(key_id, str) else None
            if key is None:
                raise refuse(Reason.BAD_TOKEN)
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[str(key.algorithm_name)],
                issuer=self._settings.issuer,
                audience=self._settings.audience,
                leeway=LEEWAY_S,
                options={"require": list(_REQUIRED)},
            )
        except jwt.ExpiredSignatureError:
            raise refuse(Reason.EXPIRED) from None
        except Refused:
            raise
        except Exception:  # whatever a hostile token does to a parser, it is not taken
            raise refuse(Reason.BAD_TOKEN) from None
        return claims

    def _is_admin(self, claims: Mapping[str, Any]) -> bool:
        name, given, word = self._settings.admin_claim.partition("=")
        if not name:
            return False
        value = claims.get(name)
        if not given:
            return value is True
        words = value.split() if isinstance(value, str) else value
        return isinstance(words, list) and word in words
