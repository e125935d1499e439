"""SHA-256 of model files: the digest that names a weights revision, and the check against a lock file.

What lives here: hashing and `SHA256SUMS`. What does not: reading models.

A model directory (or the folder of a GGUF file) may hold `SHA256SUMS`, as `sha256sum * > SHA256SUMS`
writes it. Where it lists a file that is loaded, the file must match: that finds any changed bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pdserve.errors import ModelError

LOCK_NAME = "SHA256SUMS"
MAX_LOCK_BYTES = 1 << 20
_HEX = frozenset("0123456789abcdef")


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hex. Raises ModelError if it can not be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError("A file of the model can not be read; check its permissions.") from error


def read_lock(directory: Path) -> dict[str, str]:
    """Digest by file name from the directory's SHA256SUMS, or nothing. Raises ModelError if malformed."""
    path = directory / LOCK_NAME
    if not path.is_file():
        return {}
    if path.stat().st_size > MAX_LOCK_BYTES:
        raise ModelError(f"{LOCK_NAME} is larger than {MAX_LOCK_BYTES >> 20} MiB.")
    lock: dict[str, str] = {}
    for line in path.read_bytes().decode("utf-8", "replace").splitlines():
        digest, _, name = line.partition(" ")
        if len(digest) != 64 or not set(digest) <= _HEX or not name[1:]:
            raise ModelError(f"{LOCK_NAME} must have lines of a SHA-256 in hex and a file name.")
        lock[name[1:].removeprefix("./")] = digest
    return lock


def verified_digest(files: Iterable[Path], lock: dict[str, str]) -> str:
    """One SHA-256 over the files' SHA-256s, in order of name (names do not count).

    Raises ModelError if a file differs from what the lock says of it.
    """
    ordered = sorted(files, key=lambda p: p.name)
    with ThreadPoolExecutor(max_workers=2) as pool:
        digests = list(pool.map(file_sha256, ordered))
    whole = hashlib.sha256()
    for path, digest in zip(ordered, digests, strict=True):
        if lock.get(path.name, digest) != digest:
            raise ModelError(
                f"{path.name} is damaged or another revision: its SHA-256 is not the one in the lock."
            )
        whole.update(bytes.fromhex(digest))
    return whole.hexdigest()
