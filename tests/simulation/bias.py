"""What a run may be told besides its seed: the scheduler's bias, fault rates, and which layers are off.

Production has no switch: `mask` disables a layer in the simulated data plane and processes only, so that a
planted defect that another layer would hide can show.
"""

from __future__ import annotations

from dataclasses import dataclass

LEASE_S = 4.0
HEARTBEAT_S = 0.5
SUSPECT_S = 1.6
LOST_S = 4.0
KEEPALIVE_S = 3.2
"""A stream whose other end is silent for this long is broken."""
STALL_S = 2.0
"""A tcp read without progress for this long fails."""

LAYERS = ("digest", "generation", "ticket", "pin", "incarnation")
"""digest: every read that ends is GOOD. generation: the reader compares none. ticket: the source asks for
none. pin: the source pins nothing while it sends. incarnation: processes take envelopes for others."""

KINDS = (
    *("partition", "partition_oneway", "partition_router", "crash", "pause_short", "pause_long"),
    *("slow_step", "slow_read", "slow_digest", "corrupt_wire", "corrupt_source", "corrupt_cached"),
    *("link_break", "poison", "drain", "replay", "forge"),
)
"""Faults drawn as episodes."""
RATES = ("drop", "duplicate", "reorder", "delay")
"""Faults that strike single messages between workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """How a run leans. The default is what `make test` runs.

    io_longer_than_lease: share of the reads that take 0.8 to 2.6 leases. reuse_at_once: small pools, and
    after every cancel new requests that take what it freed. pause_between_check_and_act: share of the page
    moves in which the reading process stops between its first check and its last byte. rates: probability
    by name in RATES, over what the seed drew. episodes: number of episodes by kind in KINDS, besides the
    drawn ones. only: draw no other kinds (and no message faults but those in rates). num_pages: pool size
    of every worker. cancels: share of the requests that are cancelled. hasty: share of those with a
    deadline that is soon over. sharing: share of the prompts that begin as an earlier one does.
    short_pause: how long one is, in leases. pace: steps take so many times 1 to 50 ms. both_roles: all
    workers do both, each prefills for the others too, from one pool. num_ranks: of every worker; 0: the
    seed's. bridged: whether prefill workers have pages of another size; None: the seed's. mask: layers that
    are off (LAYERS).
    """

    io_longer_than_lease: float = 0.0
    reuse_at_once: bool = False
    pause_between_check_and_act: float = 0.0
    rates: tuple[tuple[str, float], ...] = ()
    episodes: tuple[tuple[str, int], ...] = ()
    only: bool = False
    num_pages: int | None = None
    num_requests: int | None = None
    cancels: float | None = None
    transport: str | None = None
    hasty: float | None = None
    sharing: float | None = None
    pace: float | None = None
    short_pause: tuple[float, float] = (0.05, 0.7)
    both_roles: bool = False
    num_ranks: int = 0
    bridged: bool | None = None
    mask: frozenset[str] = frozenset()
