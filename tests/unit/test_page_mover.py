"""The page mover against the xxhash library: whole copies, equal digests, two looks at a generation."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import numpy as np
import pytest

from kvtransfer.digest import page_digest, page_header
from kvtransfer.mover import Copied, Copy, PageMover
from tests.support.source_tree import ROOT

EXTENT = {"layout": "ab12", "layer_first": 1, "layer_last": 3, "shard": 2}
GUARD = 128
SIZES = [1, 2, 63, 64, 65, 1023, 1024, 1025, 1087, 1088, 1089, 2048, 4096, 65535, 65536, 368_640]
EVERYTHING = 1 << 40


class Page:
    """A page to copy, its generation, and a target with guard bytes at an offset from a cache line."""

    def __init__(self, size: int, offset: int = 0) -> None:
        self.source = np.frombuffer(bytearray(os.urandom(size)), np.uint8)
        self.generation = np.array([7], np.uint64)
        self.memory = bytearray(b"\xa5" * (size + 2 * GUARD))
        start = -ctypes.addressof(ctypes.c_char.from_buffer(self.memory)) % 64 + offset
        self.before, self.target = start, memoryview(self.memory)[start : start + size]

    def copy(self, *, wanted: int = 7, index: int = 5) -> Copy:
        addresses = self.source.ctypes.data, self.generation.ctypes.data
        return Copy(addresses[0], self.target, addresses[1], wanted, index, 16)

    def is_whole(self) -> bool:
        rest = self.memory[: self.before] + self.memory[self.before + len(self.target) :]
        return bytes(self.target) == self.source.tobytes() and set(rest) == {0xA5}

    def digest(self, index: int = 5) -> bytes:
        return page_digest(memoryview(self.source), index=index, valid_rows=16, **EXTENT)


def mover(page_bytes: int, capacity: int = 4) -> PageMover:
    return PageMover(page_bytes=page_bytes, capacity=capacity, header=page_header(**EXTENT))


def finish(moving: PageMover, budget: int) -> list[Copied]:
    found = []
    while moving.busy:
        found += moving.move(budget)
    return found


@pytest.mark.parametrize("budget", [1, 3000, EVERYTHING])
@pytest.mark.parametrize("offset", [0, 1, 32])
@pytest.mark.parametrize("size", SIZES)
def test_a_copy_is_whole_and_its_digest_is_the_pages(size: int, offset: int, budget: int) -> None:
    page, moving = Page(size, offset), mover(size)
    moving.load([page.copy()])
    assert finish(moving, budget) == [Copied(False, page.digest())]
    assert page.is_whole()


@pytest.mark.smoke
def test_other_instructions_give_the_same_digest() -> None:
    code = (
        "import numpy as np; from tests.unit.test_page_mover import *;"
        "page, moving = Page(70_001), mover(70_001); page.source[:] = np.arange(70_001) % 251;"
        "moving.load([page.copy()]); print(finish(moving, 5000)[0].digest.hex(), page.is_whole())"
    )
    page = Page(70_001)
    page.source[:] = np.arange(70_001) % 251
    for isa in ("avx2", ""):
        environ = os.environ | {"PDSERVE_KERNEL_ISA": isa}
        command = [sys.executable, "-c", code]
        told = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=True)
        assert told.stdout.split() == [page.digest().hex(), "True"]


def test_a_batch_ends_in_order_and_tells_the_stale_ones() -> None:
    pages, moving = [Page(5000) for _ in range(4)], mover(5000)
    for _ in range(2):
        moving.load([page.copy(wanted=7 + (n == 2), index=n) for n, page in enumerate(pages)])
        found = finish(moving, 6000)
        assert [copied.stale for copied in found] == [False, False, True, False]
        assert [found[n].digest for n in (0, 1, 3)] == [pages[n].digest(n) for n in (0, 1, 3)]
        assert [page.is_whole() for page in pages] == [True, True, False, True]


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_generation_that_changes_during_the_copy_makes_it_stale(parts: int) -> None:
    page, moving = Page(5000), mover(5000)
    moving.load([page.copy()])
    for _ in range(parts):
        assert moving.move(1024) == []
    page.generation[0] = 8
    assert [copied.stale for copied in finish(moving, 1024)] == [True]


def test_the_digest_is_of_the_bytes_that_arrived() -> None:
    page, moving = Page(8192), mover(8192)
    before = page.digest()
    moving.load([page.copy()])
    moving.move(4096)
    page.source[:] ^= 0xFF  # overwritten in mid-copy, as no good source would
    (copied,) = finish(moving, EVERYTHING)
    arrived = page_digest(page.target, index=5, valid_rows=16, **EXTENT)
    assert copied == Copied(False, arrived)
    assert len({before, page.digest(), arrived}) == 3
