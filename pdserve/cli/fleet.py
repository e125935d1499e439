"""`pdserve fleet`: the controller and the workers alone, for routers that run elsewhere."""

from __future__ import annotations

import contextlib
import os

from pdserve.cli.phases import Phases
from pdserve.cli.stopping import StopSignals
from pdserve.cli.workers import describe, ray_of, start_workers, telling_logs, wait_workers, watching
from pdserve.config import ServeConfig
from pdserve.config.precision import RELAXED
from pdserve.config.tls import tls_source
from pdserve.errors import ConfigError, Unavailable
from pdserve.fleet.rundirs import run_directory
from pdserve.obs.logging import log_as
from router.config import RouterConfig

EXIT_OK, EXIT_INTERRUPTED = 0, 130
LOOK_EVERY_S = 1.0


def run(config: ServeConfig) -> int:
    """Serves until a signal; returns the exit code. config: resolved. Raises PdserveError."""
    if not config.routers:
        raise ConfigError("routers: name the routers the workers are to join")
    secret = RouterConfig(secret_file=config.secret_file).secret_bytes(os.environ).hex()
    tls_source(config)  # before anything is started
    log_as(config, "fleet")
    phases = Phases()
    print(f"pdserve fleet: {config.model}, {describe(config.wanted())} workers", flush=True)
    if config.kv_mixing == RELAXED:
        phases.say("prefill and decode may compute unlike pages: the routers need --kv-mixing relaxed")
    with StopSignals() as signals, contextlib.ExitStack() as stack:
        try:
            run_dir = stack.enter_context(run_directory("fleet"))
            logs = stack.enter_context(ray_of(config, phases))
            fleet = start_workers(config, phases, secret=secret, routers=config.routers, run_dir=run_dir)
            stack.callback(fleet.shutdown, 0.0)
            watch = stack.enter_context(watching(fleet, config))
            with telling_logs(logs):
                wait_workers(fleet, config, phases)
            signals.serving()  # whoever reads that we are ready may stop us at once
            print(f"ready after {phases.summary()}; Ctrl-C drains and stops", flush=True)
            while not signals.requested.wait(LOOK_EVERY_S):
                if watch.lost():
                    fleet.abandon()
                    raise Unavailable("the Ray cluster, or our connection to it, is gone")
            signals.draining()
            with phases.phase("drain", f"running requests have {config.drain_timeout_s:g} s"):
                fleet.shutdown(config.drain_timeout_s)
            code = EXIT_OK
        except KeyboardInterrupt:
            code = EXIT_INTERRUPTED
        finally:
            signals.ending()
    phases.say("stopped")
    return code
