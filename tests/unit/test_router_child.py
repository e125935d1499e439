"""What `pdserve up` tells the router that it starts."""

from __future__ import annotations

import itertools

import pytest

from pdserve.cli.router_child import router_arguments
from pdserve.config import ServeConfig


@pytest.mark.parametrize(
    ("fleet_port", "listed"), [(9466, ["127.0.0.1:9466"]), (0, []), (None, [])], ids=["fixed", "any", "none"]
)
def test_the_router_lists_the_port_of_the_fleet_where_it_is_known(
    fleet_port: int | None, listed: list[str]
) -> None:
    flags = router_arguments(ServeConfig(fleet_port=fleet_port).resolved(), None)
    assert [value for flag, value in itertools.pairwise(flags) if flag == "--fleet-metrics"] == listed
