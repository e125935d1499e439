"""Fixtures of the kernel suites. Shapes and bounds: `kernel_kit`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pdserve.kernels import native


@pytest.fixture
def seeded_and_threaded() -> Iterator[None]:
    """Random numbers from one seed, and two threads."""
    before = torch.get_num_threads()
    native.set_num_threads(2)
    torch.manual_seed(7)
    yield
    native.set_num_threads(before)
