"""What Prometheus should scrape, as its HTTP service discovery wants it: this router and its workers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from pdserve.config.addresses import advertised
from pdserve.obs.port import Page
from router.membership import Member


def targets(address: str, members: Iterable[Member], fleets: Iterable[str] = ()) -> Page:
    """The page `/targets`. address, fleets: host:port of the metrics of this router, and of processes that
    keep workers. Workers without metrics are not listed."""
    found = [_target(advertised(address), process="router")]
    found += [_target(fleet, process="fleet") for fleet in fleets]
    found += [
        _target(
            member.record.metrics,
            process="worker",
            worker=member.record.peer.worker_id,
            role=str(member.record.role),
        )
        for member in members
        if member.record.metrics
    ]
    return Page(body=json.dumps(found).encode(), content="application/json")


def _target(address: str, **labels: str) -> dict[str, Any]:
    return {"targets": [address], "labels": labels}
