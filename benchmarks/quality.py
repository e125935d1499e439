"""What each way of quantising costs the default model: perplexity, top-1 agreement and KL against float32.

    python -m benchmarks.quality                   # results/quality.json and .png
    python -m benchmarks.quality --tokens 8000     # a longer text
    python -m benchmarks.quality w8a8-rtn kv-int8  # these rows alone, shown and not kept

Calibrated on Spec-Bench questions (without its mathematics, which are GSM8K's), evaluated on GSM8K's
questions and answers. Numbers, not times: they do not depend on the machine but for the last bits of sums.
The whole sets are taken from `../shared/data/prompts` if they are there, else the small copies of
`tests/data`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import machine, now
from pdserve.calibrate.corpus import Batch, batches, sequences, text_of
from pdserve.calibrate.forward import PlainDecoder
from pdserve.calibrate.quality import compare, passes
from pdserve.calibrate.quantise import Options, product_of, quantise
from pdserve.calibrate.report import plot_layers
from pdserve.calibrate.served import attend_int8
from pdserve.models.loaded import LoadedModel
from pdserve.models.loader import load_model
from pdserve.models.weights import HEAD
from pdserve.quant.kv import KVForm
from pdserve.quant.schemes import HEAD_INPUT, SCHEMES
from pdserve.tokenizer.encode import Tokenizer

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
MODEL = "smollm2-135m-instruct"
LENGTH = 512
CALIBRATION_TOKENS = 4096
FOLDED = "w8a8-smoothquant+v"
PLAIN = ("bfloat16", "gguf-as-stored", "gguf-as-stored-a8")
CACHES = {
    "kv-int8": KVForm(kind="int8"),
    "kv-int8-token": KVForm(kind="int8", page_size=1),
    "kv-e4m3": KVForm(kind="e4m3"),
    "kv-e5m2": KVForm(kind="e5m2"),
}
"""A scale by head and page; "token": by head and token."""
SERVED = "kv-int8-served"
"""The kernels of `--kv-dtype int8` themselves."""
FIRST = (
    "w8a8-rtn", "w8a8-smoothquant", "kv-int8", "kv-int8-token", SERVED, "w4a16-rtn-g32", "w4a16-awq-g32",
    "w4a16-rtn-g64", "w4a16-awq-g64", "w4a16-rtn-g128", "w4a16-awq-g128", *PLAIN, "w8a16-rtn", FOLDED,
    "w8a8-static", "w8a8-smoothquant-static", "kv-e4m3", "kv-e5m2", "w8a8-fp8-e4m3", "w4a8-rtn-g32",
    "w4a16-gptq-g32",
    "w4a16-rtn-sym-g32", "w8a16-fp8-e4m3", "w8a8-fp8-e5m2", "w4a16-clip-g32", "w4a16-gptq-g128",
)  # fmt: skip
"""In this order, so that an interrupted run has what matters most."""
ROWS = (*FIRST, *(name for name in SCHEMES if name not in FIRST and "w4a8" not in name))


def _lines(full: str, small: str) -> list[str]:
    path = ROOT.parent / "shared" / "data" / "prompts" / full
    return (path if path.is_file() else ROOT / "tests" / "data" / small).read_text().splitlines()


def calibration_texts() -> list[str]:
    """Spec-Bench, spread over its categories."""
    lines = _lines("spec_bench.jsonl", "spec_bench_subset.jsonl")
    kept = [line for line in lines if json.loads(line)["category"] != "math_reasoning"]
    every = max(1, len(kept) // 40)
    return [text for start in range(every) for line in kept[start::every] if (text := text_of(line))]


def evaluation_texts() -> list[str]:
    """GSM8K, in order."""
    return [text_of(line) for line in _lines("gsm8k_test.jsonl", "gsm8k_subset.jsonl")]


def cut(model: LoadedModel, texts: list[str], max_tokens: int) -> list[Batch]:
    """Batches of the first so many tokens."""
    rows = sequences(Tokenizer(model.tokenizer), texts, max_tokens=max_tokens, length=LENGTH)
    return list(batches(rows))


def decoder_of(name: str, model: LoadedModel, calibration: list[Batch]) -> PlainDecoder:
    """The model under a row's numerics."""
    exact = PlainDecoder(config=model.config, weights=model.weights)
    if name in CACHES:
        return dataclasses.replace(exact, kv=CACHES[name])
    if name == SERVED:
        return dataclasses.replace(exact, attend=attend_int8)
    if name == "bfloat16":
        rounded = {n: w.to(torch.bfloat16) for n, w in model.weights.items()}
        return dataclasses.replace(exact, weights=rounded)
    if name in PLAIN:
        return _as_stored(model, inputs=name.endswith("a8"))
    scheme = SCHEMES[name.removesuffix("+v")]
    options = Options(fold_values=name == FOLDED)
    return quantise(model.config, model.weights, scheme, calibration, options).decoder()


def _as_stored(model: LoadedModel, *, inputs: bool) -> PlainDecoder:
    """The GGUF file's own codes; with inputs quantised as the kernels for 4 bits do it."""
    grouped = SCHEMES["w4a8-rtn-g32"].activation
    stored = load_model(MODEL, "float32", keep_quantised=True)
    low = {
        n: w.with_activation(HEAD_INPUT if n == HEAD else grouped) if inputs else w
        for n, w in stored.quantised.items()
    }
    linears = {n: product_of(w) for n, w in low.items()}
    return PlainDecoder(config=model.config, weights=stored.weights, linears=linears)


def measure(
    names: tuple[str, ...], model: LoadedModel, calibration: list[Batch], evaluation: list[Batch]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Row by row."""
    base = PlainDecoder(config=model.config, weights=model.weights)
    known = passes(base, evaluation)
    for done, name in enumerate(names, 1):
        start = time.monotonic()
        quality = compare(base, decoder_of(name, model, calibration), evaluation, known=known)
        print(
            f"{done:2}/{len(names)} {name:26} ratio {quality.ratio:.4f}  top-1 {quality.top1:.2%}  "
            f"KL {quality.kl:.4f}  ({time.monotonic() - start:.0f} s)",
            flush=True,
        )
        yield name, dataclasses.asdict(quality)


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Markdown, as docs/quantization.md has it."""
    lines = ["| scheme | perplexity, x float32 | top-1 agreement | KL (nats) |", "|---|---|---|---|"]
    lines += [f"| `{n}` | {r['ratio']:.4f} | {r['top1']:.1%} | {r['kl']:.4f} |" for n, r in rows.items()]
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help="rows; default all", metavar="ROW")
    parser.add_argument("--tokens", type=int, default=2000, help="of evaluation")
    given = parser.parse_args()
    if unknown := set(given.names) - set(ROWS):
        parser.error(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    model = load_model(MODEL, "float32")
    calibration = cut(model, calibration_texts(), CALIBRATION_TOKENS)
    evaluation = cut(model, evaluation_texts(), given.tokens)
    rows: dict[str, dict[str, Any]] = {}
    about = {
        "model": MODEL,
        "when": now().isoformat(),
        "machine": machine(),
        "calibration_tokens": CALIBRATION_TOKENS,
    }
    for name, row in measure(tuple(given.names) or ROWS, model, calibration, evaluation):
        rows[name] = row
        if not given.names:
            about["evaluation_tokens"] = row["num_tokens"]
            (RESULTS / "quality.json").write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    if not given.names:
        shown = {n: r["layer_errors"] for n, r in rows.items() if n in FIRST[:11]}
        plot_layers(RESULTS / "quality.png", shown)
    print(table(rows))


if __name__ == "__main__":
    main()
