"""The shm transport's door: who gets the descriptor, and that it can only be read."""

from __future__ import annotations

import mmap
import os
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.shm.reader import MappedPool, ShmPageReader, map_remote_pool
from kvtransfer.transport import PageServer, ReadStatus
from kvtransfer.wire import HEADER, Hello, Kind, pack
from pdserve.errors import ConfigError
from tests.conformance.page_host import KEY, LAYOUT, Host, content, reader_config, ticket
from tests.conformance.transport_kit import WAIT_S, Destination


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.pool.close()


@pytest.fixture(scope="module")
def server(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    with host.serving("shm", tmp_path_factory.mktemp("s") / "door") as server:
        yield server


@pytest.fixture
def destination(host: Host) -> Destination:
    return Destination(host.pool.pool_id)


def knock(server: PageServer, words: bytes) -> tuple[bytes, list[int]]:
    """What the server answers, and the descriptors that come with it."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(WAIT_S)
        sock.connect(server.endpoint())
        sock.sendall(words)
        sock.shutdown(socket.SHUT_WR)
        try:
            data, fds, _, _ = socket.recv_fds(sock, 4096, 4)
        except ConnectionError:
            return b"", []
        return data, fds


def hello(host: Host, **changes: object) -> bytes:
    values: dict[str, object] = {
        "pool_id": host.pool.pool_id,
        "layout": LAYOUT.fingerprint(),
        "key": KEY,
        "ticket": ticket(),
    }
    return Hello(**(values | changes)).pack()  # type: ignore[arg-type]


@pytest.fixture
def descriptor(host: Host, server: PageServer) -> Iterator[int]:
    _, fds = knock(server, hello(host))
    assert len(fds) == 1
    yield fds[0]
    os.close(fds[0])


def test_the_socket_lies_in_a_private_directory(server: PageServer) -> None:
    path = Path(server.endpoint())
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_ISSOCK(path.stat().st_mode)


@pytest.mark.parametrize("mode", [0o755, 0o701, 0o770])
def test_a_directory_that_others_may_enter_is_refused(host: Host, tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match="mode 0700"), host.serving("shm", tmp_path):
        pass


def test_a_link_in_place_of_the_directory_is_refused(host: Host, tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(real)
    with pytest.raises(ConfigError, match="mode 0700"), host.serving("shm", tmp_path / "link"):
        pass


def test_a_path_too_long_for_a_socket_is_refused(host: Host, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long"), host.serving("shm", tmp_path / ("d" * 120)):
        pass


def test_closing_takes_the_socket_away(host: Host, tmp_path: Path) -> None:
    with host.serving("shm", tmp_path / "d") as server:
        assert Path(server.endpoint()).exists()
    assert os.listdir(tmp_path / "d") == []


def test_the_descriptor_shows_the_pool(host: Host, descriptor: int) -> None:
    with mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ) as seen:
        assert seen.find(content(5)) > 0


def test_the_descriptor_can_not_be_written(descriptor: int) -> None:
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(descriptor, b"x", 0)
    with pytest.raises(OSError, match=r"Invalid argument|not permitted"):
        os.ftruncate(descriptor, 0)


def test_the_descriptor_can_not_be_made_writable(descriptor: int) -> None:
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(again, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.pwrite(again, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(again, 0)
    finally:
        os.close(again)


@pytest.mark.parametrize(
    "change",
    [{"ticket": b""}, {"ticket": ticket(expires=1.0)}, {"pool_id": 1}, {"layout": "x"}],
    ids=["absent", "expired", "pool", "layout"],
)
def test_a_bad_hello_gets_no_descriptor(host: Host, server: PageServer, change: dict[str, object]) -> None:
    data, fds = knock(server, hello(host, **change))
    assert fds == []
    assert data[5] == Kind.REFUSED


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_gets_no_descriptor(host: Host, server: PageServer, words: bytes) -> None:
    assert knock(server, words) == (b"", [])


def test_the_door_stays_open_after_that(host: Host, server: PageServer, destination: Destination) -> None:
    with closing(ShmPageReader(host.reader_config(server))) as reader:
        assert destination.one(reader, 0).status is ReadStatus.GOOD
    assert server.counters().get("errors", 0) == 0


def test_a_hello_that_does_not_come_is_not_awaited_for_ever(host: Host, tmp_path: Path) -> None:
    with host.serving("shm", tmp_path / "d", stall_s=0.1) as server, socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(WAIT_S)
        sock.connect(server.endpoint())
        sock.sendall(hello(host)[:30])
        assert sock.recv(1) == b""
        assert server.counters()["stalled"] == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"short",
        pack(Kind.WELCOME),
        pack(Kind.WELCOME, body=bytes(24)),
        pack(Kind.PAGE),
        b"x" * HEADER.size,
    ],
)
def test_a_source_that_breaks_the_rules_is_left(
    host: Host, destination: Destination, tmp_path: Path, answer: bytes
) -> None:
    path = str(tmp_path / "rogue.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        thread = threading.Thread(target=_answer_one, args=(listener, answer))
        thread.start()
        config = reader_config(endpoint=path, pool_id=host.pool.pool_id)
        with closing(ShmPageReader(config)) as reader:
            assert destination.one(reader, 0).status is ReadStatus.FAILED
        thread.join()
    assert destination.untouched(0)


def _answer_one(listener: socket.socket, answer: bytes) -> None:
    sock, _ = listener.accept()
    with sock:
        sock.recv(4096)
        sock.sendall(answer)


def test_a_silent_source_is_given_up(host: Host, destination: Destination, tmp_path: Path) -> None:
    path = str(tmp_path / "silent.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        config = reader_config(endpoint=path, pool_id=host.pool.pool_id, stall_s=0.1)
        with closing(ShmPageReader(config)) as reader:
            destination.read(reader, 0)
            destination.read(reader, 1)
            assert {done.detail for done in destination.wait(2)} == {"stalled"}


class Watched:
    """A mapped pool that calls back when a page is about to be copied."""

    def __init__(self, inner: MappedPool) -> None:
        self._inner = inner
        self.num_pages = inner.num_pages
        self.generation_address, self.close = inner.generation_address, inner.close
        self.before_copy = lambda page: None

    def page_address(self, page: int) -> int:
        self.before_copy(page)
        return self._inner.page_address(page)


def watching(host: Host, server: PageServer) -> tuple[ShmPageReader, list[Watched]]:
    """A reader and, once it has mapped the pool, what it mapped."""
    mapped: list[Watched] = []

    def map_pool(fd: int, layout: str, pool_id: int) -> MappedPool:
        mapped.append(Watched(map_remote_pool(fd, layout, pool_id)))
        return mapped[-1]

    return ShmPageReader(host.reader_config(server), map_pool), mapped


def test_a_page_freed_during_its_copy_is_stale(
    host: Host, server: PageServer, destination: Destination
) -> None:
    reader, mapped = watching(host, server)
    with closing(reader):
        assert destination.one(reader, 0).status is ReadStatus.GOOD
        mapped[0].before_copy = host.renew
        assert destination.one(reader, 1).status is ReadStatus.STALE


def test_cancel_drops_what_has_not_begun_and_lets_a_copy_end(
    host: Host, server: PageServer, destination: Destination
) -> None:
    entered, go = threading.Event(), threading.Event()
    reader, mapped = watching(host, server)
    with closing(reader):
        assert destination.one(reader, 2).status is ReadStatus.GOOD
        mapped[0].before_copy = lambda page: (entered.set(), go.wait(WAIT_S))
        destination.read(reader, 3)
        assert entered.wait(WAIT_S)
        for slot in (4, 5):
            destination.read(reader, slot)
        reader.cancel(3)
        reader.cancel(4)
        assert [(done.read_id, done.detail) for done in destination.wait(2)[1:]] == [(4, "cancelled")]
        go.set()
        destination.wait(4)
    destination.check_good([2, 3, 5])
    assert destination.untouched(4)


def test_a_source_that_closes_its_server_is_left(host: Host, tmp_path: Path) -> None:
    destination = Destination(host.pool.pool_id)
    with host.serving("shm", tmp_path / "d") as server:
        reader = ShmPageReader(host.reader_config(server))
        assert destination.one(reader, 7).status is ReadStatus.GOOD
    with closing(reader):
        assert destination.one(reader, 8).detail == "peer lost"
    with (
        host.serving("shm", tmp_path / "d") as server,
        closing(ShmPageReader(host.reader_config(server))) as reader,
    ):
        assert destination.one(reader, 9).status is ReadStatus.GOOD


def test_a_mapping_that_fails_unexpectedly_ends_the_read(
    host: Host, server: PageServer, destination: Destination, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(fd: int, layout: str, pool_id: int) -> MappedPool:
        raise RuntimeError("nobody thought of this")

    with closing(ShmPageReader(host.reader_config(server), broken)) as reader:
        assert destination.one(reader, 0).detail == "internal error"
        assert destination.one(reader, 1).detail == "internal error"
    assert "a page read failed" in caplog.text


def test_the_door_opens_one_byte_at_a_time(
    host: Host, server: PageServer, destination: Destination, tmp_path: Path
) -> None:
    path = str(tmp_path / "slow.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        thread = threading.Thread(target=_pass_slowly, args=(listener, server.endpoint()))
        thread.start()
        with closing(ShmPageReader(host.reader_config(server, endpoint=path))) as reader:
            assert destination.one(reader, 44).status is ReadStatus.GOOD
        thread.join()
    destination.check_good([44])


def _pass_slowly(listener: socket.socket, endpoint: str) -> None:
    """Between a reader and its source, byte by byte; the descriptor goes with the last byte."""
    near, _ = listener.accept()
    with near, socket.socket(socket.AF_UNIX) as far:
        far.connect(endpoint)
        for byte in near.recv(65536):
            far.sendall(bytes([byte]))
        answer, fds, _, _ = socket.recv_fds(far, 4096, 4)
        for byte in answer[:-1]:
            near.sendall(bytes([byte]))
        socket.send_fds(near, [answer[-1:]], fds)
        for fd in fds:
            os.close(fd)
        near.recv(1)  # the reader has left
