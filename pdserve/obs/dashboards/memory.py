"""Memory: KV pages by state, what they are used for and since when, and what processes take."""

from __future__ import annotations

from pdserve.obs.dashboards.panel import Colour, Dashboard, Kind, Panel, Step, Unit, query, rate

OURS = "(pdserve_build_info or pdserve_worker_ready or pdserve_fleet_wanted_workers)"
"""Series of each router, worker and fleet process: they pick theirs out of the metrics of all processes."""


def _pages(role: str) -> Panel:
    return Panel(
        title=f"Pages on {role} workers",
        unit=Unit.COUNT,
        description="KV pages by state: free, evictable (only the prefix cache has them), reserved (nothing "
        "written yet), filling (being computed or pulled), sealed (held by requests), retiring (given up, "
        "I/O may still touch them), quarantined (out of use for good).",
        queries=(query(f'max by (state) (pdserve_pages{{role="{role}"}})', "{{state}}"),),
        kind=Kind.STACKED,
        width=12,
    )


_PAGES = (
    _pages("prefill"),
    _pages("decode"),
    Panel(
        title="Memory in use, by use",
        unit=Unit.BYTES,
        description="Bytes of pages neither free nor evictable, by role and what for: granted, filling, "
        "held, retiring, quarantined.",
        queries=(
            query(
                "sum by (role, state) (max by (role, state, age) (pdserve_used_page_bytes))",
                "{{role}} {{state}}",
            ),
        ),
        kind=Kind.STACKED,
    ),
    Panel(
        title="Memory in use, by age",
        unit=Unit.BYTES,
        description="The same by how long pages are in their use. Old pages without running requests are "
        "stranded (alert PdserveStrandedPages).",
        queries=(
            query("sum by (age) (max by (role, state, age) (pdserve_used_page_bytes))", "{{age}}"),
        ),
        kind=Kind.STACKED,
    ),
    Panel(
        title="KV memory in use by worker",
        unit=Unit.RATIO,
        description="Share of each worker's pages that are neither free nor evictable. Near 1, requests wait "
        "or are preempted.",
        queries=(query("pdserve_worker_kv_utilization_ratio", "{{role}} {{worker}}"),),
    ),
    Panel(
        title="Old pages",
        unit=Unit.COUNT,
        description="Pages in the same use for over a minute, by worker and use. Normal for long answers.",
        queries=(
            query(
                'sum by (role, worker, instance, state) (pdserve_worker_used_pages{age="older"})',
                "{{role}} {{worker}} {{state}}",
            ),
        ),
    ),
    Panel(
        title="Quarantined pages",
        unit=Unit.COUNT,
        description="Pages whose I/O never ended: out of use until the worker starts again. Over 5 % of a "
        "pool the worker restarts by itself.",
        queries=(
            query('sum by (role) (pdserve_worker_used_pages{state="quarantined"})', "{{role}}"),
        ),
        kind=Kind.STAT,
        steps=(Step(value=1, colour=Colour.WARNING),),
    ),
    Panel(
        title="Pool size",
        unit=Unit.BYTES,
        description="All KV pages of a worker: their number times the bytes of one.",
        queries=(
            query(
                "sum by (role, worker, instance) (pdserve_worker_pages) "
                "* on (role, worker, instance) pdserve_worker_page_bytes",
                "{{role}} {{worker}}",
            ),
        ),
        kind=Kind.STAT,
    ),
    Panel(
        title="Evictions",
        unit=Unit.PER_SECOND,
        description="Cached pages given up for new requests. High together with few prefix hits: the cache "
        "is too small for what repeats.",
        queries=(query(rate("pdserve_worker_evictions_total", "role"), "{{role}}"),),
    ),
    Panel(
        title="Process memory",
        unit=Unit.BYTES,
        description="Resident memory of routers, workers and fleet processes, shared pools included. A "
        "steady slope under a steady load is a leak (alert PdserveMemoryGrows).",
        queries=(
            query(f"process_resident_memory_bytes and on (job, instance) {OURS}", "{{job}} {{instance}}"),
        ),
    ),
)  # fmt: skip

MEMORY = Dashboard(
    uid="pdserve-memory",
    title="pdserve: memory",
    description="KV pages by state, what they are used for and since when, and what processes take.",
    panels=_PAGES,
)
