"""The Triton kernels on one GPU: right or not, and how near to what the machine does at best.

    benchmarks/gpu/run.sh [--out FOLDER] [--seed N] [--interpret]

First each kernel against its plain form on fresh random data (the seed is printed), then times. A share is of
this machine's own copy bandwidth (bytes read and written, torch's copy of 2 GiB) for what is bound by memory,
and of its own bfloat16 rate (torch's product of 8192 x 8192 x 8192) for what is bound by arithmetic. Beside
each kernel stands what torch does about the same. Written: results/gpu-DATE.json. The status is 1 if a kernel
is wrong.

Needs torch and triton only, so that it runs on a machine where nothing can be installed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.gpu.peers import matmul_per_group, sdpa_on_dense
from benchmarks.gpu.shapes import CHECKED, TIMED, TINY, Decode, Grouped
from pdserve.kernels.triton.grouped_linear import grouped_linear, grouped_linear_reference
from pdserve.kernels.triton.page_copy import copy_pages, copy_pages_reference
from pdserve.kernels.triton.paged_attention import paged_attention_decode, paged_attention_decode_reference
from pdserve.kernels.triton.products import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
BOUND = {torch.bfloat16: 2**-7 if INTERPRETED else 2**-8, torch.float32: 1e-5}
"""Largest error over the largest value. The interpreter cuts bfloat16 off where a GPU rounds."""
PAGE_BYTES = 2 * 32 * 2 * 8 * 128 * 16
COPY_BYTES, SIDE = 2 << 30, 8192
RESULTS = Path(__file__).resolve().parents[1] / "results"


def main(argv: list[str] | None = None) -> int:
    """Checks, measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument(
        "--interpret", action="store_true", help="no GPU: the wrapper sets TRITON_INTERPRET=1"
    )
    options = parser.parse_args(argv)
    if options.interpret != INTERPRETED:
        parser.error("--interpret needs TRITON_INTERPRET=1 in the environment, and the other way round")
    if not INTERPRETED and not torch.cuda.is_available():
        parser.error("no GPU is to be seen; --interpret runs tiny shapes without one")
    torch.manual_seed(options.seed)
    told = {"date": _now(), "machine": machine(), "seed": options.seed, "interpreted": INTERPRETED}
    print(json.dumps(told), flush=True)
    told["checks"] = checks(TINY if INTERPRETED else CHECKED)
    if not INTERPRETED:
        told["ceilings"] = ceilings()
        told["speeds"] = speeds(told["ceilings"])
    wrong = [line for line in told["checks"] if not line["good"]]
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"gpu-{told['date'][:16].replace(':', '')}{'-interpreted' * INTERPRETED}.json"
    path.write_text(json.dumps(told, indent=1) + "\n")
    print(f"{len(told['checks']) - len(wrong)} of {len(told['checks'])} checks good; written: {path.name}")
    return 1 if wrong else 0


def checks(shapes: tuple[Grouped | Decode, ...]) -> list[dict[str, Any]]:
    """Every kernel against its plain form."""
    lines = []
    for shape in shapes:
        got, wanted = (_grouped_pair if isinstance(shape, Grouped) else _decode_pair)(shape)
        off = float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())
        bound = BOUND[shape.dtype]
        line = {"kernel": type(shape).__name__.lower(), "shape": shape.name, "dtype": str(shape.dtype)}
        lines.append(line | {"error": off, "bound": bound, "good": math.isfinite(off) and off <= bound})
        print(json.dumps(lines[-1]), flush=True)
    lines.append({"kernel": "page copy", "shape": "", "dtype": "bytes", "good": _copies_agree()})
    print(json.dumps(lines[-1]), flush=True)
    return lines


def _grouped_pair(shape: Grouped) -> tuple[torch.Tensor, torch.Tensor]:
    data = shape.data(DEVICE)
    return grouped_linear(*data), grouped_linear_reference(*data)


def _decode_pair(shape: Decode) -> tuple[torch.Tensor, torch.Tensor]:
    q_BHD, pages, tables_BP, lens_B = shape.data(DEVICE)
    scale, window = shape.dim**-0.5, shape.longest // 3
    ops = (paged_attention_decode, paged_attention_decode_reference)
    got, wanted = (
        torch.cat([op(q_BHD, pages, 0, tables_BP, lens_B, scale=scale, window=w) for w in (0, window)])
        for op in ops
    )
    return got, wanted


def _copies_agree() -> bool:
    source = torch.randint(0, 255, (12, 20480), dtype=torch.uint8, device=DEVICE)
    to, wanted = (torch.zeros(9, 24576, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    pages, to_pages = (torch.randperm(n, device=DEVICE)[:7] for n in (12, 9))
    copy_pages(to, to_pages, source, pages, 20004)
    copy_pages_reference(wanted, to_pages, source, pages, 20004)
    return torch.equal(to, wanted)


def ceilings() -> dict[str, float]:
    """This machine's own copy bandwidth and bfloat16 rate."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=DEVICE).random_()
    to = torch.empty_like(source)
    copied_s = timed(lambda: to.copy_(source))
    left, right = (torch.randn(SIDE, SIDE, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    product_s = timed(lambda: left @ right)
    found = {
        "copy_bytes_per_s": 2 * COPY_BYTES / copied_s,
        "bf16_flops_per_s": 2 * SIDE**3 / product_s,
    }
    print(json.dumps(found), flush=True)
    return found


def speeds(best: dict[str, float]) -> list[dict[str, Any]]:
    """Every timed shape, with its shares of what the machine does at best."""
    lines = []
    for shape in TIMED:
        lines.append(_grouped_speed(shape) if isinstance(shape, Grouped) else _decode_speed(shape))
        _add_shares(lines[-1], best)
        print(json.dumps(lines[-1]), flush=True)
    lines.append(_copy_speed())
    _add_shares(lines[-1], best)
    print(json.dumps(lines[-1]), flush=True)
    return lines


def _add_shares(line: dict[str, Any], best: dict[str, float]) -> None:
    line["share_of_copy"] = round(line["bytes"] / line["seconds"] / best["copy_bytes_per_s"], 3)
    line["share_of_bf16"] = round(line["flops"] / line["seconds"] / best["bf16_flops_per_s"], 3)


def _grouped_speed(shape: Grouped) -> dict[str, Any]:
    x_MK, offsets_G, weights_GNK = shape.data(DEVICE)
    size, operations = shape.work(offsets_G)
    bounds = offsets_G.tolist()
    return {
        "kernel": "grouped",
        "shape": shape.name,
        "bytes": size,
        "flops": operations,
        "seconds": timed(lambda: grouped_linear(x_MK, offsets_G, weights_GNK)),
        "torch_matmul_per_group_s": timed(lambda: matmul_per_group(x_MK, bounds, weights_GNK)),
    }


def _decode_speed(shape: Decode) -> dict[str, Any]:
    q_BHD, pages, tables_BP, lens_B = shape.data(DEVICE)
    size, operations = shape.work(lens_B)
    scale = shape.dim**-0.5
    line = {
        "kernel": "decode",
        "shape": shape.name,
        "bytes": size,
        "flops": operations,
        "seconds": timed(lambda: paged_attention_decode(q_BHD, pages, 0, tables_BP, lens_B, scale=scale)),
    }
    if shape.equal:
        line["torch_sdpa_without_pages_s"] = timed(sdpa_on_dense(q_BHD, shape.longest, shape.kv_heads))
    return line


def _copy_speed() -> dict[str, Any]:
    num_pages = COPY_BYTES // PAGE_BYTES
    source = torch.empty(num_pages, PAGE_BYTES, dtype=torch.uint8, device=DEVICE).random_()
    to = torch.empty_like(source)
    pages, to_pages = (torch.randperm(num_pages, device=DEVICE) for _ in range(2))
    return {
        "kernel": "page copy",
        "shape": f"{num_pages} pages of {PAGE_BYTES >> 10} KiB",
        "bytes": 2 * num_pages * PAGE_BYTES,
        "flops": 0,
        "seconds": timed(lambda: copy_pages(to, to_pages, source, pages, PAGE_BYTES)),
    }


def timed(call: Callable[[], object], repeats: int = 20) -> float:
    """Median seconds of a call on the GPU, after three to warm up. Data is larger than the cache."""
    for _ in range(3):
        call()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda.synchronize()
    for begin, end in marks:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks) / 1000


def machine() -> dict[str, Any]:
    """What it ran on. No names of hosts or users."""
    root = Path(__file__).resolve().parents[2]
    asked = ["git", "describe", "--always", "--dirty=+"]
    try:
        commit = subprocess.run(asked, cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = ""
    told = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit,
    }
    if INTERPRETED:
        return told | {"gpu": None}
    about = torch.cuda.get_device_properties(0)
    return told | {
        "gpu": about.name,
        "multiprocessors": about.multi_processor_count,
        "memory_gib": round(about.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
    }


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    began = time.perf_counter()
    status = main()
    print(f"{time.perf_counter() - began:.0f} s")
    raise SystemExit(status)
