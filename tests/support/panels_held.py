"""Stages of a panel story that hold requests where gauges can see them, and that lose some.

What does not live here: stages of plain traffic (`panels_quiet`) and of peers that are wrong
(`panels_broken`), and comparing (`panels_seen`).
"""

from __future__ import annotations

import pytest

from pdserve.client import WorkerStatus
from pdserve.errors import Cancelled, DeadlineExpired, InvalidRequest, Overloaded, Unauthenticated
from pdserve.obs.catalogue import worker as worker_names
from pdserve.obs.catalogue.kinds import AGES
from pdserve.rpc.fleet_auth import authenticated
from pdserve.rpc.v1 import cluster_pb2, cluster_pb2_grpc
from pdserve.types import Role
from tests.support.panel_story import LONG, SMALL, TOKENS, Story, about
from tests.support.panels_seen import HOUR_S
from tests.support.prometheus import LIMIT_S
from tests.support.stack import channel_to, usable
from tests.support.watched import NUM_PAGES, PAGE

STALL_S = 0.25
LONGER = (STALL_S * 0.6, STALL_S * 8)
"""What a panel shows that has a stall in it, exact to its buckets."""


def ends_of_every_group(story: Story) -> None:
    """Refused, cancelled, failed and shed requests; what waits in the queue meanwhile."""
    fleet, seen = story.fleet, story.seen
    with fleet.client() as client:
        for _ in range(2):
            with pytest.raises(InvalidRequest):
                client.generate(token_ids=[10**6], max_tokens=1).result()
        fleet.arm("first_step=stall:0.1")
        stream = fleet.start(client, LONG, 300)
        next(stream)
        stream.cancel()
        with pytest.raises(Cancelled):
            stream.result()
        with pytest.raises(DeadlineExpired):
            client.generate(
                token_ids=fleet.prompt(LONG), max_tokens=300, ignore_eos=True, deadline_s=1.0
            ).result()
        fleet.arm("queue=stall:4*1")
        waiting = [fleet.start(client, LONG, TOKENS) for _ in range(2)]
        seen.shows("overview/Requests in hand", {"queued": 2})
        for _ in range(3):
            with pytest.raises(Overloaded):
                fleet.start(client, LONG, TOKENS).result()
        fleet.arm("")
        story.finished += [stream.result() for stream in waiting]
    for key, times in (("", 1), ("pds_0123456789ab_" + "0" * 43, 2)):
        with fleet.client(key) as client:
            for _ in range(times):
                with pytest.raises(Unauthenticated):
                    fleet.start(client, SMALL, 1).result()


def ends_add_up(story: Story) -> None:
    """Outcomes, reasons and objectives."""
    seen, done = story.seen, story.finished
    groups = {"finished": len(done), "refused": 2, "cancelled": 1, "shed": 3, "failed": 1}
    seen.counts("overview/Requests", groups)
    labels = {
        "length": len(done), "invalid_request": 2, "cancelled": 1, "overloaded": 3, "deadline_expired": 1
    }  # fmt: skip
    seen.counts("requests/Requests by outcome", labels)
    every = sum(groups.values())
    seen.shows("requests/Requests by group", {name: n / every for name, n in groups.items()})
    seen.shows("overview/Failed requests", {"failed": 1 / every})
    modes = {mode: len(results) for mode, results in story.modes.items()}
    modes["disaggregated"] += 2  # the cancelled one, and the one whose time was over
    seen.counts("requests/Who computed the prompt", modes)
    seen.counts("break-even/Requests by mode", modes)
    seen.counts("requests/Sheds", {"queue_full": 3})
    seen.counts("requests/Callers refused", {"missing": 1, "unknown_key": 2})
    late = sum(result.timings.ttft_s > 2.0 for result in done)
    assert late == 2, "those that waited for the queue"
    seen.shows("overview/First tokens in time", {"met": 1 - late / len(done)})


def decode_under_way(story: Story) -> None:
    """Three answers where two fit, held at each of their steps: what runs, and the memory it has."""
    fleet, seen = story.fleet, story.seen
    fleet.arm(f"first_step=stall:{STALL_S}")
    with fleet.client() as client:
        streams = [fleet.start(client, LONG, 60) for _ in range(3)]
        seen.shows("decode/Running requests", {"decode-0": 2})
        seen.shows("decode/Waiting requests", {"decode-0": 1})
        seen.shows("overview/Requests in hand", {"running": 3, "queued": 0})
        assert _used(story) > 2 * (LONG // PAGE) / NUM_PAGES
        seen.agrees("decode/KV memory in use", lambda: {"decode-0": _used(story)})
        seen.agrees("overview/KV memory in use", lambda: {"decode": _used(story), "prefill": 0})
        seen.agrees("memory/Memory in use, by use", lambda: _by_use(story))
        seen.agrees("memory/Memory in use, by age", lambda: _by_age(story))
        fleet.arm("")
        story.finished += [stream.result() for stream in streams]
    seen.between("decode/Wait for the first step", {"p99": (0.1, 10.0)})


def _used(story: Story) -> float:
    load = story.worker("decode-0").load
    return 1 - (load.free_pages + load.evictable_pages) / load.num_pages


def _by_use(story: Story) -> dict[str, float]:
    worker = story.worker("decode-0")
    size = worker.record.capability.page_bytes
    return {f"decode {each.state}": float(sum(each.counts) * size) for each in worker.load.page_ages}


def _by_age(story: Story) -> dict[str, float]:
    worker = story.worker("decode-0")
    counts = zip(*(each.counts for each in worker.load.page_ages), strict=True)
    size = worker.record.capability.page_bytes
    return {age: float(sum(each) * size) for age, each in zip(AGES, counts, strict=True)}


def held_steps_are_seen(story: Story) -> None:
    """The steps that were held, in every panel of step times and gaps."""
    seen = story.seen
    seen.between("decode/Step time", {"p99": LONGER})
    seen.between("decode/Gap between tokens", {"disaggregated": LONGER})
    seen.between("overview/Gap between tokens", {"p99": LONGER})
    seen.between("break-even/Longest gaps by mode", {"disaggregated": LONGER, "local": (0.0, LONGER[0])})
    seen.between("break-even/Gain per token", {"gain": (-LONGER[1], -0.001)})
    cost, gain = (seen.lines(f"break-even/{name}") for name in ("Cost in first tokens", "Gain per token"))
    seen.shows("break-even/Answers that gain", {"tokens": cost["cost"] / gain["gain"]}, close=0.01)
    seen.between("decode/Busy", {"decode-0": (STALL_S * 4, 60)}, scale=HOUR_S)
    seen.between("break-even/Busy by role", {"decode": (STALL_S * 4, 60)}, scale=HOUR_S)
    mean = [(s.timings.total_s - s.timings.ttft_s) / (len(s.token_ids) - 1) for s in story.finished]
    clear = [gap for gap in mean if abs(gap - 0.1) > 0.01]
    assert clear == mean, "a mean gap lies too near to its objective to tell"
    slow = sum(gap > 0.1 for gap in mean)
    seen.shows("overview/Token gaps in time", {"met": 1 - slow / len(mean)})


def prompts_under_way(story: Story) -> None:
    """Three prompts of four chunks where two fit, held at each of their steps."""
    fleet, seen = story.fleet, story.seen
    fleet.arm("compute=stall:1.0; prefill_queue=stall:0.6*1")
    with fleet.client() as client:
        streams = [fleet.start(client, 200, 2) for _ in range(3)]
        seen.between("prefill/Outstanding prompt tokens", {"outstanding": (100, 600)})
        seen.shows("prefill/Prompts in hand", {"prefill-0": 2})
        seen.shows("prefill/Waiting prompts", {"prefill-0": 1})
        seen.between("prefill/Waiting prompt tokens", {"prefill-0": (200, 600)})
        seen.between("transfer/Leases", {"decode decode-0": (1, 3), "prefill prefill-0": (1, 3)})
        seen.between("transfer/Credits", {"prefill prefill-0": (1, 256)})
        story.finished += [stream.result() for stream in streams]
    fleet.arm("")
    seen.shows("transfer/Leases", {"decode decode-0": 0, "prefill prefill-0": 0})
    seen.between("prefill/Step time", {"p99": (0.64, 8.0)})
    seen.between("prefill/Computing a prompt", {"p99": (1.0, 30.0)})
    seen.between("prefill/Wait for a step", {"p99": (0.25, 30.0)})
    seen.between("prefill/Busy", {"prefill-0": (4.0, 60.0)}, scale=HOUR_S)
    seen.between("prefill/Tokens per second of computing", {"prefill-0": (30.0, 500.0)})

    def held() -> dict[str, float]:
        worker = story.worker("prefill-0")
        size = worker.record.capability.page_bytes
        return {"prefill at most": worker.load.peak_transfer_pages * size, "prefill now": 0.0}

    assert held()["prefill at most"] > 0
    seen.agrees("transfer/Memory held for transfers", held)


def stalls_on_the_way(story: Story) -> None:
    """A transfer and checks of pages that take long."""
    fleet, seen = story.fleet, story.seen
    for fault in ("wire=stall:0.6*1", "verify=stall:0.1"):
        fleet.arm(fault)
        with fleet.client() as client:
            story.finished.append(fleet.start(client, LONG, 2).result())
    fleet.arm("")
    moved = [each.transfer_s for each in story.ledgers if each.transfer.pages]
    seen.between("transfer/Duration", {"shm": about(moved, worker_names.TRANSFER.buckets)["p95"]})
    seen.between("transfer/Checking pages", {"p99": (0.25, 1.0)})


def memory_runs_out(story: Story) -> None:
    """Two answers that do not fit together: one loses its pages; and prompts that push others out."""
    fleet, seen = story.fleet, story.seen
    with fleet.client() as client:
        streams = [fleet.start(client, LONG, 400) for _ in range(2)]
        story.finished += [stream.result() for stream in streams]
        lost = sum(each.num_retractions for each in story.ledgers)
        assert lost > 0
        seen.counts("decode/Preemptions", {"decode-0": lost})
        before = seen.lines("memory/Evictions")["prefill"] * HOUR_S
        cached = story.worker("prefill-0").load.evictable_pages
        for _ in range(12):
            story.finished.append(fleet.start(client, LONG, 2).result())
        story.fleet.stack.until_idle()

    def pushed_out() -> dict[str, tuple[float, float]]:
        added = story.worker("prefill-0").load.evictable_pages - cached
        want = before + 12 * (LONG // PAGE) - added
        return {"prefill": (want * 0.9, want * 1.1)}

    seen.between("memory/Evictions", pushed_out(), scale=HOUR_S)


def workers_come_and_go(story: Story) -> None:
    """A decode worker dies in the middle of an answer, and the one that goes on is drained."""
    fleet, seen, stack = story.fleet, story.seen, story.fleet.stack
    stack.wait_started("decode-1")
    stack.until(lambda status: sorted(usable(status)) == ["decode-0", "decode-1", "prefill-0"])
    fleet.prometheus.until_all_up(4)
    fleet.arm("first_step=stall:0.1")
    with fleet.client() as client:
        stream = fleet.start(client, LONG, 30)
        next(stream)
        stack.kill(_busy(story))
        result = stream.result()
        assert result.epochs == 2
        seen.shows("requests/Tries after the first", {"retries": 1 / HOUR_S}, close=0.1)
        last = fleet.start(client, LONG, 100)
        next(last)
        left = _busy(story)
        _drain(story, left)
        seen.shows("workers/Draining", {f"decode {left}": 1})
        seen.shows("workers/Workers by state", {"decode draining": 1})
        fleet.arm("")
        assert last.result().token_ids, "a drained worker finishes what it has"


def _busy(story: Story) -> str:
    """The decode worker that has the one answer under way."""
    found = story.fleet.stack.until(lambda status: any(_runs(w) for w in status.workers))
    return next(w.record.peer.worker_id for w in found.workers if _runs(w))


def _runs(worker: WorkerStatus) -> bool:
    return worker.record.role is Role.DECODE and worker.load.num_running > 0 and not worker.suspect


def _drain(story: Story, name: str) -> None:
    stack = story.fleet.stack
    with channel_to(story.worker(name).record.peer.control) as channel:
        stub = authenticated(cluster_pb2_grpc.WorkerServiceStub(channel), bytes.fromhex(stack.secret))
        stub.Drain(cluster_pb2.DrainRequest(), timeout=LIMIT_S)
