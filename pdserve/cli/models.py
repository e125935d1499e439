"""Commands that make models of models: what they are named and which options they take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdserve.errors import ConfigError


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


def add_to(app: typer.Typer) -> None:
    """Gives the application these commands."""
    moe = typer.Typer(help="Mixtures of experts.", no_args_is_help=True)
    app.add_typer(moe, name="moe")
    moe.command()(upcycle)
    app.command()(quantize)
