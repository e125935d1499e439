"""`pdserve keys`: adds, lists and revokes API keys in a file that running routers read anew."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdserve.cli.options import AsJson
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from router.auth.keys import KeyEntry

KeyFileOption = Annotated[
    Path,
    typer.Option(
        "--file", metavar="FILE", envvar="PDSERVE_API_KEY_FILE", help="The key file.", dir_okay=False
    ),
]
_LIFE = re.compile(r"(\d{1,6})([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}

keys_app = typer.Typer(help="API keys of clients, in a file.", no_args_is_help=True)


@keys_app.command()
def add(
    file: KeyFileOption,
    tenant: Annotated[str, typer.Option(help="Whose requests and prefixes its callers share.")],
    admin: Annotated[bool, typer.Option("--admin", help="It may change the fleet.")] = False,
    expires: Annotated[
        str, typer.Option(metavar="TIME", help="How long it is valid, as 12h, 30d or 8w. [default: for ever]")
    ] = "",
    note: Annotated[str, typer.Option(help="For whom or what it is.")] = "",
    as_json: AsJson = False,
) -> None:
    """Make a key and print it, this once: the file holds a hash. The file is made if need be."""
    from router.auth.keys import make_key

    key, entry = make_key(tenant, admin=admin, note=note[:256], lives_s=_lifetime(expires), now=time.time())
    with _locked(file):
        _write(file, [*_read(file), entry])
    if as_json:
        print(json.dumps({"key": key, **_shown(entry)}))
        return
    print(key)
    told = f"key {entry.id} of {tenant}; it is not shown again, and routers take it from now on"
    print(told, file=sys.stderr)


@keys_app.command("list")
def list_keys(file: KeyFileOption, as_json: AsJson = False) -> None:
    """Show the keys without their secrets."""
    entries = [_shown(entry) for entry in _read(file, must_exist=True)]
    if as_json:
        print(json.dumps(entries, indent=2))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("id", "tenant", "admin", "created", "expires", "note", box=None)
    for entry in entries:
        admin = "admin" if entry["admin"] else ""
        cells = (entry["id"], entry["tenant"], admin, entry["created"], entry["expires"], entry["note"])
        table.add_row(*(Text(str(cell or "")) for cell in cells))
    Console().print(table)


@keys_app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="As pdserve keys list shows it.")],
    file: KeyFileOption,
) -> None:
    """Take a key out of the file; routers refuse it from their next look at the file on, at once."""
    with _locked(file):
        entries = _read(file, must_exist=True)
        left = [entry for entry in entries if entry.id != key_id]
        if len(left) == len(entries):
            raise ConfigError("id: the file has no such key; see pdserve keys list")
        _write(file, left)
    print(f"key {key_id} is revoked")


def _lifetime(text: str) -> float | None:
    if not text:
        return None
    match = _LIFE.fullmatch(text)
    if match is None or not int(match[1]):
        raise ConfigError("expires: must be a number and one of s, m, h, d, w, such as 30d")
    return float(int(match[1]) * _SECONDS[match[2]])


def _shown(entry: KeyEntry) -> dict[str, Any]:
    expires = None if entry.expires is None else _date(entry.expires)
    if entry.expired(time.time()):
        expires = f"{expires} (expired)"
    return {
        "id": entry.id, "tenant": entry.tenant, "admin": entry.admin, "created": _date(entry.created),
        "expires": expires, "note": entry.note,
    }  # fmt: skip


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def _read(file: Path, *, must_exist: bool = False) -> list[KeyEntry]:
    from router.auth.keys import SETTING, parse_keys
    from router.auth.watched import read_guarded

    if not must_exist and not file.exists():
        return []
    return list(parse_keys(read_guarded(SETTING, file, private=True)).values())


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """One change at a time: two commands at once would lose a key."""
    try:
        folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        raise ConfigError("file: its folder can not be opened") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _write(file: Path, entries: list[KeyEntry]) -> None:
    """Replaces the file in one step, private to its user, so that no router reads half of it."""
    from router.auth.keys import format_keys

    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            out.write(format_keys(entries))
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, file)
    except OSError as error:
        raise ConfigError(f"file: can not be written: {error.strerror}") from None
