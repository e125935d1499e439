"""Hostile messages from somebody who has the fleet's token: neither router nor workers die or lose pages.

Nobody else gets this far (`test_access.py`); a version that is off, or a defect of a peer, looks the same.
300 cases a call; 10,000 with the marker `full`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import MethodDescriptor

from pdserve.rpc.access import RULES, Access
from pdserve.types import Role
from tests.support.bombard import all_alive, bombard, still_serves
from tests.support.edge_kit import Edge
from tests.support.grpc_methods import our_methods, path_of

METHODS = sorted(
    (m for m in our_methods() if RULES[path_of(m)] is Access.FLEET), key=lambda m: (m.name == "Drain", m.name)
)
"""Drain last: a drained worker takes no more work."""


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    made = Edge.start(tmp_path_factory.mktemp("edge"))
    yield made
    made.stack.stop()


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    """Another fleet: the first one's worker is drained by the time it is needed."""
    made = Edge.start(tmp_path_factory.mktemp("fresh"))
    yield made
    made.stack.stop()


def address_for(edge: Edge, method: MethodDescriptor) -> str:
    """Who serves it."""
    service = method.containing_service.name
    if service == "ClusterService":
        return edge.stack.address
    role = Role.DECODE if service == "DecodeService" else Role.PREFILL
    records = [worker.record for worker in edge.stack.status().workers]
    return next(r.peer.control for r in records if r.role is role and r.peer.worker_id == f"{role}-0")


def attack(edge: Edge, method: MethodDescriptor, cases: int) -> None:
    bombard(edge, address_for(edge, method), method, edge.fleet, cases)
    if method.name == "Drain":
        all_alive(edge)
    else:
        still_serves(edge)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_300_cases_harm_nothing(edge: Edge, method: MethodDescriptor) -> None:
    attack(edge, method, 300)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_10000_cases_harm_nothing(fresh: Edge, method: MethodDescriptor) -> None:
    attack(fresh, method, 10_000)
