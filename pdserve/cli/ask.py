"""Commands that call a running router: what they are named and which options they take.

What a command does lies in a module of its own, which is only loaded when it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdserve.cli.options import AsJson
from pdserve.cli.reach import Address, TlsCa, TlsCert, TlsKey, TlsName, router_at
from pdserve.errors import ConfigError


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
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Many requests, a JSON object a line: prompt, messages or token_ids; id, max_tokens.",
        ),
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
    """Talk with the model: /system, /regen, /undo, /help. Ctrl-C stops an answer, /exit or Ctrl-D ends."""
    from pdserve.cli.chat import run

    router = router_at(address, tls_ca, tls_cert, tls_key, tls_server_name)
    raise typer.Exit(run(router, system, max_tokens, temperature, seed))


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


def top(
    address: Address = "127.0.0.1:50051",
    once: Annotated[bool, typer.Option("--once", help="Look once, print and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, max=60, help="Seconds between two looks.")] = 1.0,
    as_json: AsJson = False,
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_server_name: TlsName = "",
) -> None:
    """Watch the fleet: tokens per second, latencies, queues, page pools by state. Ctrl-C ends."""
    from pdserve.cli.top import run

    router = router_at(address, tls_ca, tls_cert, tls_key, tls_server_name)
    run(router, once=once, as_json=as_json, interval=interval)


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


def add_to(app: typer.Typer) -> None:
    """Gives the application these commands."""
    for command in (generate, chat, status, top, explain, experts):
        app.command()(command)
