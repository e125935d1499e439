"""Settings of a fleet that is one part of a deployment: one role alone, its name, its routers."""

from __future__ import annotations

import dataclasses

import pytest

from pdserve.config import ServeConfig, resolve
from pdserve.config.addresses import check_router
from pdserve.errors import ConfigError
from pdserve.fleet.spec import FleetSpec
from pdserve.types import Role


@pytest.mark.parametrize(
    ("flags", "counts"),
    [
        ({"prefill": 1}, {Role.PREFILL: 1}),
        ({"decode": 2}, {Role.DECODE: 2}),
        ({"decode": 2, "prefill": 0}, {Role.DECODE: 2}),
        ({"aggregated": 1}, {Role.AGGREGATED: 1}),
        ({}, {Role.PREFILL: 1, Role.DECODE: 1}),
    ],
)
def test_a_part_may_have_one_role_alone(flags: dict[str, object], counts: dict[Role, int]) -> None:
    assert resolve(ServeConfig, flags=flags).config.resolved(part=True).wanted() == counts


def test_a_whole_may_not() -> None:
    with pytest.raises(ConfigError, match=r"^prefill: prefill and decode workers need each other"):
        ServeConfig(prefill=1, decode=0).resolved()
    with pytest.raises(ConfigError, match=r"^aggregated: no workers at all"):
        ServeConfig(prefill=0, decode=0).resolved(part=True)


def test_parts_of_one_deployment_agree_on_their_pages() -> None:
    for settings in ({"precision": "fast"}, {"precision": "fast", "decode_page_size": 32}, {}):
        whole = ServeConfig(**settings).resolved()
        for part in ({"prefill": 1}, {"decode": 1}):
            config = ServeConfig(**settings, **part).resolved(part=True)
            assert (config.kv_mixing, config.kv_dtype) == (whole.kv_mixing, whole.kv_dtype)
    with pytest.raises(ConfigError, match=r"^kv_dtype: .*ranks"):
        ServeConfig(kv_dtype="int8", prefill_tp=2, decode=1).resolved(part=True)


@pytest.mark.parametrize("name", ["Big", "-a", "a-", "a" * 64, "a.b", "ä", " "])
def test_a_name_that_no_pod_could_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^fleet_name: "):
        ServeConfig(fleet_name=name).resolved()


@pytest.mark.parametrize(
    "entry", ["10.0.0.1:50051", "dns+routers.ns.svc:50051", "[::1]:1", "dns+[::1]:65535"]
)
def test_routers_are_addresses_or_names(entry: str) -> None:
    assert ServeConfig(routers=(entry,)).resolved().routers == (entry,)


@pytest.mark.parametrize(
    "entry", ["", "dns+", "host", "host:", ":1", "dns+host", "host:0", "host:65536", "h:-1"]
)
def test_a_router_that_is_no_address_is_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"^routers: must be host:port, or dns\+host:port$"):
        check_router(entry)


def test_a_spec_survives_its_way_to_the_controller() -> None:
    spec = FleetSpec(
        wanted={Role.DECODE: 1}, templates={}, exclusive_nodes=True, name="pod-7", owner_lease_s=30.0
    )
    assert FleetSpec.from_json(spec.to_json()) == spec
    assert FleetSpec.from_json(dataclasses.replace(spec, name="").to_json()) != spec
