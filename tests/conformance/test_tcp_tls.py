"""tcp with mutual TLS under peers that are not trusted, silent, or of another version; and reloading."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvtransfer.transport import PageReader, PageServer, ReadStatus, transport
from kvtransfer.wire import HEADER
from pdserve.tls import TlsSource
from pdserve.tls.files import FIXED_NAME
from tests.conformance.page_host import NUM_PAGES, Host, content, suite_certs
from tests.conformance.tcp_kit import (
    FRAME_BYTES,
    WELCOME_BYTES,
    dial,
    hello,
    is_closed,
    take,
    wait_count,
    wish,
)
from tests.conformance.transport_kit import WAIT_S, Destination, cut_after, proxy, slices
from tests.support.certs import Certs


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.pool.close()


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    """The suite's, and some that must not be taken."""
    certs = Certs(tmp_path_factory.mktemp("certs"))
    certs.issue("foreign", foreign=True)
    certs.issue("expired", days=-1)
    certs.issue("elsewhere", hosts=("192.0.2.1",))
    return certs


@pytest.fixture
def server(host: Host, certs: Certs, tmp_path: Path) -> Iterator[PageServer]:
    with host.serving("tcp", tmp_path, tls=certs.source(), stall_s=WAIT_S) as server:
        yield server


@pytest.fixture
def destination(host: Host) -> Destination:
    return Destination(host.pool.pool_id)


def reader(host: Host, server: PageServer, tls: TlsSource | None, **changes: object) -> PageReader:
    return transport("tcp").reader(host.reader_config(server, tls=tls, **changes))


def check_alive(host: Host, server: PageServer, certs: Certs) -> None:
    """Who is trusted is served as ever."""
    with closing(reader(host, server, certs.source("client"))) as good:
        assert Destination(host.pool.pool_id).one(good, 3).status is ReadStatus.GOOD


def context(certs: Certs, name: str, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
    """A client without scruples: it takes any server, and shows the named certificate, or none."""
    found = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    found.check_hostname, found.verify_mode = False, ssl.CERT_NONE
    found.maximum_version = version
    if name:
        files = certs.files(name)
        found.load_cert_chain(files.cert, files.key)
    return found


def unanswered(sock: socket.socket, said: bytes) -> bool:
    """Whether the connection ends without a byte, by an alert or a close."""
    try:
        sock.sendall(said)
        return take(sock, 1) == b""
    except OSError:
        return True


# ---- whom the source serves --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "foreign", "expired"])
def test_a_reader_without_a_good_certificate_gets_no_byte(
    host: Host, server: PageServer, certs: Certs, name: str
) -> None:
    with dial(server) as raw, context(certs, name).wrap_socket(raw) as sock:
        assert unanswered(sock, hello(host))
    wait_count(server, "untrusted", 1)
    check_alive(host, server, certs)


def test_tls_1_2_is_not_spoken(host: Host, server: PageServer, certs: Certs) -> None:
    old = context(certs, "client", ssl.TLSVersion.TLSv1_2)
    with dial(server) as raw, pytest.raises((ssl.SSLError, ConnectionError)):
        old.wrap_socket(raw)
    wait_count(server, "untrusted", 1)
    check_alive(host, server, certs)


def test_a_plain_reader_gets_nothing_from_a_secure_source(
    host: Host, server: PageServer, certs: Certs, destination: Destination
) -> None:
    with closing(reader(host, server, None)) as plain:
        assert destination.one(plain, 0).status is ReadStatus.FAILED
    with dial(server) as raw:
        raw.sendall(hello(host) + wish(1, 1))
        assert is_closed(raw)
    assert destination.untouched(0)
    wait_count(server, "untrusted", 2)
    check_alive(host, server, certs)


def test_a_certificate_alone_opens_no_page(host: Host, server: PageServer, certs: Certs) -> None:
    destination = Destination(host.pool.pool_id)
    with closing(reader(host, server, certs.source("client"))) as good:
        assert destination.one(good, 0, ticket=b"made up").detail == "bad ticket"
    assert destination.untouched(0)


# ---- whom the reader takes for its source ------------------------------------------------------------


def test_a_secure_reader_takes_nothing_from_a_plain_source(
    host: Host, certs: Certs, tmp_path: Path, destination: Destination
) -> None:
    with host.serving("tcp", tmp_path) as plain, closing(reader(host, plain, certs.source())) as secure:
        assert destination.one(secure, 0).status is ReadStatus.FAILED
    assert destination.untouched(0)


@pytest.mark.parametrize(
    ("name", "server_name", "good"),
    [
        ("node", "", True),
        ("node", FIXED_NAME, True),
        ("node", "another.name", False),
        ("elsewhere", "", False),
        ("elsewhere", FIXED_NAME, True),
        ("foreign", "", False),
        ("expired", "", False),
        ("client", "", False),
    ],
)
def test_a_source_must_show_a_certificate_for_the_host_dialled(
    host: Host, certs: Certs, destination: Destination, name: str, server_name: str, good: bool
) -> None:
    tls = certs.source(tls_server_name=server_name)
    with impostor(certs, name) as (endpoint, shaken):
        config = host.reader_config(_Nowhere(endpoint), tls=tls)
        with closing(transport("tcp").reader(config)) as careful:
            detail = destination.one(careful, 0).detail
    assert (detail != "not trusted") == good
    assert shaken.is_set() == good


class _Nowhere:
    """An endpoint in place of a server."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = lambda: endpoint


@contextmanager
def impostor(certs: Certs, name: str) -> Iterator[tuple[str, threading.Event]]:
    """A server with any certificate; it says whether the handshake came to an end, and leaves."""
    found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    files = certs.files(name)
    found.load_cert_chain(files.cert, files.key)
    shaken = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            raw, _ = listener.accept()
            with contextlib.suppress(OSError), found.wrap_socket(raw, server_side=True) as sock:
                if sock.recv(1):
                    shaken.set()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield "{}:{}".format(*listener.getsockname()), shaken
        thread.join()


# ---- peers that take their time ----------------------------------------------------------------------


def test_silent_peers_delay_nobody_and_are_given_up(host: Host, certs: Certs, tmp_path: Path) -> None:
    with (
        host.serving("tcp", tmp_path, tls=certs.source(), stall_s=1.0) as server,
        contextlib.ExitStack() as stack,
    ):
        silent = [stack.enter_context(dial(server)) for _ in range(20)]
        for number, sock in enumerate(silent):
            sock.sendall(b"\x16\x03\x01\x02\x00\x01"[: number % 7])
        wait_count(server, "accepted", 20)
        check_alive(host, server, certs)  # while they hold their connections
        assert server.counters().get("stalled", 0) == 0
        for sock in silent:
            assert is_closed(sock)
        wait_count(server, "stalled", 20)


def test_silent_peers_in_all_places_keep_nobody_out(host: Host, certs: Certs, tmp_path: Path) -> None:
    destination = Destination(host.pool.pool_id)
    config = {"tls": certs.source(), "stall_s": 600.0, "max_connections": 4}
    with (
        host.serving("tcp", tmp_path, **config) as server,
        closing(reader(host, server, certs.source("client"))) as early,
        contextlib.ExitStack() as stack,
    ):
        assert destination.one(early, 0).status is ReadStatus.GOOD
        for _ in range(12):
            stack.enter_context(dial(server))
        wait_count(server, "displaced", 9)
        check_alive(host, server, certs)
        assert destination.one(early, 1).status is ReadStatus.GOOD
        assert early.counters()["connections"] == 1  # it has proved itself: it is never displaced


def test_a_handshake_in_drops_ends_at_its_limit(host: Host, certs: Certs, tmp_path: Path) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context(certs, "client").wrap_bio(incoming, outgoing).do_handshake()
    greeting = outgoing.read()
    with host.serving("tcp", tmp_path, tls=certs.source(), stall_s=0.5) as server, dial(server) as sock:
        sock.settimeout(0.02)  # between two bytes: the whole greeting would take longer than the limit
        with contextlib.suppress(ConnectionError):
            for at in range(len(greeting) - 1):
                sock.sendall(greeting[at : at + 1])
                with contextlib.suppress(TimeoutError):
                    if not sock.recv(1):
                        break
        wait_count(server, "stalled", 1)


def test_a_silent_source_is_given_up(host: Host, certs: Certs, destination: Destination) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = "{}:{}".format(*listener.getsockname())
        config = host.reader_config(_Nowhere(endpoint), tls=certs.source(), stall_s=0.2)
        with closing(transport("tcp").reader(config)) as waiting:
            assert destination.one(waiting, 0).detail == "stalled"


@pytest.mark.parametrize("end", ["server", "reader"])
def test_closing_in_mid_handshake_waits_for_nobody(
    host: Host, certs: Certs, tmp_path: Path, destination: Destination, end: str
) -> None:
    if end == "server":
        with host.serving("tcp", tmp_path, tls=certs.source(), stall_s=600.0) as server, dial(server) as sock:
            wait_count(server, "accepted", 1)
            server.close()
            assert is_closed(sock)
        return
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = host.reader_config(
            _Nowhere("{}:{}".format(*listener.getsockname())), tls=certs.source(), stall_s=600.0
        )
        with closing(transport("tcp").reader(config)) as waiting:
            destination.read(waiting, 0)
            near, _ = listener.accept()
            with near:
                assert near.recv(1)  # the handshake has begun
                waiting.close()
        assert destination.wait(1)[0].detail == "closed"


# ---- records that do not fit -------------------------------------------------------------------------


FEW = 8


def test_a_reader_that_takes_little_at_a_time_gets_every_byte(
    host: Host, server: PageServer, certs: Certs
) -> None:
    with dial(server) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with context(certs, "client").wrap_socket(raw) as sock:
            sock.sendall(hello(host) + b"".join(wish(page, page) for page in range(FEW)))
            assert len(take(sock, WELCOME_BYTES)) == WELCOME_BYTES
            for page in range(FEW):
                assert take(sock, FRAME_BYTES)[HEADER.size :] == content(page)


def test_pages_come_whole_one_byte_at_a_time(
    host: Host, server: PageServer, certs: Certs, destination: Destination
) -> None:
    with proxy(server.endpoint(), slices) as endpoint:
        config = host.reader_config(_Nowhere(endpoint), tls=certs.source())
        with closing(transport("tcp").reader(config)) as far:
            for slot in range(2):
                destination.read(far, slot)
            destination.wait(2)
    destination.check_good(range(2))
    assert destination.guards_whole()


@pytest.mark.parametrize("limit", [0, 1, 1000, 2000, 2000 + FRAME_BYTES // 2])
def test_a_connection_cut_anywhere_fails_what_did_not_arrive(
    host: Host, server: PageServer, certs: Certs, destination: Destination, limit: int
) -> None:
    with proxy(server.endpoint(), cut_after(limit)) as endpoint:
        config = host.reader_config(_Nowhere(endpoint), tls=certs.source())
        with closing(transport("tcp").reader(config)) as far:
            for slot in range(4):
                destination.read(far, slot)
            ends = destination.wait(4)
    assert {done.status for done in ends[1:]} == {ReadStatus.FAILED}
    assert {done.detail for done in ends if done.status is ReadStatus.FAILED} == {"peer lost"}
    assert destination.guards_whole()
    assert host.wait_pins(0)


@pytest.mark.parametrize("at", [-1, -20])
def test_a_byte_changed_on_the_way_places_no_page(
    host: Host, server: PageServer, certs: Certs, destination: Destination, at: int
) -> None:
    def bend(to: socket.socket, data: bytes, before: int) -> bool:
        if before + len(data) > 4000:
            data = data[:at] + bytes([data[at] ^ 1]) + data[at:][1:]
        to.sendall(data)
        return True

    with proxy(server.endpoint(), bend) as endpoint:
        config = host.reader_config(_Nowhere(endpoint), tls=certs.source())
        with closing(transport("tcp").reader(config)) as far:
            for slot in range(NUM_PAGES):
                destination.read(far, slot)
            ends = destination.wait(NUM_PAGES)
    assert {done.status for done in ends} <= {ReadStatus.GOOD, ReadStatus.FAILED}
    assert ends[-1].status is ReadStatus.FAILED


# ---- new certificates --------------------------------------------------------------------------------


def test_certificates_are_replaced_under_a_running_stream(host: Host, tmp_path: Path) -> None:
    certs = Certs(tmp_path / "certs")
    destination, more = Destination(host.pool.pool_id), Destination(host.pool.pool_id)
    with host.serving("tcp", tmp_path / "s", tls=certs.source()) as server:
        with closing(reader(host, server, certs.source("client"))) as running:
            assert destination.one(running, 0).status is ReadStatus.GOOD
            before = serial(server, certs)
            certs.rotate()
            assert serial(server, certs) != before  # a new connection gets the new one
            for slot in range(1, NUM_PAGES):
                destination.read(running, slot)
            destination.wait(NUM_PAGES)
            assert running.counters()["connections"] == 1
        destination.check_good(range(NUM_PAGES))
        with closing(reader(host, server, certs.source("client"))) as later:
            assert more.one(later, 0).status is ReadStatus.GOOD
        assert server.counters().get("untrusted", 0) == 0


def test_an_authority_that_is_no_longer_trusted_is_refused(host: Host, tmp_path: Path) -> None:
    certs, others = Certs(tmp_path / "certs"), Certs(tmp_path / "others")
    destination = Destination(host.pool.pool_id)
    with host.serving("tcp", tmp_path / "s", tls=certs.source(), idle_s=WAIT_S) as server:
        tls = certs.source("client")
        old = context(certs, "client")
        for name in ("ca.crt", "node.crt", "node.key"):
            (certs.directory / name).write_bytes((others.directory / name).read_bytes())
        with dial(server) as raw, old.wrap_socket(raw) as sock:
            assert unanswered(sock, hello(host))
        wait_count(server, "untrusted", 1)
        with closing(reader(host, server, tls)) as left_behind:
            assert destination.one(left_behind, 0).detail == "not trusted"
        with closing(reader(host, server, others.source("client"))) as new:
            assert destination.one(new, 1).status is ReadStatus.GOOD


def serial(server: PageServer, certs: Certs) -> str:
    """Of the certificate that a new connection is shown."""
    identity = certs.source("client").current()
    with dial(server) as raw, identity.client.wrap_socket(raw, server_hostname="127.0.0.1") as sock:
        return str((sock.getpeercert() or {})["serialNumber"])


def test_the_suite_shares_one_authority() -> None:
    assert suite_certs() is suite_certs()
