"""Workers and Ray: who is there, who should be, who restarts, and what each process takes."""

from __future__ import annotations

from pdserve.obs.dashboards.memory import OURS
from pdserve.obs.dashboards.panel import Dashboard, Kind, Panel, Unit, query, rate

_FLEET = (
    Panel(
        title="Workers by state",
        unit=Unit.COUNT,
        description="Workers by role and state as the routers see them: ready, suspect (a heartbeat is "
        "late), draining, not ready (loading its model).",
        queries=(query("max by (role, state) (pdserve_workers)", "{{role}} {{state}}"),),
        kind=Kind.STACKED,
    ),
    Panel(
        title="Workers wanted",
        unit=Unit.COUNT,
        description="Workers that fleet processes keep up on Ray, by role.",
        queries=(query("sum by (role) (pdserve_fleet_wanted_workers)", "{{role}}"),),
    ),
    Panel(
        title="Ray actors by state",
        unit=Unit.COUNT,
        description="Places for workers on Ray as fleet processes see them: waiting (for the next try), "
        "starting (waiting for a node of its own, or loading the model), serving, retiring (draining).",
        queries=(query("sum by (role, state) (pdserve_fleet_workers)", "{{role}} {{state}}"),),
        kind=Kind.STACKED,
    ),
    Panel(
        title="Restarts",
        unit=Unit.COUNT,
        description="Ray actors started again within the last hour, by role. Several in a row: alert "
        "PdserveWorkerFlapping.",
        queries=(query("sum by (role) (increase(pdserve_fleet_restarts_total[1h]))", "{{role}}"),),
        kind=Kind.STAT,
    ),
    Panel(
        title="Ready",
        unit=Unit.COUNT,
        description="1 for each worker that takes requests, by its own word.",
        queries=(query("pdserve_worker_ready", "{{role}} {{worker}}"),),
    ),
    Panel(
        title="Draining",
        unit=Unit.COUNT,
        description="1 for each worker that finishes what it has and takes nothing new.",
        queries=(query("pdserve_worker_draining", "{{role}} {{worker}}"),),
    ),
)

_PROCESSES = (
    Panel(
        title="Processor time",
        unit=Unit.CORES,
        description="Cores that each router, worker and fleet process keeps busy.",
        queries=(
            query(
                f"rate(process_cpu_seconds_total[$__rate_interval]) and on (job, instance) {OURS}",
                "{{job}} {{instance}}",
            ),
        ),
    ),
    Panel(
        title="Age of processes",
        unit=Unit.SECONDS,
        description="Seconds since each router, worker and fleet process started.",
        queries=(
            query(
                f"time() - process_start_time_seconds and on (job, instance) {OURS}",
                "{{job}} {{instance}}",
            ),
        ),
    ),
    Panel(
        title="Open files",
        unit=Unit.COUNT,
        description="File descriptors of each router, worker and fleet process, sockets included. They "
        "should not grow without requests.",
        queries=(
            query(f"process_open_fds and on (job, instance) {OURS}", "{{job}} {{instance}}"),
        ),
    ),
    Panel(
        title="Versions",
        unit=Unit.COUNT,
        description="Routers by version: two lines only while an update is under way.",
        queries=(query("count by (version) (pdserve_build_info)", "{{version}}"),),
        kind=Kind.STAT,
    ),
    Panel(
        title="Targets that answer",
        unit=Unit.COUNT,
        description="Routers, workers and fleet processes that Prometheus reaches.",
        queries=(
            query(
                f"count by (job) (up == 1 and on (job, instance) {OURS})",
                "{{job}}",
            ),
        ),
        kind=Kind.STAT,
    ),
    Panel(
        title="Events on workers",
        unit=Unit.PER_SECOND,
        description="Everything else that workers count, by event (docs/metrics.md). Good reads are normal; "
        "almost all others are zero on a healthy fleet.",
        queries=(query(rate("pdserve_worker_events_total", "event"), "{{event}}"),),
    ),
)  # fmt: skip

_EXPERTS = (
    Panel(
        title="Imbalance of experts",
        unit=Unit.RATIO,
        description="Load of the fullest ranks over the mean, of the worst worker by role; 0 for models "
        "without experts.",
        queries=(query("max by (role) (pdserve_expert_imbalance)", "{{role}}"),),
    ),
    Panel(
        title="Lost ranks",
        unit=Unit.COUNT,
        description="Ranks that workers go on without, degraded.",
        queries=(query("max by (role) (pdserve_lost_ranks)", "{{role}}"),),
        kind=Kind.STAT,
    ),
    Panel(
        title="Placements of experts",
        unit=Unit.COUNT,
        description="Moves of experts between ranks by how they ended, of the workers that are here now.",
        queries=(query("max by (role, outcome) (pdserve_rebalances)", "{{role}} {{outcome}}"),),
    ),
)

WORKERS = Dashboard(
    uid="pdserve-workers",
    title="pdserve: workers and Ray",
    description="Who is there, who should be, who restarts, and what each process takes.",
    panels=(*_FLEET, *_PROCESSES, *_EXPERTS),
)
