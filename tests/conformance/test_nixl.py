"""What the nixl transport promises beyond the suite: quiet memory, checked regions, no network of its own."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.nixl_raw import raw_reads
from kvtransfer.hello import introduce
from kvtransfer.nixl import agent as nixl_agent
from kvtransfer.nixl.frames import HOST_MEMORY, Region, endpoint, fingerprint
from kvtransfer.transport import PageReader, ReadStatus, transport
from kvtransfer.wire import HEADER, Kind, Welcome, WireError, pack
from pdserve.cli.platforms import require_transport
from pdserve.errors import ConfigError
from tests.conformance.page_host import (
    LAYOUT,
    NUM_PAGES,
    PAGE_BYTES,
    Host,
    SourceProcess,
    content,
    reader_config,
)  # fmt: skip
from tests.conformance.transport_kit import WAIT_S, Destination

OURS = b"\x3c" * PAGE_BYTES


def until(true: Callable[[], bool]) -> None:
    """Waits for what another thread or process does without telling."""
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end
        os.sched_yield()


# ---- without the package -----------------------------------------------------------------------------


def test_a_missing_package_is_named_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "_PACKAGES", ("nixl_that_nobody_has",))
    nixl_agent.load.cache_clear()
    assert not nixl_agent.available()
    for ask in (transport, require_transport):
        with pytest.raises(ConfigError, match=r"pip install 'pdserve\[nixl\]'"):
            ask("nixl")
    require_transport("shm")
    nixl_agent.load.cache_clear()


@pytest.mark.parametrize(
    ("host", "transports", "devices", "words"),
    [
        ("127.0.0.1", None, None, ""),
        ("::1", "posix,sysv", None, ""),
        ("127.0.0.1", "tcp,sm", None, "without it"),
        ("127.0.0.1", "all", None, "without it"),
        ("127.0.0.1", "^ib", None, "without it"),
        ("10.0.0.1", None, None, "needs RDMA"),
        ("10.0.0.1", "rc,sm", None, "needs RDMA"),
        ("10.0.0.1", None, "mlx5_0:1", "needs RDMA"),
        ("10.0.0.1", "rc,tcp", "mlx5_0:1", "without it"),
        ("10.0.0.1", "rc,sm", "mlx5_0:1", ""),
        ("10.0.0.1", "^tcp", "mlx5_0:1", ""),
    ],
)
def test_ucx_gets_no_tcp_and_beyond_loopback_only_what_the_operator_names(
    monkeypatch: pytest.MonkeyPatch, host: str, transports: str | None, devices: str | None, words: str
) -> None:
    for name, value in (("UCX_TLS", transports), ("UCX_NET_DEVICES", devices)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    if words:
        with pytest.raises(ConfigError, match=words):
            nixl_agent.backend_options(host)
    else:
        assert nixl_agent.backend_options(host)


# ---- what a source says ------------------------------------------------------------------------------

REGION = Region(base=4096, stride_bytes=8192, num_pages=4, device=HOST_MEMORY, metadata=b"m")


def opened(region: Region, *, num_pages: int = 4, page_bytes: int = 8192) -> Region:
    body = region.pack()[HEADER.size :]
    return Region.unpack(body, published=fingerprint(body), num_pages=num_pages, page_bytes=page_bytes)


@given(
    st.builds(
        Region,
        base=st.integers(1, 2**40),
        stride_bytes=st.integers(8192, 2**20),
        num_pages=st.just(4),
        device=st.just(HOST_MEMORY),
        metadata=st.binary(min_size=1, max_size=2000),
    )
)
def test_a_region_reads_back(region: Region) -> None:
    assert opened(region) == region


@pytest.mark.parametrize(
    "change",
    [
        {"base": 0},
        {"base": 2**63},
        {"stride_bytes": 8191},
        {"stride_bytes": 2**60},
        {"num_pages": 5},
        {"device": 1},
        {"metadata": b""},
        {"metadata": bytes(70_000)},
    ],
)
def test_numbers_that_can_not_be_a_pool_are_a_violation(change: dict[str, object]) -> None:
    with pytest.raises(WireError):
        opened(replace(REGION, **change))  # type: ignore[arg-type]


def test_a_region_that_was_not_published_never_reaches_nixl() -> None:
    """Its metadata would: with damaged ones NIXL ends the process."""
    pool_id = secrets.randbits(64)
    told = replace(REGION, num_pages=NUM_PAGES, stride_bytes=LAYOUT.stride_bytes, metadata=os.urandom(400))
    welcome = Welcome(pool_id=pool_id, num_pages=NUM_PAGES, page_bytes=PAGE_BYTES).pack()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = endpoint("{}:{}".format(*listener.getsockname()), replace(told, metadata=b"other").pack())
        destination = Destination(pool_id)
        with closing(transport("nixl").reader(reader_config(endpoint=there, pool_id=pool_id))) as reader:
            destination.read(reader, 0)
            liar, _ = listener.accept()
            with liar:
                liar.recv(65536)
                liar.sendall(welcome + told.pack())
                assert destination.wait(1)[0].detail == "protocol violation"
    assert destination.untouched(0)


@pytest.mark.parametrize("page", [NUM_PAGES, 2**64 - 1])
def test_a_question_about_no_page_ends_the_connection(host: Host, tmp_path: Path, page: int) -> None:
    with host.serving("nixl", tmp_path / "s") as server:
        config = host.reader_config(server)
        request = Destination(host.pool.pool_id).request(0)
        address = server.endpoint().partition("#")[0].rpartition(":")
        with socket.create_connection((address[0], int(address[2]))) as sock:
            sock.sendall(introduce(config, request) + pack(Kind.ASK, body=page.to_bytes(8, "big")))
            while sock.recv(65536):
                pass
        assert server.counters()["violations"] == 1


# ---- pages -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.pool.close()


def test_pages_queued_together_travel_together(host: Host, tmp_path: Path) -> None:
    destination = Destination(host.pool.pool_id)
    with (
        host.serving("nixl", tmp_path / "s") as server,
        closing(transport("nixl").reader(host.reader_config(server))) as reader,
    ):
        with destination.changed:  # the end of the first read waits here, and its thread with it
            for slot in range(NUM_PAGES):
                destination.read(reader, slot)
        destination.wait(NUM_PAGES)
        destination.check_good(range(NUM_PAGES))
        assert reader.counters()["transfers"] < NUM_PAGES / 4


def test_targets_in_a_region_that_was_registered_once(host: Host, tmp_path: Path) -> None:
    pool = Host()
    config = {"local": pool.pool.pages_view()}
    inside, outside = Destination(host.pool.pool_id), Destination(host.pool.pool_id)
    with (
        host.serving("nixl", tmp_path / "s") as server,
        closing(transport("nixl").reader(host.reader_config(server, **config))) as reader,
    ):
        for slot in (0, 5, NUM_PAGES - 1):
            view = pool.pool.page_view(slot)
            view[:] = bytes(PAGE_BYTES)
            assert inside.one(reader, slot, target=view).status is ReadStatus.GOOD
            assert bytes(view) == content(slot)
        assert outside.one(reader, 3).status is ReadStatus.GOOD


def test_the_pace_beside_ours_is_of_the_same_bytes(host: Host, tmp_path: Path) -> None:
    destination = Destination(host.pool.pool_id)
    targets = [destination.target(slot) for slot in range(NUM_PAGES)]
    with (
        host.serving("nixl", tmp_path / "s") as server,
        raw_reads(host.reader_config(server), destination.request(0), targets) as reads,
    ):
        reads.pull()
    assert all(bytes(target) == content(page) for page, target in enumerate(targets))
    assert destination.guards_whole()


# ---- quiet memory ------------------------------------------------------------------------------------


@pytest.fixture
def stoppable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SourceProcess]:
    """A source without the kernel's process-to-process copy: UCX then asks the source for the bytes, which a
    stopped process does not give, so that a read stays under way."""
    monkeypatch.setenv("UCX_TLS", "posix")
    process = SourceProcess("nixl", tmp_path / "s")
    yield process
    if process.pid:
        os.kill(process.pid, signal.SIGCONT)
    process.end()


def stop(process: SourceProcess) -> None:
    """Returns when every thread of the process stands still."""
    os.kill(process.pid, signal.SIGSTOP)
    threads = [thread.id for thread in psutil.Process(process.pid).threads()]
    until(lambda: all(psutil.Process(thread).status() == psutil.STATUS_STOPPED for thread in threads))


def hanging(process: SourceProcess, destination: Destination, reader: PageReader) -> None:
    """Slots 0 and 1 are under way as two transfers, 2 to 5 wait behind them, and the source stands still."""
    assert destination.one(reader, 40).status is ReadStatus.GOOD
    destination.done.clear()
    before = reader.counters()["transfers"]
    stop(process)
    for slot in range(2):
        destination.read(reader, slot)
        until(lambda posted=before + slot + 1: reader.counters()["transfers"] == posted)  # type: ignore[misc]
    for slot in range(2, 6):
        destination.read(reader, slot)


def test_a_cancelled_read_of_a_stopped_source_keeps_its_target_until_it_is_quiet(
    stoppable: SourceProcess,
) -> None:
    destination = Destination(stoppable.pool_id)
    with closing(transport("nixl").reader(stoppable.reader_config())) as reader:
        hanging(stoppable, destination, reader)
        for slot in range(6):
            reader.cancel(slot)
        assert {done.read_id: done.detail for done in destination.wait(4)} == dict.fromkeys(
            range(2, 6), "cancelled"
        )
        for slot in range(2, 6):  # their pages may be used again now; those of 0 and 1 may not
            destination.target(slot)[:] = OURS
        assert len(destination.done) == 4
        os.kill(stoppable.pid, signal.SIGCONT)
        destination.wait(6)
        destination.check_good([0, 1])
        assert destination.one(reader, 7).status is ReadStatus.GOOD
    assert all(bytes(destination.target(slot)) == OURS for slot in range(2, 6))
    assert destination.guards_whole()


def test_a_page_reused_in_the_source_meanwhile_is_stale(stoppable: SourceProcess) -> None:
    """The read was posted for the old page; what comes is the new one's."""
    destination = Destination(stoppable.pool_id)
    with closing(transport("nixl").reader(stoppable.reader_config())) as reader:
        assert destination.one(reader, 40).status is ReadStatus.GOOD
        stoppable.do("renew", 0)
        stoppable.do("flip", 0, 5)
        assert destination.one(reader, 0).status is ReadStatus.STALE


def test_a_stopped_source_that_dies_writes_nothing_any_more(stoppable: SourceProcess) -> None:
    destination = Destination(stoppable.pool_id)
    with closing(transport("nixl").reader(stoppable.reader_config())) as reader:
        hanging(stoppable, destination, reader)
        stoppable.kill()
        assert {done.detail for done in destination.wait(6)} == {"peer lost"}
        for slot in range(6):
            destination.target(slot)[:] = OURS
        assert destination.one(reader, 10).detail == "peer lost"
    assert all(bytes(destination.target(slot)) == OURS for slot in range(6))


def test_close_makes_the_targets_quiet_and_leaves_the_source_whole(stoppable: SourceProcess) -> None:
    destination, other = Destination(stoppable.pool_id), Destination(stoppable.pool_id)
    reader = transport("nixl").reader(stoppable.reader_config(stall_s=0.3))
    hanging(stoppable, destination, reader)
    reader.close()
    assert {done.detail for done in destination.wait(6)} == {"closed"}
    for slot in range(6):
        destination.target(slot)[:] = OURS
    os.kill(stoppable.pid, signal.SIGCONT)
    with closing(transport("nixl").reader(stoppable.reader_config())) as reader:
        for slot in range(NUM_PAGES):
            other.read(reader, slot)
        other.wait(NUM_PAGES)
        other.check_good(range(NUM_PAGES))
    assert all(bytes(destination.target(slot)) == OURS for slot in range(6))


# ---- sockets -----------------------------------------------------------------------------------------


def test_ucx_opens_no_network_on_loopback(tmp_path: Path) -> None:
    process = SourceProcess("nixl", tmp_path / "s")
    before = set(psutil.Process().net_connections("inet"))
    with closing(transport("nixl").reader(process.reader_config())) as reader:
        assert Destination(process.pool_id).one(reader, 0).status is ReadStatus.GOOD
        new = [c for c in psutil.Process().net_connections("inet") if c not in before]
        host, _, port = process.endpoint.partition("#")[0].rpartition(":")
        assert [(c.raddr, c.status) for c in new] == [((host, int(port)), psutil.CONN_ESTABLISHED)]
        listening = [
            c.laddr for c in psutil.Process(process.pid).net_connections("inet") if c.status == "LISTEN"
        ]
        assert listening == [(host, int(port))] == [("127.0.0.1", int(port))]
    process.end()
