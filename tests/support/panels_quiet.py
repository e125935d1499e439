"""Stages of a panel story with one request at a time: what clients were told is what panels must show.

What does not live here: stages that hold requests or break things (`panels_held`), and comparing
(`panels_seen`).
"""

from __future__ import annotations

import time
from statistics import fmean

import psutil

from pdserve import __version__
from pdserve.obs.catalogue import router as names
from pdserve.obs.ledger import path_seconds
from pdserve.types import Phase
from tests.support.panel_story import LONG, SMALL, TOKENS, Story, about, at_level, levels
from tests.support.panels_seen import HOUR_S
from tests.support.watched import NUM_PAGES, PAGE

NEW = 5
"""Prompts for prefill that nobody sent before."""


def plain_traffic(story: Story) -> None:
    """Prompts computed on prefill, one of them again, and short ones computed on decode."""
    fleet = story.fleet
    with fleet.client() as client:
        again = fleet.prompt(LONG)
        for prompt in (again, again, *(fleet.prompt(LONG) for _ in range(NEW - 1))):
            story.finished.append(fleet.start(client, 0, TOKENS, prompt).result())
        story.finished += [fleet.start(client, SMALL, TOKENS).result() for _ in range(3)]
    fleet.prometheus.until_all_up(3)


def times_are_those_clients_were_told(story: Story) -> None:
    """Histograms of the router, whole."""
    seen, done = story.seen, story.finished
    first = [result.timings.ttft_s for result in done]
    seen.shows("overview/Time to first token", levels(first, names.TTFT.buckets))
    by_mode = {
        mode: at_level([r.timings.ttft_s for r in results], names.TTFT.buckets, 0.95)
        for mode, results in story.modes.items()
    }
    seen.shows("requests/Time to first token", by_mode)
    seen.shows("break-even/Time to first token by mode", story.means(lambda r: r.timings.ttft_s))
    whole = [result.timings.total_s for result in done]
    seen.between("requests/Time to the last token", about(whole, names.E2E.buckets))
    seen.shows("break-even/Whole requests by mode", story.means(lambda r: r.timings.total_s), close=0.1)
    waits = [result.timings.queue_s for result in done]
    seen.shows("requests/Wait in the router's queue", levels(waits, names.QUEUE.buckets))
    gaps = sum(result.usage.completion_tokens - 1 for result in done)
    seen.between("requests/Gaps between tokens", {"+Inf": (gaps - 0.01, gaps + 0.01)}, scale=HOUR_S)
    first_by_mode = story.means(lambda r: r.timings.ttft_s)
    cost = first_by_mode["disaggregated"] - first_by_mode["local"]
    seen.shows("break-even/Cost in first tokens", {"cost": cost}, close=1e-4)
    mean = story.means(lambda r: (r.timings.total_s - r.timings.ttft_s) / (r.usage.completion_tokens - 1))
    seen.between("break-even/Gap between tokens by mode", {m: (0.5 * v, v) for m, v in mean.items()})


def ledgers_are_those_clients_were_told(story: Story) -> None:
    """Phases, hand-overs and what moving costs."""
    seen, ledgers = story.seen, story.ledgers
    phases = [path_seconds(ledger) for ledger in ledgers]
    means = {
        str(phase): fmean([each[phase] for each in phases if phase in each])
        for phase in Phase
        if any(phase in each for each in phases)
    }
    seen.shows("requests/Where the time to the first token goes", means)
    rest = [abs(ledger.residual_s) for ledger in ledgers if ledger.residual_s is not None]
    seen.shows("requests/Time that no phase explains", levels(rest, names.RESIDUAL.buckets))
    handed = [each for each in ledgers if each.transfer.path and each.handover_s is not None]
    costs = [max(0.0, each.handover_s or 0.0) for each in handed]
    seen.shows("transfer/What a handover costs", levels(costs, names.HANDOVER.buckets))
    computed = [each for each in ledgers if each.prefill_computed_tokens]
    prefill = [each.prefill_compute_s for each in computed]
    seen.shows("break-even/Handover of a prompt", {"handover": fmean(costs), "computing": fmean(prefill)})
    hidden = [each.wire_hidden for each in ledgers if each.wire_hidden is not None]
    seen.shows("transfer/Wire time hidden", {"hidden": fmean(hidden)})
    moved = sum(r.usage.prompt_tokens - r.ledger.decode_hit_tokens for r in story.modes["disaggregated"])
    tokens = sum(each.prefill_computed_tokens + each.decode_computed_prompt_tokens for each in ledgers)
    costs_of = {
        "moving": sum(each.transfer_s for each in ledgers) / moved,
        "computing": sum(prefill) / tokens,
    }
    seen.shows("break-even/Moving a token against computing it", costs_of)


def tokens_add_up(story: Story) -> None:
    """Where prompts' pages came from, and what clients got."""
    seen, ledgers, done = story.seen, story.ledgers, story.finished
    prompt = sum(result.usage.prompt_tokens for result in done)
    cached = sum(result.usage.cached_tokens for result in done)
    sent = sum(result.usage.completion_tokens for result in done)
    assert (prompt, cached, sent) == (6 * LONG + 3 * SMALL, 6 * PAGE, 9 * TOKENS)
    seen.counts("overview/Tokens", {"prompt": prompt, "completion": sent})
    hits = {"hit_prefill": 6 * PAGE, "hit_decode": 6 * PAGE}
    seen.counts(
        "requests/Prompt tokens by source",
        {"computed": prompt - cached, "transferred": prompt - 3 * SMALL - hits["hit_decode"], **hits},
    )
    seen.shows("requests/Prompt tokens not computed", {"hits": cached / prompt})
    seen.counts("prefill/Prompt tokens computed", {"prefill-0": prompt - cached - 3 * SMALL})
    share = cached / (prompt - 3 * SMALL)
    seen.shows("prefill/Prompt tokens found in the cache", {"prefill-0": share})
    handed = len(story.modes["disaggregated"])
    seen.counts("decode/Tokens made", {"decode-0": sent - handed})
    size = sum(each.transfer.bytes for each in ledgers)
    seen.counts("transfer/Bytes", {"shm": size})
    seen.counts("transfer/Transfers", {"shm complete": handed})
    seen.shows("transfer/Size of a transfer", {"shm": size / handed})


def steps_add_up(story: Story) -> None:
    """Steps and how full they were: one request at a time."""
    seen, ledgers = story.seen, story.ledgers
    made = sum(result.usage.completion_tokens - 1 for result in story.finished)
    seen.shows("decode/Sequences of a step", {"decode-0": 1.0})
    seen.shows("decode/Rows of a step", {"decode-0": (made + 3 * SMALL) / (made + 3)})
    rows = NEW * LONG + LONG - 6 * PAGE
    seen.shows("prefill/Rows of a step", {"prefill-0": rows / (2 * NEW + 1)})
    seen.counts("workers/Events on workers", {"reads_good": sum(each.transfer.pages for each in ledgers)})
    prompts = [result.usage.prompt_tokens for result in story.finished]
    answers = [result.usage.completion_tokens for result in story.finished]
    lengths = {
        "prompt": at_level(prompts, names.PROMPT_LENGTH.buckets, 0.5),
        "answer": at_level(answers, names.COMPLETION_LENGTH.buckets, 0.5),
    }
    seen.shows("break-even/Lengths", lengths)


def who_is_there(story: Story) -> None:
    """Workers, their memory at rest, and their processes."""
    seen = story.seen
    seen.shows("overview/Workers ready", {"prefill": 1, "decode": 1, "aggregated": 0})
    seen.shows("workers/Workers by state", {"prefill ready": 1, "decode ready": 1, "decode suspect": 0})
    seen.shows("workers/Ready", {"prefill prefill-0": 1, "decode decode-0": 1})
    seen.shows("workers/Targets that answer", {"pdserve": 3})
    seen.shows("workers/Versions", {__version__: 1})
    both = ("prefill prefill-0", "decode decode-0")
    seen.shows("memory/KV memory in use by worker", dict.fromkeys(both, 0.0))
    size = NUM_PAGES * story.worker("decode-0").record.capability.page_bytes
    seen.shows("memory/Pool size", dict.fromkeys(both, size))
    cached = {"evictable": NEW * 6, "free": NUM_PAGES - NEW * 6, "sealed": 0, "filling": 0, "reserved": 0}
    seen.shows("memory/Pages on prefill workers", cached)
    seen.shows("memory/Pages on decode workers", cached)
    process = psutil.Process(story.fleet.stack.router.pid)
    memory, files = process.memory_info().rss, process.num_fds()
    cores = sum(process.cpu_times()[:2])
    line = "pdserve router"
    seen.between("memory/Process memory", {line: (0.7 * memory, 1.4 * memory)})
    seen.between("workers/Open files", {line: (files - 8, files + 8)})
    seen.agrees("workers/Age of processes", lambda: {line: _age(process)}, close=0.1)
    seen.between("workers/Processor time", {line: (0.0001, 2 * cores + 5)}, scale=HOUR_S)


def _age(process: psutil.Process) -> float:
    return time.time() - process.create_time()
