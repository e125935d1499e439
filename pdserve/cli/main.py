"""The `pdserve` command: names, options and exit codes. What a command does lies in a module of its own.

Exit codes: 0 done; 1 a typed error, told in one line; 2 wrong usage or configuration; 130 interrupted.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from pdserve.cli.bench import bench_app
from pdserve.cli.options import ConfigFile, settings_of
from pdserve.cli.reach import Address, TlsCa, TlsCert, TlsKey, TlsName, router_at
from pdserve.config import Resolved, ServeConfig
from pdserve.errors import ConfigError, InvalidRequest, PdserveError

EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

app = typer.Typer(
    help="Disaggregated prefill/decode serving for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
config_app = typer.Typer(help="Settings and where they come from.", no_args_is_help=True)
app.add_typer(config_app, name="config")
moe_app = typer.Typer(help="Mixtures of experts.", no_args_is_help=True)
app.add_typer(moe_app, name="moe")
app.add_typer(bench_app, name="bench")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


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

    raise typer.Exit(run(resolved.config.resolved()))


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
def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; - reads it from stdin.")] = None,
    address: Address = "127.0.0.1:50051",
    max_tokens: Annotated[int | None, typer.Option(help="Completion tokens at most.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="0 is off.")] = None,
    top_p: Annotated[float | None, typer.Option(help="1 is off.")] = None,
    min_p: Annotated[float | None, typer.Option(help="0 is off.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the random choices.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the output; may be repeated.")
    ] = None,
    chat: Annotated[bool, typer.Option(help="Send the prompt as a user's message of a chat.")] = False,
    ignore_eos: Annotated[bool, typer.Option(help="Go on past the model's end token.")] = False,
    no_prefix_cache: Annotated[bool, typer.Option(help="Neither use nor fill the prefix cache.")] = False,
    deadline_s: Annotated[float | None, typer.Option(help="Seconds the request may take.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per request.")] = False,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Many requests, one JSON object a line.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at the same time.")] = 8,
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_server_name: TlsName = "",
) -> None:
    """Generate text: one prompt, streamed, or a file of them."""
    from pdserve.cli import generate as command

    given = {
        "max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "seed": seed, "stop": tuple(stop or ()) or None, "ignore_eos": ignore_eos or None,
        "no_prefix_cache": no_prefix_cache or None, "deadline_s": deadline_s,
    }  # fmt: skip
    options = {name: value for name, value in given.items() if value is not None}
    router = router_at(address, tls_ca, tls_cert, tls_key, tls_server_name)
    if prompts is not None:
        if prompt is not None:
            raise ConfigError("prompts: give a prompt or a file of them, not both")
        raise typer.Exit(command.run_many(prompts, router, options, concurrency))
    raise typer.Exit(command.run_one(prompt, router, options, chat=chat, as_json=as_json))


@app.command()
def chat(
    address: Address = "127.0.0.1:50051",
    system: Annotated[str, typer.Option(help="System message of the conversation.")] = "",
    max_tokens: Annotated[int, typer.Option(help="Tokens of one answer at most.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.7,
    seed: Annotated[int | None, typer.Option(help="Seed of the random choices.")] = None,
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_server_name: TlsName = "",
) -> None:
    """Talk with the model. Ctrl-C stops an answer, /reset forgets, /exit or Ctrl-D ends."""
    from pdserve.cli.chat import run

    router = router_at(address, tls_ca, tls_cert, tls_key, tls_server_name)
    raise typer.Exit(run(router, system, max_tokens, temperature, seed))


@app.command()
def status(
    address: Address = "127.0.0.1:50051",
    as_json: AsJson = False,
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_server_name: TlsName = "",
) -> None:
    """Show workers, roles, incarnations, load and page pools, as the router sees them."""
    from pdserve.cli.status import run

    run(router_at(address, tls_ca, tls_cert, tls_key, tls_server_name), as_json)


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


@moe_app.command()
def upcycle(
    model: Annotated[str, typer.Argument(help="A dense Llama- or Mistral-shaped model, as for --model.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Where it goes; new or empty.")
    ],
    experts: Annotated[int, typer.Option(help="Experts of each layer.")] = 4,
    top_k: Annotated[int, typer.Option(help="Experts that a token takes.")] = 2,
    noise: Annotated[
        float, typer.Option(help="Added to each expert, in units of the weights' spread.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the router and the noise.")] = 0,
    dtype: Annotated[str, typer.Option(help="Stored as bfloat16 or float32.")] = "bfloat16",
    router: Annotated[
        str, typer.Option(help="token_choice, gshard or switch (docs/moe.md).")
    ] = "token_choice",
    capacity_factor: Annotated[float, typer.Option(help="Places of an expert; gshard and switch.")] = 1.25,
) -> None:
    """Make a mixture of experts (Mixtral's format) from a dense model."""
    from pdserve.cli.moe import run
    from pdserve.layers.routers import RouterKind
    from pdserve.models.upcycle import Upcycling

    if router not in list(RouterKind):
        raise ConfigError(f"router: must be one of {', '.join(RouterKind)}")
    made = Upcycling(
        num_experts=experts, top_k=top_k, noise=noise, seed=seed, router=RouterKind(router),
        capacity_factor=capacity_factor,
    )  # fmt: skip
    run(model, output, made, dtype)


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="A dense model, as for --model.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Where it goes; new or empty.")
    ],
    prefill: Annotated[
        str,
        typer.Option(help="Scheme of the form that prefill workers load (docs/quantization.md), or none."),
    ] = "w8a8-smoothquant",
    decode: Annotated[
        str, typer.Option(help="Scheme of the form that decode workers load, or none.")
    ] = "w4a16-awq",
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text to calibrate on: .jsonl or plain.", dir_okay=False),
    ] = None,
    evaluate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Text to measure quality on; else a fifth of --calibration.", dir_okay=False
        ),
    ] = None,
    calibration_tokens: Annotated[int, typer.Option(min=256, help="Of calibration, at most.")] = 8192,
    evaluation_tokens: Annotated[int, typer.Option(min=256, help="Of evaluation, at most.")] = 4096,
    dtype: Annotated[str, typer.Option(help="Of what stays unquantised: bfloat16 or float32.")] = "bfloat16",
    fold_values: Annotated[
        bool, typer.Option("--fold-values", help="Scale between v and o too; for a form of one role only.")
    ] = False,
) -> None:
    """Quantise a model: a form for prefill, one for decode, and a report of what each loses."""
    from pdserve.cli.quantize import run, wish_of

    wish = wish_of(
        prefill=prefill, decode=decode, calibration=calibration, evaluate=evaluate,
        calibration_tokens=calibration_tokens, evaluation_tokens=evaluation_tokens, dtype=dtype,
        fold_values=fold_values,
    )  # fmt: skip
    run(model, output, wish)


@app.command()
def explain(
    request_id: Annotated[str, typer.Argument(help="Id of a request, such as generate --json prints.")],
    address: Address = "127.0.0.1:50051",
    as_json: AsJson = False,
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_server_name: TlsName = "",
) -> None:
    """Show where one request's time went, or what it waits for now."""
    from pdserve.cli.explain import run

    run(request_id, router_at(address, tls_ca, tls_cert, tls_key, tls_server_name), as_json)


@app.command()
def experts(
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Read a snapshot (JSON), ask nobody.", dir_okay=False),
    ] = None,
    address: Address = "127.0.0.1:50051",
    worker: Annotated[str, typer.Option(metavar="ID", help="Ask this worker only.")] = "",
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Write the heat map there.", dir_okay=False)
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the new placement there, for up.", dir_okay=False),
    ] = None,
    layer: Annotated[int | None, typer.Option(help="Show where this layer's experts are.")] = None,
    nodes: Annotated[int, typer.Option(min=0, help="As if on so many nodes.")] = 0,
    ranks_per_node: Annotated[int, typer.Option(min=0, help="As if with so many ranks a node.")] = 0,
    slots: Annotated[int, typer.Option(min=0, help="As if with so many slots on each rank.")] = 0,
    by_node: Annotated[bool, typer.Option("--by-node", help="Keep groups of experts on one node.")] = False,
    groups: Annotated[int, typer.Option(min=0, help="How many groups; 0: each expert is one.")] = 0,
    even_shares: Annotated[
        bool, typer.Option("--even-shares", help="Replicas of an expert share equally.")
    ] = False,
    rebalance: Annotated[
        bool, typer.Option("--rebalance", help="Have the workers move experts to suit their loads.")
    ] = False,
    as_json: AsJson = False,
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_server_name: TlsName = "",
) -> None:
    """Show load by layer and expert, where experts are, and what a rebalance would gain."""
    from pdserve.cli import experts as shown
    from pdserve.cli.experts import Wish, ask, run
    from pdserve.parallel.expert_files import read_snapshot
    from pdserve.parallel.placement import Policy

    if rebalance:
        if source is not None:
            raise ConfigError("rebalance: a file has no workers; leave out --from")
        shown.rebalance(router_at(address, tls_ca, tls_cert, tls_key, tls_server_name), worker, as_json)
        return
    wish = Wish(
        policy=Policy(by_node=by_node, num_groups=groups, even_shares=even_shares),
        num_nodes=nodes, ranks_per_node=ranks_per_node, slots=slots, layer=layer,
        plot=plot, save=save,
    )  # fmt: skip
    if source is not None:
        snapshots = [read_snapshot(source, "from")]
    else:
        snapshots = ask(router_at(address, tls_ca, tls_cert, tls_key, tls_server_name), worker)
    run(snapshots, wish, as_json)


@app.command()
def version() -> None:
    """Print the versions of pdserve and of what it runs on."""
    from pdserve.cli.version import run

    run()


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
