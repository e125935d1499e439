"""`pdserve bench`: the machine and its kernels, whole steps of one process, or a running router: options.

What lives here: the commands and checking what they are given. What does not: measuring (`pdserve.bench`),
tables (`bench_tables`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from pdserve.cli.reach import Address, TlsCa, TlsCert, TlsKey, TlsName, router_at
from pdserve.config.precision import WEIGHTS
from pdserve.config.worker import DTYPES
from pdserve.errors import ConfigError

bench_app = typer.Typer(
    help="Measure this machine, the engine or a running router; no peers, no other tools.",
    no_args_is_help=True,
)
MAX_TOKENS = 1 << 24
MAX_SECONDS = 600.0
PROMPTS = "64,128,256,512,1024,2048,4096,7900"
CONTEXTS = "128,512,2048,7900"

Target = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write all figures there, as JSON.")
]
Seconds = Annotated[float, typer.Option(help="How long each case is repeated.")]
Threads = Annotated[int, typer.Option(min=0, max=1024, help="Of the kernels; 0: OMP_NUM_THREADS, or all.")]
PeakMib = Annotated[str, typer.Option(metavar="N,…", help="Sizes (MiB) to measure memory bandwidth at.")]
PEAK_MIB = "16,64,128,256,512,1024"


@bench_app.command()
def micro(
    rows: Annotated[str, typer.Option(metavar="N,…", help="Rows of linear layers.")] = "1,8,32,256,1024",
    forms: Annotated[str, typer.Option(metavar="FORM,…", help="Of weights.")] = "exact,w8a8,w4a8",
    contexts: Annotated[str, typer.Option(metavar="N,…", help="Of attention.")] = "128,512,2048",
    pages: Annotated[str, typer.Option(metavar="DTYPE,…", help="Of attention's pages.")] = "bfloat16,int8",
    seconds: Seconds = 0.3,
    threads: Threads = 0,
    peak_mib: PeakMib = PEAK_MIB,
    json: Target = None,
) -> None:
    """Measure memory bandwidth, peaks of products, linear layers and attention. Needs no model."""
    wished = _names(forms, "forms", WEIGHTS)
    kinds = _names(pages, "pages", ("bfloat16", "int8"))
    given = {"rows": _numbers(rows, "rows", 65536), "contexts": _numbers(contexts, "contexts", 16384)}
    _check(seconds, json)
    sizes = _sizes(peak_mib)
    from pdserve.bench.micro import MicroWish, measure_micro
    from pdserve.cli.bench_tables import micro_tables

    wish = MicroWish(
        forms=wished, pages=kinds, seconds=seconds, threads=threads or None, peak_sizes=sizes, **given
    )
    with _bar(wish.total) as advance:
        result = measure_micro(wish, lambda: advance(False))
    _end(result, micro_tables, json)


@bench_app.command()
def engine(
    model: Annotated[str, typer.Option(help="As for pdserve up.")] = "smollm2-135m-instruct",
    weights: Annotated[str, typer.Option(metavar="FORM", help="exact, w8a8 or w4a8.")] = "exact",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    kv_dtype: Annotated[str, typer.Option(help="Of KV pages: auto (the model's) or int8.")] = "auto",
    prompts: Annotated[str, typer.Option(metavar="N,…", help="Prompt lengths; none: no prefill.")] = PROMPTS,
    contexts: Annotated[str, typer.Option(metavar="N,…", help="Contexts of decode; or none.")] = CONTEXTS,
    batches: Annotated[str, typer.Option(metavar="N,…", help="Sequences of a decode step.")] = "1,8,32",
    chunk_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a prompt computed at once, as a worker does.")
    ] = 512,
    pool_gib: Annotated[float, typer.Option(help="KV pages; steps that need more are left out.")] = 2.0,
    seconds: Seconds = 1.0,
    threads: Threads = 0,
    peak_mib: PeakMib = PEAK_MIB,
    json: Target = None,
) -> None:
    """Measure prefill by prompt length and decode by context and batch, beside their floors."""
    given = {
        "prompts": _numbers(prompts, "prompts", MAX_TOKENS, may_be_none=True),
        "contexts": _numbers(contexts, "contexts", MAX_TOKENS, may_be_none=True),
        "batches": _numbers(batches, "batches", 4096),
    }
    if not given["prompts"] and not given["contexts"]:
        raise ConfigError("prompts: nothing is left to measure; name prompts or contexts")
    _check(seconds, json)
    _names(weights, "weights", WEIGHTS)
    _names(dtype, "dtype", DTYPES)
    if kv_dtype not in ("auto", dtype, "int8"):
        raise ConfigError("kv_dtype: must be auto, the model's dtype or int8")
    if not 0 < pool_gib <= 1024:
        raise ConfigError("pool_gib: must be more than 0, at most 1024")
    sizes = _sizes(peak_mib)
    from pdserve.bench.engine import EngineWish, measure_engine
    from pdserve.cli.bench_tables import engine_tables

    wish = EngineWish(
        model=model, weights=weights, dtype=dtype, kv_dtype=kv_dtype, chunk_tokens=chunk_tokens,
        seconds=seconds, pool_bytes=int(pool_gib * 2**30), threads=threads or None, peak_sizes=sizes,
        peak_seconds=min(seconds, 0.5), **given,
    )  # fmt: skip
    with _late_bar() as progress:
        result = measure_engine(wish, progress)
    _end(result, engine_tables, json)


@bench_app.command()
def serving(
    address: Address = "127.0.0.1:50051",
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests at a time; 8 unless --rate is given.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests a second, at random times, however many run.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, max=1_000_000, help="Requests in all.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of each prompt, random.")] = 256,
    output_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 64,
    warmup: Annotated[int, typer.Option(min=0, max=1000, help="Requests before, not counted.")] = 1,
    seed: Annotated[int, typer.Option(help="Of prompts and times.")] = 0,
    json: Target = None,
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_server_name: TlsName = "",
) -> None:
    """Measure time to first token, inter-token latency and tokens per second of a running router."""
    if rate is not None and concurrency is not None:
        raise ConfigError("rate: give a rate or a concurrency, not both")
    if rate is not None and not 0 < rate <= 100_000:
        raise ConfigError("rate: must be more than 0, at most 100000")
    if requests * prompt_tokens > MAX_TOKENS:
        raise ConfigError(f"prompt_tokens: all prompts together are more than {MAX_TOKENS} tokens")
    _check(1.0, json)
    from pdserve.bench.serving import Load
    from pdserve.cli.bench_tables import serving_tables

    load = Load(
        requests=requests, concurrency=None if rate is not None else concurrency or 8, rate=rate,
        prompt_tokens=prompt_tokens, output_tokens=output_tokens, warmup=warmup, seed=seed,
    )  # fmt: skip
    router = router_at(address, tls_ca, tls_cert, tls_key, tls_server_name)
    result = _serve(router, load)
    _end(result, serving_tables, json)
    if result["cases"][0]["failed"]:
        raise typer.Exit(1)


def _serve(router: Any, load: Any) -> dict[str, Any]:
    import asyncio

    from pdserve.bench.serving import measure_serving
    from pdserve.client import AsyncClient

    async def run() -> dict[str, Any]:
        # What is refused is counted, not asked again.
        async with AsyncClient(router.address, retry=None, **router.options) as client:
            with _bar(load.requests) as advance:
                return await measure_serving(client, load, advance)

    return asyncio.run(run())


def _numbers(text: str, option: str, most: int, *, may_be_none: bool = False) -> list[int]:
    """Positive numbers with commas between, each once, in order."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if may_be_none and words in ([], ["none"]):
        return []
    digits = len(str(most))
    plain = all(word.isascii() and word.isdecimal() and len(word) <= digits for word in words)
    if not words or not plain or not all(0 < int(word) <= most for word in words):
        raise ConfigError(f"{option}: must be numbers from 1 to {most} with commas between")
    return sorted({int(word) for word in words})


def _names(text: str, option: str, known: Sequence[str]) -> list[str]:
    """Of these, each once, with commas between."""
    found = list(dict.fromkeys(word.strip() for word in text.split(",")))
    if unknown := [name for name in found if name not in known]:
        raise ConfigError(f"{option}: there is no {unknown[0]!r}; there are {', '.join(known)}")
    return found


def _sizes(text: str) -> list[int]:
    return [size << 20 for size in _numbers(text, "peak_mib", 4096)]


def _check(seconds: float, json: Path | None) -> None:
    if not 0 < seconds <= MAX_SECONDS:
        raise ConfigError(f"seconds: must be more than 0, at most {MAX_SECONDS:g}")
    from pdserve.bench.results import check_target

    check_target(json)


@contextmanager
def _bar(total: int) -> Iterator[Callable[[bool], None]]:
    from pdserve.cli.bar import progress_bar

    with progress_bar(total) as advance:
        yield advance


@contextmanager
def _late_bar() -> Iterator[Callable[[int, int], None]]:
    """A bar whose length is known once the model has been loaded."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        advance: list[Callable[[bool], None]] = []

        def progress(done: int, total: int) -> None:
            if not advance:
                advance.append(stack.enter_context(_bar(total)))
            if done:
                advance[0](False)

        typer.echo("loading the model…", err=True)
        yield progress


def _end(
    result: dict[str, Any], tables: Callable[[dict[str, Any]], Sequence[Any]], target: Path | None
) -> None:
    from rich.console import Console

    from pdserve.bench.results import write

    console = Console()
    console = Console(width=console.width if console.is_terminal else 160)
    for table in tables(result):
        console.print(table)
    if target is not None:
        write(target, result)
        typer.echo(f"written: {target}", err=True)
