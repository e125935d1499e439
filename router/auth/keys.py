"""API keys: `pds_<id>_<secret>`, of which a file holds the id and a hash of the secret, a JSON object a line.

A secret has 256 random bits, so nobody can try them out, and a slow hash, which makes up for secrets that
people choose, would only cost each request time: SHA-256 over a salt and the secret does. What lives here:
keys, the file, and who shows one. What does not: the command (`pdserve.cli.keys`).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pdserve.errors import ConfigError
from router.auth.refusals import Reason, refuse
from router.auth.watched import WatchedFile
from router.caller import Caller

PREFIX = "pds_"
SETTING = "api_key_file"
MAX_KEYS = 100_000
_KEY = re.compile(r"pds_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
_TENANT = re.compile(r"[!-~]{1,128}")
_ID, _HASH, _SALT = re.compile(r"[0-9a-f]{12}"), re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{32}")
Changed = Callable[[frozenset[str], frozenset[str]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyEntry:
    """What is kept of a key. Times in seconds since 1970. hash: hex of SHA-256 over salt and secret."""

    id: str
    hash: str
    salt: str
    tenant: str
    admin: bool = False
    created: float = 0.0
    expires: float | None = None
    note: str = ""

    def expired(self, now: float) -> bool:
        """Whether it counts no longer."""
        return self.expires is not None and now >= self.expires

    def fits(self, secret: str) -> bool:
        """Whether this is the key's secret; takes the same time for all that are not."""
        return hmac.compare_digest(_hash(self.salt, secret), self.hash)


_NOBODY = KeyEntry(id="0" * 12, hash="0" * 64, salt="0" * 32, tenant="nobody")
"""Compared with where there is no such key, which so takes as long as a wrong secret."""


def is_tenant(name: str) -> bool:
    """Whether a text may name a tenant: 1 to 128 printable ASCII characters, no space."""
    return _TENANT.fullmatch(name) is not None


def make_key(
    tenant: str, *, admin: bool, note: str, lives_s: float | None, now: float
) -> tuple[str, KeyEntry]:
    """A new key, to be shown once, and what is kept of it. lives_s: seconds; None: for ever.

    Raises ConfigError for a name that no tenant may have.
    """
    if not is_tenant(tenant):
        raise ConfigError("tenant: must be 1 to 128 printable ASCII characters without spaces")
    key_id, salt, secret = secrets.token_hex(6), secrets.token_hex(16), secrets.token_urlsafe(32)
    entry = KeyEntry(
        id=key_id, hash=_hash(salt, secret), salt=salt, tenant=tenant, admin=admin, note=note,
        created=now, expires=None if lives_s is None else now + lives_s,
    )  # fmt: skip
    return f"{PREFIX}{key_id}_{secret}", entry


def _hash(salt: str, secret: str) -> str:
    return hashlib.sha256(bytes.fromhex(salt) + secret.encode()).hexdigest()


def parse_keys(content: bytes) -> Mapping[str, KeyEntry]:
    """The entries of a key file by id. Raises ConfigError naming the line; its content is not repeated."""
    found: dict[str, KeyEntry] = {}
    try:
        lines = content.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"{SETTING}: is not UTF-8") from None
    if len(lines) > MAX_KEYS:
        raise ConfigError(f"{SETTING}: more than {MAX_KEYS} lines")
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        entry = _entry(line)
        if entry is None or entry.id in found:
            raise ConfigError(f"{SETTING}: line {number} is no key of pdserve keys, or is there twice")
        found[entry.id] = entry
    return found


def _entry(line: str) -> KeyEntry | None:
    try:
        raw: Any = json.loads(line)
        entry = KeyEntry(**raw)
        good = (
            _ID.fullmatch(entry.id) and _HASH.fullmatch(entry.hash) and _SALT.fullmatch(entry.salt)
            and is_tenant(entry.tenant) and isinstance(entry.admin, bool) and isinstance(entry.note, str)
            and isinstance(entry.expires, int | float | None) and isinstance(entry.created, int | float)
        )  # fmt: skip
    except (ValueError, TypeError, RecursionError):
        return None
    return entry if good else None


def format_keys(entries: Iterable[KeyEntry]) -> bytes:
    """The inverse of `parse_keys`."""
    return b"".join(json.dumps(asdict(entry)).encode() + b"\n" for entry in entries)


class KeyFile:
    """The keys of a file, which may be replaced while we run. One event loop's."""

    def __init__(
        self,
        path: str,
        *,
        now: Callable[[], float] = time.time,
        on_change: Changed = lambda added, removed: None,
    ) -> None:
        """on_change: told the ids that came and went with a change of the file. Raises ConfigError."""
        self._now, self._told = now, on_change
        self._file = WatchedFile(SETTING, path, parse_keys, private=True, on_change=self._changed)

    def caller(self, key: str) -> Caller:
        """Who has this key. Raises Refused."""
        match = _KEY.fullmatch(key)
        if match is None:
            raise refuse(Reason.MALFORMED)
        key_id, secret = match.groups()
        entry = self._file.current().get(key_id, _NOBODY)
        if not entry.fits(secret):
            raise refuse(Reason.UNKNOWN_KEY if entry is _NOBODY else Reason.WRONG_SECRET)
        if entry.expired(self._now()):
            raise refuse(Reason.EXPIRED)
        return Caller(tenant=entry.tenant, key_id=entry.id, admin=entry.admin)

    def _changed(self, old: Mapping[str, KeyEntry], new: Mapping[str, KeyEntry]) -> None:
        self._told(frozenset(new) - frozenset(old), frozenset(old) - frozenset(new))
