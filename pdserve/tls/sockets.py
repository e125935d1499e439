"""A TLS socket that behaves like a plain non-blocking one, and its handshake with a limit.

What lives here: what frames over a stream need, `recv_into` and `sendmsg`, with the plain socket's
exceptions. What does not: certificates (`contexts`), frames, and waiting for sockets.
"""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdserve.tls.source import TlsSource

RECORD_BYTES = 16384
"""What one TLS record holds."""
_WANT = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Untrusted(Exception):
    """One end did not take the other's certificate, or does not speak TLS 1.3."""


class SecureSocket(ssl.SSLSocket):
    """Made by our contexts. Bytes are decrypted into the caller's buffer; nothing is held in between but
    OpenSSL's own record."""

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Fills the buffer as far as what has come reaches; 0 at the end of the stream.

        Raises BlockingIOError if nothing has come, Untrusted, ConnectionError.
        """
        view = memoryview(buffer)[: nbytes or None]
        at, size = 0, len(view)
        try:
            while at < size and (count := super().recv_into(view[at:])):  # a record at most per call
                at += count
        except _WANT:
            if not at:
                raise BlockingIOError from None
        except ssl.SSLError as error:
            raise _meaning(error) from None
        return at

    def recvmsg_into(self, buffers: Iterable[Any], *unused: Any) -> tuple[int, list[Any], int, None]:  # type: ignore[override]
        """Fills the first buffer alone: a record is decrypted into one place. Raises as `recv_into`."""
        return self.recv_into(next(iter(buffers))), [], 0, None

    def sendmsg(self, buffers: Iterable[Any], *unused: Any) -> int:  # type: ignore[override]
        """Sends of the first buffer what the socket takes now; short ones at the front travel together.

        After BlockingIOError the next call must bring the same bytes. Raises what `recv_into` does.
        """
        view = memoryview(_gather(buffers))
        at, size = 0, len(view)
        try:
            while at < size:
                at += super().send(view[at:])  # a record at most per call
        except _WANT:
            if not at:
                raise BlockingIOError from None
        except ssl.SSLError as error:
            raise _meaning(error) from None
        return at


def _gather(buffers: Iterable[Any]) -> Any:
    """The first buffer as it is if it fills a record, else what makes one record of the first few."""
    parts: list[memoryview] = []
    room = RECORD_BYTES
    for part in buffers:
        if not parts and len(part) >= RECORD_BYTES:
            return part
        parts.append(memoryview(part)[:room])
        room -= len(parts[-1])
        if not room:
            break
    return b"".join(parts)


Wait = Callable[[socket.socket, int], bool]
"""(socket, poll events) -> whether to go on; called whenever the peer has to act; raises when time is up."""


def secure_dialled(sock: socket.socket, tls: TlsSource, host: str, wait: Wait) -> socket.socket:
    """Turns a connected, non-blocking socket into a TLS one to `host`; `sock` is used up, whatever happens.

    Raises Untrusted, OSError, and what `wait` raises.
    """
    return _shake_hands(tls.current().client, sock, wait, tls.name_of(host))


def secure_accepted(sock: socket.socket, tls: TlsSource, wait: Wait) -> socket.socket:
    """The same for a socket that was accepted."""
    return _shake_hands(tls.current().server, sock, wait, "")


def _shake_hands(context: ssl.SSLContext, sock: socket.socket, wait: Wait, name: str) -> socket.socket:
    try:
        secure = context.wrap_socket(
            sock, server_side=not name, do_handshake_on_connect=False, server_hostname=name or None
        )
    except BaseException:
        sock.close()
        raise
    try:
        while True:
            try:
                secure.do_handshake()
                return secure
            except _WANT as want:
                mask = select.POLLIN if isinstance(want, ssl.SSLWantReadError) else select.POLLOUT
            if not wait(secure, mask):
                raise ConnectionAbortedError
    except ssl.SSLError as error:
        secure.close()
        raise _meaning(error) from None
    except BaseException:
        secure.close()
        raise


def _meaning(error: ssl.SSLError) -> Exception:
    """A lost connection, or a peer that does not trust us or is not trusted."""
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError):
        return ConnectionResetError("the peer closed")
    return Untrusted(error.reason or "TLS failed")
