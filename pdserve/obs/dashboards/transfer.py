"""Transfer: pages on their way from prefill to decode, what that costs, what is checked and refused."""

from __future__ import annotations

from pdserve.obs.dashboards.panel import (
    Colour,
    Dashboard,
    Kind,
    Panel,
    Step,
    Unit,
    mean,
    quantile,
    quantiles,
    query,
    rate,
    share,
)

_FLOW = (
    Panel(
        title="Transfers",
        unit=Unit.PER_SECOND,
        description="Prompts whose pages a decode worker pulled, by transport and by how it ended.",
        queries=(
            query(
                rate("pdserve_worker_transfers_total", "transport, outcome"), "{{transport}} {{outcome}}"
            ),
        ),
        kind=Kind.STACKED,
    ),
    Panel(
        title="Bytes",
        unit=Unit.BYTES_PER_SECOND,
        description="Bytes of KV pages that arrived, by transport.",
        queries=(query(rate("pdserve_worker_transferred_bytes_total", "transport"), "{{transport}}"),),
        kind=Kind.STACKED,
    ),
    Panel(
        title="Size of a transfer",
        unit=Unit.BYTES,
        description="Mean bytes of one transfer, by transport.",
        queries=(
            query(
                share(
                    "pdserve_worker_transferred_bytes_total", "pdserve_worker_transfers_total", "transport"
                ),
                "{{transport}}",
            ),
        ),
    ),
    Panel(
        title="Duration",
        unit=Unit.SECONDS,
        description="From the first page announced to the last verified, 95th percentile by transport. Most "
        "of it lies behind the computing of later chunks.",
        queries=(
            query(quantile(0.95, "pdserve_worker_transfer_seconds", "transport"), "{{transport}}"),
        ),
    ),
    Panel(
        title="What a handover costs",
        unit=Unit.SECONDS,
        description="From the last chunk computed to the first decode step: what a request waits for "
        "because two workers share it.",
        queries=quantiles("pdserve_handover_seconds"),
    ),
    Panel(
        title="Wire time hidden",
        unit=Unit.RATIO,
        description="Mean share of the wire's busy time that lies behind computing. Near 1: pages arrive "
        "while later chunks compute. Low: prompts of one chunk, or a slow wire.",
        queries=(query(mean("pdserve_wire_hidden_ratio"), "hidden"),),
    ),
    Panel(
        title="Checking pages",
        unit=Unit.SECONDS,
        description="Time from a page's bytes being in place to its digest being compared.",
        queries=quantiles("pdserve_worker_verify_seconds"),
    ),
)  # fmt: skip

_MEMORY = (
    Panel(
        title="Memory held for transfers",
        unit=Unit.BYTES,
        description="Bytes of pages that transfers hold on the workers of a role, now and at most since they "
        "started.",
        queries=(
            query("max by (role) (pdserve_transfer_bytes)", "{{role}} now"),
            query("max by (role) (pdserve_transfer_peak_bytes)", "{{role}} at most"),
        ),
    ),
    Panel(
        title="Leases",
        unit=Unit.COUNT,
        description="Requests that hold pages under a lease on each worker. Zero when nothing runs.",
        queries=(query("sum by (role, worker, instance) (pdserve_worker_leases)", "{{role}} {{worker}}"),),
    ),
    Panel(
        title="Credits",
        unit=Unit.COUNT,
        description="Pages that may be announced on each worker and are not acknowledged yet. Steady at its "
        "most: the wire does not keep up.",
        queries=(query("sum by (role, worker, instance) (pdserve_worker_credits)", "{{role}} {{worker}}"),),
    ),
)

_REPAIRS = (
    Panel(
        title="Digest failures",
        unit=Unit.COUNT,
        description="Pages within the last hour whose bytes did not match their digest. They were never "
        "served: pulled again, or computed. Any is worth a look (alert PdserveDigestFailures).",
        queries=(query("sum(increase(pdserve_worker_digest_failures_total[1h]))", "in an hour"),),
        kind=Kind.STAT,
        steps=(Step(value=0.5, colour=Colour.BAD),),
    ),
    Panel(
        title="Pages sent again",
        unit=Unit.PER_SECOND,
        description="Pages pulled once more, because the read before failed or brought changed bytes. A page "
        "that is bad at its source is computed instead and does not count here, but as a digest failure.",
        queries=(query(rate("pdserve_worker_resent_pages_total"), "pages"),),
    ),
    Panel(
        title="Fenced messages",
        unit=Unit.PER_SECOND,
        description="Messages refused because they came from an earlier life of a worker or an earlier try "
        "of a request. A few after a restart are normal.",
        queries=(query(rate("pdserve_worker_fenced_messages_total", "role"), "{{role}}"),),
    ),
)

TRANSFER = Dashboard(
    uid="pdserve-transfer",
    title="pdserve: transfer",
    description="Pages on their way from prefill to decode, what that costs, what is checked and refused.",
    panels=(*_FLOW, *_MEMORY, *_REPAIRS),
)
