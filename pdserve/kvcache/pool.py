"""The pool's memory: the owner's writable mapping and a peer's read-only one. Not pure: torch, mmap, files.

The only module of `kvcache` with memory in it; page states are the manager's. A pool is a memfd, or an
unlinked file of our own where the kernel refuses one, so nothing is left behind when its owner dies.

Generations and bytes: the owner stores a page's new generation before the first new byte of it is
written; a reader loads the generation, copies, and loads it again. Stores are 8 bytes, aligned, and single
machine stores. x86 keeps stores and loads in that order by itself. On ARM the order comes from the lock
that hands a page to the thread that writes it (a release and an acquire), and the reader's digest check
decides in any case.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat

import numpy as np
import torch

from pdserve.errors import Incompatible, InternalError
from pdserve.kvcache.layout import PAGE_ALIGN_BYTES, PageLayout
from pdserve.kvcache.poolheader import GENERATIONS_AT, PoolHeader

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.uint8}
_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; not named by Python 3.11
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not named by Python 3.11


class _Mapping:
    """A mapped pool: page views and the generation table over one mmap."""

    def __init__(self, mapping: mmap.mmap, header: PoolHeader) -> None:
        self._map = mapping
        self._header = header
        self._bytes = memoryview(mapping)
        self._address = np.frombuffer(self._bytes, np.uint8).ctypes.data
        self._generations = self._bytes[GENERATIONS_AT : GENERATIONS_AT + 8 * header.num_pages].cast("Q")

    @property
    def pool_id(self) -> int:
        return self._header.pool_id

    @property
    def num_pages(self) -> int:
        return self._header.num_pages

    @property
    def page_bytes(self) -> int:
        """Bytes of a page's payload."""
        return self._header.page_bytes

    def page_view(self, page: int) -> memoryview:
        """The payload bytes of a page. Raises Incompatible for a page that the pool does not have."""
        start = self._header.header_bytes + self._checked(page) * self._header.stride_bytes
        return self._bytes[start : start + self._header.page_bytes]

    def page_address(self, page: int) -> int:
        """Where a page's payload lies in this process. Raises Incompatible as `page_view`."""
        return self._address + self._header.header_bytes + self._checked(page) * self._header.stride_bytes

    def generation_address(self, page: int) -> int:
        """Where a page's generation lies in this process: 8 bytes, aligned. Raises Incompatible."""
        return self._address + GENERATIONS_AT + 8 * self._checked(page)

    def generation(self, page: int) -> int:
        """The page's generation as its owner last wrote it."""
        return self._generations[self._checked(page)]

    def close(self) -> None:
        """Gives the mapping up. It goes when the last view into it goes; nobody's view is invalidated."""
        self._generations.release()
        self._bytes.release()
        with contextlib.suppress(BufferError):  # a page view or tensor is still alive: unmapped with it
            self._map.close()

    def _checked(self, page: int) -> int:
        if not 0 <= page < self._header.num_pages:
            raise Incompatible("there is no such page in the pool")
        return page


class KVPool(_Mapping):
    """The owner's side of a pool; only its process writes it.

    storage: 1-D tensor [num_pages * page_stride] of the layout's dtype (int8: of bytes) over the page area.
    page_stride: elements from one page to the next.
    fd: the descriptor to pass to a co-located peer, who can map it for reading only.
    """

    def __init__(self, fd: int, mapping: mmap.mmap, header: PoolHeader, layout: PageLayout) -> None:
        super().__init__(mapping, header)
        self.fd = fd
        self.layout = layout
        self.page_stride = layout.stride_bytes // layout.dtype_bytes
        self.storage = torch.frombuffer(
            mapping,
            dtype=_DTYPES[layout.dtype],
            count=header.num_pages * self.page_stride,
            offset=header.header_bytes,
        )

    @classmethod
    def create(cls, layout: PageLayout, num_pages: int, pool_id: int, *, shared: bool = False) -> KVPool:
        """A new zeroed pool, its pages not yet backed by memory. Raises InternalError if there is no room.

        shared: others will write it too: a rank's pool, which its leader fills (`adopt`), or one that lies in
        parts on all ranks (`join`).
        """
        header = PoolHeader.of(layout, num_pages, pool_id)
        fd = _open_segment(header.total_bytes)
        try:
            mapping = mmap.mmap(fd, header.total_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            os.close(fd)
            raise _no_room() from error
        mapping[: len(header.pack())] = header.pack()
        with contextlib.suppress(OSError):  # a hint only
            mapping.madvise(mmap.MADV_HUGEPAGE)
        _fix_size(fd)
        if not shared:
            _close_to_writers(fd)
        return cls(fd, mapping, header, layout)

    @classmethod
    def adopt(cls, fd: int, layout: PageLayout, pool_id: int, *, as_id: int) -> KVPool:
        """Another process's shared pool, to read and write here too; from now on to nobody else.

        fd: becomes this pool's. as_id: what it is called from now on. Raises Incompatible if there is another
        thing behind it.
        """
        header, mapping = _map_shared(fd, layout, pool_id)
        _close_to_writers(fd)
        header = PoolHeader.of(layout, header.num_pages, as_id)
        mapping[: len(header.pack())] = header.pack()
        return cls(fd, mapping, header, layout)

    @classmethod
    def join(cls, fd: int, layout: PageLayout, pool_id: int) -> KVPool:
        """Another process's shared pool, of which some pages are ours to write; it closes the pool to writers
        when all have joined. The rest: as for `adopt`."""
        header, mapping = _map_shared(fd, layout, pool_id)
        return cls(fd, mapping, header, layout)

    def pages_view(self) -> memoryview:
        """The memory of all pages, from the first one on, [num_pages * stride_bytes]."""
        return self._bytes[self._header.header_bytes :]

    def zero(self, page: int) -> None:
        """Zeroes a page's payload."""
        start = self._checked(page) * self.page_stride
        self.storage[start : start + self.page_bytes // self.layout.dtype_bytes].zero_()

    def copy_page(self, source: int, target: int) -> None:
        """Copies a page's payload within the pool (copy-on-write)."""
        self.page_view(target)[:] = self.page_view(source)

    def set_generation(self, page: int, generation: int) -> None:
        """Writes a page's generation into the mapped header; before any new byte of that page."""
        self._generations[self._checked(page)] = generation

    def close_to_writers(self) -> None:
        """Lets nobody else map it writable from now on."""
        _close_to_writers(self.fd)

    def prefault(self, pages: range | None = None) -> None:
        """Backs these pages, or the whole pool, with memory now, keeping their content. Costs their full size
        and some time. Raises InternalError if there is no room."""
        start, length = 0, len(self._map)
        if pages is not None:
            stride = self._header.stride_bytes
            start, length = self._header.header_bytes + pages.start * stride, len(pages) * stride
        try:
            self._map.madvise(_MADV_POPULATE_WRITE, start, length)
        except (OSError, ValueError) as error:
            if getattr(error, "errno", errno.EINVAL) != errno.EINVAL:
                raise _no_room() from error
            # an older kernel: touch every page
            torch.frombuffer(self._map, dtype=torch.uint8)[start : start + length : PAGE_ALIGN_BYTES].add_(0)

    def close(self) -> None:
        """Gives the descriptor and the mapping up; memory goes when no process and no view uses it."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self.storage = torch.empty(0, dtype=self.storage.dtype)
        super().close()


class RemotePool(_Mapping):
    """A peer's pool on the same machine, mapped read-only. Its views can not be written."""

    @classmethod
    def map(cls, fd: int, fingerprint: str, pool_id: int) -> RemotePool:
        """Maps a descriptor got from a peer; the descriptor may be closed afterwards.

        fingerprint, pool_id: what the peer registered. Raises Incompatible for any other thing.
        """
        try:
            header = _foreign_header(fd, fingerprint, pool_id)
            mapping = mmap.mmap(fd, header.total_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise Incompatible("the peer's page pool can not be mapped") from error
        return cls(mapping, header)


def _map_shared(fd: int, layout: PageLayout, pool_id: int) -> tuple[PoolHeader, mmap.mmap]:
    """Raises Incompatible, and closes the descriptor, if there is another thing behind it."""
    try:
        header = _foreign_header(fd, layout.fingerprint(), pool_id)
        return header, mmap.mmap(fd, header.total_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        os.close(fd)
        raise Incompatible("the rank's page pool can not be mapped") from error


def _foreign_header(fd: int, fingerprint: str, pool_id: int) -> PoolHeader:
    size = _checked_size(fd)
    fields = os.pread(fd, PAGE_ALIGN_BYTES, 0)
    return PoolHeader.parse(fields, fingerprint=fingerprint, pool_id=pool_id, size_bytes=size)


def _open_segment(size_bytes: int) -> int:
    """A descriptor of a fresh zeroed segment that has no name in any file system."""
    try:
        fd = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:  # a kernel or sandbox without memfd
        return _open_file(size_bytes)
    try:
        os.ftruncate(fd, size_bytes)
    except OSError as error:
        os.close(fd)
        raise _no_room() from error
    return fd


def _open_file(size_bytes: int) -> int:
    """An unlinked file of ours, allocated at once so that the file system can not fill up under it."""
    path = f"/dev/shm/pdserve-{os.urandom(16).hex()}"  # noqa: S108  O_EXCL, 0600, random, unlinked at once
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        raise _no_room() from error
    os.unlink(path)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        os.close(fd)
        raise _no_room() from error
    return fd


def _no_room() -> InternalError:
    return InternalError("there is no room for the KV pool in shared memory; give it less memory")


def _fix_size(fd: int) -> None:
    """So that no reader meets SIGBUS."""
    with contextlib.suppress(OSError):  # a plain file has no seals
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)


def _close_to_writers(fd: int) -> None:
    """Lets nobody map it writable from now on."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)


def _checked_size(fd: int) -> int:
    """Size of a foreign segment that can not shrink under us: sealed, or a file of our own user."""
    try:
        info = os.fstat(fd)
    except OSError as error:
        raise Incompatible("the peer's page pool can not be read") from error
    if not stat.S_ISREG(info.st_mode):
        raise Incompatible("the peer's page pool is not memory")
    if not _can_not_shrink(fd) and info.st_uid != os.geteuid():
        raise Incompatible("the peer's page pool belongs to somebody else and may shrink")
    return info.st_size


def _can_not_shrink(fd: int) -> bool:
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False
