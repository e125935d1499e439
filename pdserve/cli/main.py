"""The `pdserve` command: names, options and exit codes. What a command does lies in a module of its own.

Exit codes: 0 done; 1 a typed error, told in one line; 2 wrong usage or configuration; 130 interrupted.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from pdserve.cli import ask, models
from pdserve.cli.bench import bench_app
from pdserve.cli.dashboards import dashboards_app
from pdserve.cli.keys import keys_app
from pdserve.cli.options import AsJson, ConfigFile, settings_of
from pdserve.config import Resolved, ServeConfig
from pdserve.errors import ConfigError, InvalidRequest, PdserveError
from pdserve.types import Role

EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

app = typer.Typer(
    help="Disaggregated prefill/decode serving for language models.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
config_app = typer.Typer(help="Settings and where they come from.", no_args_is_help=True)
app.add_typer(config_app, name="config")


def _show_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print versions.")
    ] = False,
) -> None:
    pass


@app.command()
@settings_of(ServeConfig)
def up(resolved: Resolved[ServeConfig], config: Path | None) -> None:
    """Start everything on this machine (Ray, workers, router) and serve until Ctrl-C."""
    from pdserve.cli.platforms import require_platform

    require_platform()
    from pdserve.cli.up import run

    raise typer.Exit(run(resolved.config.resolved(), config))


@app.command()
@settings_of(ServeConfig)
def fleet(resolved: Resolved[ServeConfig], config: Path | None) -> None:
    """Start the workers alone, for routers that run elsewhere (--routers), until Ctrl-C."""
    from pdserve.cli.platforms import require_platform

    require_platform()
    from pdserve.cli.fleet import run

    raise typer.Exit(run(resolved.config.resolved(part=True)))


@app.command()
def drain(
    here: Annotated[bool, typer.Option("--here", help="The Ray node on this machine.")] = False,
    node: Annotated[str, typer.Option(metavar="ID", help="Another Ray node, by its id in hex.")] = "",
    ray_address: Annotated[
        str,
        typer.Option(envvar="PDSERVE_RAY_ADDRESS", help="host:port of the cluster; empty: as Ray finds it."),
    ] = "",
    timeout_s: Annotated[float, typer.Option(min=1.0, help="How long it may take, in seconds.")] = 120.0,
) -> None:
    """Move the workers of a Ray node elsewhere, their requests finished, before the node goes."""
    if here == bool(node):
        raise ConfigError("here: say --here, or --node and its id")
    from pdserve.cli.drain import run

    raise typer.Exit(run(node, ray_address, timeout_s))


@app.command()
def scale(
    role: Annotated[Role, typer.Argument(help="Whose number is to change.")],
    count: Annotated[int, typer.Argument(min=1, help="How many workers of it there are to be.")],
    fleet_name: Annotated[str, typer.Option(envvar="PDSERVE_FLEET_NAME", help="Of several fleets.")] = "",
    ray_address: Annotated[
        str,
        typer.Option(envvar="PDSERVE_RAY_ADDRESS", help="host:port of the cluster; empty: as Ray finds it."),
    ] = "",
    timeout_s: Annotated[float, typer.Option(min=1.0, help="How long to wait for it, in seconds.")] = 300.0,
) -> None:
    """Change a running fleet's number of workers of a role; those over finish their requests first."""
    from pdserve.cli.scale import run

    raise typer.Exit(run(role, count, fleet_name, ray_address, timeout_s))


def _router(resolved: Resolved[object], config: Path | None, parent: int = 0, ready_fd: int = -1) -> None:
    """Start a router alone."""
    from pdserve.cli.router import run

    raise typer.Exit(run(resolved.config, parent, ready_fd))


@config_app.command("show")
@settings_of(ServeConfig)
def config_show(resolved: Resolved[ServeConfig], config: Path | None, as_json: AsJson = False) -> None:
    """Print every setting, its value and where the value came from."""
    from pdserve.cli.config_show import run

    run(resolved, as_json)


@app.command()
def certs(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the files go; made if need be.")],
    hosts: Annotated[
        str, typer.Option(help="Names and addresses of the nodes, with commas between.")
    ] = "localhost,127.0.0.1",
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long the certificates are valid.")] = 365,
) -> None:
    """Make a small certificate authority for a fleet, or use the one in DIR, and issue certificates."""
    from pdserve.cli.certs import run

    run(directory, tuple(host.strip() for host in hosts.split(",") if host.strip()), days)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Check this machine (CPU, memory, limits, ports, Ray, torch, GPU, NIXL) and say what to do."""
    from pdserve.cli.doctor import run

    raise typer.Exit(run(as_json))


@app.command()
def version() -> None:
    """Print the versions of pdserve and of what it runs on."""
    from pdserve.cli.version import run

    run()


ask.add_to(app)
models.add_to(app)
app.add_typer(bench_app, name="bench")
app.add_typer(dashboards_app, name="dashboards")
app.add_typer(keys_app, name="keys")


def _add_router() -> None:
    """The router's options come from its own settings, whose module is only loaded when they are needed."""
    from router.config import RouterConfig

    hidden_int = Annotated[int, typer.Option(hidden=True)]
    _router.__annotations__.update(parent=hidden_int, ready_fd=hidden_int)
    app.command("router")(settings_of(RouterConfig, "router")(_router))


def main() -> None:
    """Entry point. Never shows a traceback for an error that has a sentence."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    _add_router()
    try:
        app(prog_name="pdserve")
    except PdserveError as err:
        print(f"error: {err.label}: {err.message}", file=sys.stderr)
        usage = isinstance(err, ConfigError | InvalidRequest)
        raise SystemExit(EXIT_USAGE if usage else EXIT_ERROR) from None
    except BrokenPipeError:
        raise SystemExit(EXIT_ERROR) from None
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None


__all__ = ["ConfigFile", "app", "main"]
