"""Addresses of clusters, before Ray is asked: who listens, who does not yet, and who never will."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from pdserve.errors import Unavailable
from pdserve.fleet import cluster


@pytest.fixture
def bound() -> Iterator[socket.socket]:
    """A socket that has a port and does not listen yet."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        yield made


def count_tries(monkeypatch: pytest.MonkeyPatch, then_listens: socket.socket | None = None) -> list[float]:
    """When somebody was called. then_listens: does so once a first call has been refused."""
    tries: list[float] = []
    connect = socket.create_connection

    def counted(address: tuple[str, int], timeout: float) -> socket.socket:
        tries.append(time.monotonic())
        try:
            return connect(address, timeout)
        except OSError:
            if then_listens is not None:
                then_listens.listen()
            raise

    monkeypatch.setattr(socket, "create_connection", counted)
    return tries


def test_a_client_server_that_comes_after_its_head_is_waited_for(
    bound: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = count_tries(monkeypatch, then_listens=bound)
    cluster._probe(f"ray://127.0.0.1:{bound.getsockname()[1]}")
    assert len(tries) == 2


def test_one_that_never_comes_is_told_when_patience_ends(
    bound: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "CLIENT_PATIENCE_S", 0.5)
    tries = count_tries(monkeypatch)
    with pytest.raises(Unavailable, match="nobody listens"):
        cluster._probe(f"ray://127.0.0.1:{bound.getsockname()[1]}")
    assert tries[-1] - tries[0] >= 0.5 - cluster.CLIENT_PAUSE_S


def test_a_head_that_is_gone_is_not_waited_for(bound: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain in a pod's last hook has no time for that."""
    tries = count_tries(monkeypatch)
    with pytest.raises(Unavailable, match="nobody listens"):
        cluster._probe(f"127.0.0.1:{bound.getsockname()[1]}")
    assert len(tries) == 1
