"""The planted defects: at least the 22 that the handover must not survive, one entry each.

What a defect is and how it is hunted: `planted`. Names say what the broken code would do; the comment at an
entry says which layer hides it and therefore is off.
"""

from __future__ import annotations

from dataclasses import replace

from decode_worker import loop as decode_loop
from decode_worker import reserve
from decode_worker.loop import DecodeRole
from decode_worker.pulls import Pulls
from decode_worker.spread import Spread
from kvtransfer import verdict
from kvtransfer.session import guard
from kvtransfer.session.decode import DecodeSession, _Incoming
from kvtransfer.session.guard import Tombstones
from kvtransfer.session.prefill import PrefillSession
from pdserve.kvcache.allocator import PageAllocator
from pdserve.kvcache.eviction import EvictionOrder
from pdserve.kvcache.manager import PageManager
from pdserve.sched.admission import Admission
from prefill_worker import loop as prefill_loop
from prefill_worker.loop import PrefillRole
from router import events as ev
from router import lifecycle
from tests.simulation.bias import Bias
from tests.simulation.broken import (
    announce_only_once,
    another_digest,
    any_digest_again,
    blind_to_incarnations,
    cancel_any_epoch,
    cancel_without_pins,
    counted_release,
    credit_adds_up,
    deaf_to_renewals,
    drop_again,
    endless_patience,
    expired_is_fine,
    finish_only_once,
    grant_once,
    hits_in_the_sum,
    known_in_part,
    no_floor,
    nothing,
    oldest_goes,
    one_pin,
    one_short,
    pinned_hits_count,
    publish_at_once,
    release_while_computing,
    release_while_reading,
    sample_again,
    seal_twice,
)
from tests.simulation.planted import Defect, Patch
from tests.simulation.process import Process

WRONG_KV = frozenset({"S1", "S2", "S3", "S5"})
"""Wrong rows under a request, or the page accounting that prevents them."""
STUCK = frozenset({"deadline failures", "L1", "L2"})
FENCED = frozenset({"zombie commits", "S2", "S4", "L2"})

ABORTS = Bias(reuse_at_once=True, cancels=0.7)
SLOW_ABORTS = replace(ABORTS, io_longer_than_lease=0.4, pause_between_check_and_act=0.1)

PATIENT = Patch(owner=DecodeSession, name="_on_tick", make=endless_patience)
"""Decode waits for what prefill never says, as it would without its settle rule."""
CUTS = (("partition", 8), ("partition_oneway", 4), ("link_break", 4), ("pause_long", 2))


DEFECTS = (
    Defect(
        name="the I/O pin is dropped on abort",  # hidden by: the session waits for its reads itself
        patches=(Patch(owner=Pulls, name="cancel", make=cancel_without_pins),),
        layers=(Patch(owner=DecodeSession, name="_maybe_release", make=release_while_reading),),
        bias=SLOW_ABORTS, rules=WRONG_KV | {"false alarms"},
    ),
    Defect(
        name="pages are freed at once on abort",
        patches=(Patch(owner=DecodeSession, name="_maybe_release", make=release_while_computing),),
        bias=replace(ABORTS, episodes=(("slow_step", 6),)), rules=WRONG_KV,
    ),
    Defect(
        name="no tombstone",
        patches=(Patch(owner=Tombstones, name="put", make=nothing()),),
        bias=Bias(episodes=(("replay", 4),), cancels=0.5), rules=FENCED,
    ),
    Defect(
        name="the generation is not checked",  # hidden by: the digest
        patches=(Patch(owner=verdict, name="is_stale", make=nothing(False)),),
        bias=replace(SLOW_ABORTS, mask=frozenset({"digest"}), transport="shm", only=True, episodes=CUTS),
        rules=WRONG_KV,
    ),
    Defect(
        name="the digest is not checked",  # hidden by: the generation
        patches=(Patch(owner=verdict, name="is_intact", make=nothing(True)),),
        bias=replace(SLOW_ABORTS, mask=frozenset({"generation"}), transport="shm"), rules=WRONG_KV,
    ),
    Defect(
        name="a reservation is not renewed",
        patches=(Patch(owner=DecodeRole, name="_renew", make=deaf_to_renewals),),
        layers=(Patch(owner=DecodeSession, name="_grant", make=grant_once),),  # which renews too
        bias=Bias(pace=30.0, only=True, num_requests=12), rules=frozenset({"false expiries"}),
    ),
    Defect(
        name="ticks come before the inbox is drained",
        patches=(Patch(owner=Process, name="ticks_first", make=nothing(True)),),  # the simulated driver's
        bias=Bias(pace=20.0, short_pause=(0.75, 0.97), episodes=(("pause_short", 12),), only=True),
        rules=frozenset({"false expiries"}),
    ),
    Defect(
        name="an old incarnation is accepted",
        patches=(
            Patch(owner=decode_loop, name="check_call", make=blind_to_incarnations),
            Patch(owner=prefill_loop, name="check_call", make=blind_to_incarnations),
        ),
        bias=Bias(episodes=(("crash", 8), ("partition_router", 8))), rules=frozenset({"S4"}),
    ),
    Defect(
        name="a cancel of a lower key is accepted",
        patches=(
            Patch(owner=DecodeRole, name="cancel", make=cancel_any_epoch),
            Patch(owner=PrefillRole, name="cancel", make=cancel_any_epoch),
        ),
        bias=Bias(episodes=(("link_break", 6), ("replay", 4))), rules=frozenset({"unexplained failures"}),
    ),
    Defect(
        name="a Nack is lost",  # hidden by: what is not acknowledged is announced again
        patches=(Patch(owner=PrefillSession, name="_on_nack", make=nothing([])),),
        layers=(Patch(owner=PrefillSession, name="_repeat", make=announce_only_once), PATIENT),
        bias=Bias(episodes=(("corrupt_wire", 6),), only=True), rules=STUCK,
    ),
    Defect(
        name="release counts instead of naming holders",
        patches=(Patch(owner=PageAllocator, name="drop", make=counted_release),),
        layers=(Patch(owner=PrefillSession, name="_drop", make=drop_again),),  # a set does not mind
        bias=Bias(rates=(("duplicate", 0.3),), only=True), rules=WRONG_KV,
    ),
    Defect(
        name="credit is an increment",
        patches=(Patch(owner=PrefillSession, name="_on_grant", make=credit_adds_up),),
        rules=frozenset({"over-credit announces"}),
    ),
    Defect(
        name="an expired ticket is replayed",
        patches=(Patch(owner=guard.ticket, name="verify", make=expired_is_fine),),
        bias=Bias(episodes=(("replay", 12),), hasty=0.7, only=True), rules=FENCED,
    ),
    Defect(
        name="the digest of digests covers decode's own hits",
        patches=(Patch(owner=DecodeSession, name="_maybe_run", make=hits_in_the_sum),),
        rules=frozenset({"false alarms"}),
    ),
    Defect(
        name="pinned hits count as available",
        patches=(Patch(owner=EvictionOrder, name="acquire", make=pinned_hits_count),),
        rules=WRONG_KV,
    ),
    Defect(
        name="an unverified page is published",
        patches=(
            Patch(owner=Pulls, name="start", make=publish_at_once),
            Patch(owner=PageManager, name="seal", make=seal_twice),
        ),
        bias=Bias(sharing=0.95, io_longer_than_lease=0.2, episodes=(("corrupt_wire", 6),)), rules=WRONG_KV,
    ),
    Defect(
        name="an index is announced twice with two digests",  # hidden by: decode compares them
        patches=(Patch(owner=PrefillSession, name="_repeat", make=another_digest),),
        layers=(Patch(owner=DecodeSession, name="_on_announce", make=any_digest_again),),
        bias=Bias(rates=(("drop", 0.08),), only=True), rules=frozenset({"false alarms"}),
    ),
    Defect(
        name="token 0 is sampled again on retry",
        patches=(Patch(owner=lifecycle._HANDLERS, name=ev.Assigned, make=sample_again),),
        bias=Bias(episodes=(("crash", 4),)), rules=frozenset({"S1", "S2"}),
    ),
    Defect(
        name="Finish is not repeated",
        patches=(Patch(owner=PrefillSession, name="_repeat", make=finish_only_once),),
        layers=(PATIENT,),  # else decode goes on alone
        bias=Bias(rates=(("drop", 0.08),), only=True), rules=STUCK,
    ),
    Defect(
        name="the oldest is retracted",
        patches=(Patch(owner=Admission, name="_grow_one", make=oldest_goes),),
        bias=Bias(reuse_at_once=True), rules=frozenset({"L3", "S5"}),
    ),
    Defect(
        name="no prefill floor",
        patches=(Patch(owner=reserve, name="_fill_up", make=no_floor),),
        bias=Bias(both_roles=True, only=True, num_requests=60, pace=4.0, sharing=0.0, cancels=0.0),
        rules=STUCK | {"L3"},
    ),
    Defect(
        name="one rank short at Commit",
        patches=(Patch(owner=_Incoming, name="ended", make=one_short),),
        bias=Bias(num_ranks=2), rules=WRONG_KV,
    ),
    Defect(
        name="a page of ours counts that is there in part",
        patches=(Patch(owner=Spread, name="known_pages", make=known_in_part),),
        bias=Bias(bridged=True, episodes=CUTS), rules=WRONG_KV,
    ),
    Defect(
        name="a re-laid page pins the first of those it goes to",
        patches=(Patch(owner=Pulls, name="_start", make=one_pin),),
        bias=replace(SLOW_ABORTS, bridged=True), rules=WRONG_KV,
    ),
)  # fmt: skip
