"""TLS contexts from files, and a check of our own certificate before anybody dials.

What lives here: TLS 1.3 alone, certificates required both ways, and telling in a sentence what is wrong with
them. What does not: files that change (`source`), sockets under way (`sockets`).
"""

from __future__ import annotations

import contextlib
import ssl
from dataclasses import dataclass
from typing import Any

from pdserve.errors import ConfigError
from pdserve.tls.files import TlsFiles
from pdserve.tls.sockets import SecureSocket

_NOT_YET, _EXPIRED, _WRONG_PURPOSE = 9, 10, 26  # X509_V_ERR_*, as ssl reports them in verify_code
_UNKNOWN_AUTHORITY = frozenset({2, 18, 19, 20, 21})
_ROUNDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One consistent reading of the files. names: what our certificate says we are; expires: seconds since
    the epoch. The contexts are for TLS 1.3 with certificates both ways."""

    ca: bytes
    cert: bytes
    key: bytes
    server: ssl.SSLContext
    client: ssl.SSLContext
    names: tuple[str, ...]
    expires: float


def load(files: TlsFiles, *, serves: bool) -> Identity:
    """Reads and checks. serves: the certificate must do for a server too. Raises ConfigError."""
    ca, cert, key = files.read()
    server, client = (
        _context(files, ca, ssl.PROTOCOL_TLS_SERVER),
        _context(files, ca, ssl.PROTOCOL_TLS_CLIENT),
    )
    told = _check(files, ca, serves)
    names = tuple(str(value) for _, value in told.get("subjectAltName", ()))
    return Identity(
        ca=ca,
        cert=cert,
        key=key,
        server=server,
        client=client,
        names=names,
        expires=ssl.cert_time_to_seconds(str(told["notAfter"])),
    )


def _context(files: TlsFiles, ca: bytes, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.sslsocket_class = SecureSocket
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # nothing is resumed: every connection shows its certificate
    try:
        context.load_verify_locations(cadata=ca.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise ConfigError("tls_ca: holds no certificate in PEM") from None
    try:
        context.load_cert_chain(files.cert, files.key, password="-")  # noqa: S106 - never ask a terminal
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError("tls_key: does not belong to the certificate in tls_cert") from None
        raise ConfigError("tls_cert, tls_key: not a certificate and an unencrypted key in PEM") from None
    except OSError:
        raise ConfigError("tls_cert, tls_key: a file can not be read") from None
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _check(files: TlsFiles, ca: bytes, serves: bool) -> dict[str, Any]:
    """Shakes hands with ourselves in memory, in each of our roles; returns the certificate as it was seen."""
    server, client = (
        _context(files, ca, ssl.PROTOCOL_TLS_SERVER),
        _context(files, ca, ssl.PROTOCOL_TLS_CLIENT),
    )
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE  # first as a client: only the server's end looks
    told = _handshake(server, client, seen_by_server=True)
    if serves:
        client.verify_mode, server.verify_mode = ssl.CERT_REQUIRED, ssl.CERT_NONE
        told = _handshake(server, client, seen_by_server=False)
    return told


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext, *, seen_by_server: bool) -> dict[str, Any]:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(to_client, to_server)
    far = server.wrap_bio(to_server, to_client, server_side=True)
    try:
        for _ in range(_ROUNDS):
            for end in (near, far):
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
    except ssl.SSLError as error:
        raise ConfigError(_complaint(error)) from None
    return dict((far if seen_by_server else near).getpeercert() or {})


def _complaint(error: ssl.SSLError) -> str:
    code = getattr(error, "verify_code", 0)
    if code == _EXPIRED:
        return "tls_cert: the certificate or its authority has expired; issue a new one"
    if code == _NOT_YET:
        return "tls_cert: the certificate is not valid yet; is this machine's clock right?"
    if code in _UNKNOWN_AUTHORITY:
        return "tls_cert: the certificate is not signed by an authority in tls_ca"
    if code == _WRONG_PURPOSE:
        return "tls_cert: the certificate's key usage does not allow this: a node needs server and client"
    return (
        f"tls_cert: the certificate can not be used ({getattr(error, 'verify_message', '') or error.reason})"
    )
