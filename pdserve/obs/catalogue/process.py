"""What the operating system says of each process: named by prometheus-client, the same everywhere."""

from __future__ import annotations

from pdserve.obs.catalogue.kinds import counter, gauge

CPU_SECONDS = counter("process_cpu_seconds", "Processor time the process has used, in seconds.")
RESIDENT_BYTES = gauge("process_resident_memory_bytes", "Memory of the process that is in RAM, in bytes.")
VIRTUAL_BYTES = gauge("process_virtual_memory_bytes", "Address space of the process, in bytes.")
START_SECONDS = gauge("process_start_time_seconds", "When the process started, in seconds since 1970.")
OPEN_FDS = gauge("process_open_fds", "Open file descriptors.")
MAX_FDS = gauge("process_max_fds", "The most file descriptors it may open.")

PROCESS = (CPU_SECONDS, RESIDENT_BYTES, VIRTUAL_BYTES, START_SECONDS, OPEN_FDS, MAX_FDS)
