"""The pool's memory: the owner's view, a peer's read-only view, and descriptors that lie."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator

import pytest
import torch

from pdserve.errors import Incompatible
from pdserve.kvcache.layout import PageLayout
from pdserve.kvcache.pool import KVPool, RemotePool

LAYOUT = PageLayout(num_layers=2, num_kv_heads=3, head_dim=8, page_size=16, dtype="bfloat16", inner="rows")
POOL_ID = 0xF00D_F00D_F00D_F00D


@pytest.fixture
def pool() -> Iterator[KVPool]:
    pool = KVPool.create(LAYOUT, 6, POOL_ID)
    yield pool
    pool.close()


def _map(fd: int, fingerprint: str = LAYOUT.fingerprint(), pool_id: int = POOL_ID) -> RemotePool:
    return RemotePool.map(fd, fingerprint, pool_id)


def test_a_fresh_pool_is_zero_and_takes_no_memory(pool: KVPool) -> None:
    assert os.fstat(pool.fd).st_blocks * 512 < 2**21 + 2 * 4096  # the header, perhaps one huge page
    assert not pool.storage.any()
    assert [pool.generation(page) for page in range(6)] == [0] * 6


def test_prefault_backs_every_page_and_keeps_its_content(pool: KVPool) -> None:
    pool.storage[5 * pool.page_stride] = 3
    pool.prefault()
    assert os.fstat(pool.fd).st_blocks * 512 >= 6 * LAYOUT.stride_bytes
    assert pool.storage[5 * pool.page_stride] == 3


def test_storage_and_page_views_are_the_same_bytes(pool: KVPool) -> None:
    pool.storage[pool.page_stride * 2 : pool.page_stride * 2 + LAYOUT.page_elems] = 1.5
    values = torch.frombuffer(bytearray(pool.page_view(2)), dtype=torch.bfloat16)
    assert (values == 1.5).all()
    assert len(values) == LAYOUT.page_elems
    assert pool.storage.data_ptr() % 4096 == 0
    pool.copy_page(2, 4)
    assert bytes(pool.page_view(4)) == bytes(pool.page_view(2))
    pool.zero(2)
    assert not any(pool.page_view(2))
    assert any(pool.page_view(4))


def test_a_peer_sees_bytes_and_generations_but_can_not_write(pool: KVPool) -> None:
    remote = _map(pool.fd)
    pool.page_view(3)[:4] = b"abcd"
    pool.set_generation(3, 2**64 - 1)
    assert bytes(remote.page_view(3)[:4]) == b"abcd"
    assert (remote.generation(3), remote.generation(2)) == (2**64 - 1, 0)
    assert len(remote.page_view(0)) == LAYOUT.page_bytes
    with pytest.raises(TypeError):
        remote.page_view(3)[0] = 1
    with pytest.raises(PermissionError):
        mmap.mmap(pool.fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.ftruncate(pool.fd, 4096)
    remote.close()


def test_a_peers_mapping_outlives_the_owner(pool: KVPool) -> None:
    pool.page_view(1)[:2] = b"ok"
    remote = _map(pool.fd)
    pool.close()
    pool.close()
    assert bytes(remote.page_view(1)[:2]) == b"ok"
    remote.close()


def test_views_survive_close(pool: KVPool) -> None:
    view, storage = pool.page_view(0), pool.storage
    pool.close()
    assert (view[0], storage[0].item()) == (0, 0.0)


@pytest.mark.parametrize("page", [-1, 6, 2**63])
def test_pages_out_of_range_are_refused(pool: KVPool, page: int) -> None:
    remote = _map(pool.fd)
    for use in (remote.page_view, remote.generation, pool.page_view, pool.zero, pool.generation):
        with pytest.raises(Incompatible):
            use(page)
    remote.close()


def test_another_layout_or_pool_is_refused(pool: KVPool) -> None:
    for fingerprint, pool_id in (
        (LAYOUT.fingerprint()[:-1] + "x", POOL_ID),
        (LAYOUT.fingerprint(), 1),
        ("", POOL_ID),
    ):
        with pytest.raises(Incompatible):
            _map(pool.fd, fingerprint, pool_id)


# Offsets of the header's fields: magic, version, pool id, pages, payload, stride, header, fingerprint.
_LIES = [(at, value) for at in range(0, 64, 8) for value in (0, 1, 2**40, 2**64 - 1)]
_LIES.remove((8, 1))  # the true version
_LIES.remove((32, 1))  # a shorter payload within the stride: see the next test


@pytest.mark.parametrize(("offset", "value"), _LIES)
def test_a_header_that_lies_is_refused(offset: int, value: int) -> None:
    with _forged(_header(), (offset, struct.pack("<Q", value))) as fd, pytest.raises(Incompatible):
        _map(fd)


def test_a_payload_length_that_lies_stays_within_the_segment() -> None:
    with _forged(_header(), (32, struct.pack("<Q", 1))) as fd:
        remote = _map(fd)
        assert len(remote.page_view(5)) == 1
        remote.close()


def _header() -> bytes:
    pool = KVPool.create(LAYOUT, 6, POOL_ID)
    try:
        return os.pread(pool.fd, os.fstat(pool.fd).st_size, 0)
    finally:
        pool.close()


class _forged:  # noqa: N801  a context manager, used like a function
    """A memfd with a pool's bytes, one of them changed, or cut to a size."""

    def __init__(self, content: bytes, patch: tuple[int, bytes] = (0, b""), size: int | None = None) -> None:
        self.fd = os.memfd_create("forged", os.MFD_ALLOW_SEALING)
        os.pwrite(self.fd, content, 0)
        os.pwrite(self.fd, patch[1], patch[0])
        if size is not None:
            os.ftruncate(self.fd, size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


@pytest.mark.parametrize("size", [0, 7, 64, 4096, 8192, 8192 + 4096, 10**6])
def test_a_segment_of_the_wrong_size_is_refused(size: int) -> None:
    with _forged(_header(), size=size) as fd, pytest.raises(Incompatible):
        _map(fd)


def test_descriptors_that_are_no_segment_are_refused() -> None:
    reader, writer = os.pipe()
    null = os.open("/dev/null", os.O_RDWR)
    try:
        for fd in (reader, null, -1, 10**6):
            with pytest.raises(Incompatible):
                _map(fd)
    finally:
        for fd in (reader, writer, null):
            os.close(fd)


def test_without_memfd_an_unlinked_private_file_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError("no memfd here")

    before = set(os.listdir("/dev/shm"))
    monkeypatch.setattr(os, "memfd_create", refuse)
    pool = KVPool.create(LAYOUT, 2, POOL_ID)
    assert set(os.listdir("/dev/shm")) == before
    assert os.fstat(pool.fd).st_mode & 0o777 == 0o600
    pool.page_view(1)[:2] = b"ok"
    remote = _map(pool.fd)
    assert bytes(remote.page_view(1)[:2]) == b"ok"
    remote.close()
    pool.close()
