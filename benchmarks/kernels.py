"""Time of each kernel at SmolLM2-135M's sizes: ms per layer, GFLOP/s and GB/s of the best of many calls.

    python benchmarks/kernels.py [--threads N] [--dtype bfloat16|float32] [--only WORD] [--cpu-time]

Weights and pages of all 30 layers take turns, so that nothing is warmer than in a model. --cpu-time measures
the calling thread's processor time instead of the wall (with --threads 1, on a machine that is not idle).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from pdserve.kernels import native
from pdserve.kernels.activation import silu_mul
from pdserve.kernels.attention import paged_attention
from pdserve.kernels.attention_meta import AttentionMeta
from pdserve.kernels.kv_view import KVView
from pdserve.kernels.linear import PackedLinear, linear
from pdserve.kernels.norm import add_rms_norm
from pdserve.kernels.rope import rope_and_write_kv

LAYERS, HIDDEN, INTER, VOCAB = 30, 576, 1536, 49152
HEADS, KV_HEADS, DIM, PAGE = 9, 3, 64, 16
LINEARS = {
    "qkv": ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (2 * INTER, HIDDEN),
    "down": (HIDDEN, INTER),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the table. call(layer) runs the op once; flops and bytes are per call."""

    name: str
    call: Callable[[int], object]
    flops: float = 0.0
    bytes: float = 0.0


def linear_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Each linear layer at decode and prefill row counts, and the logits."""
    for name, (num_out, num_in) in LINEARS.items():
        layers = [PackedLinear.pack(torch.randn(num_out, num_in), dtype=dtype) for _ in range(LAYERS)]
        for rows in (1, 8, 32, 256, 1024):
            yield linear_case(f"linear {name} M={rows}", layers, torch.randn(rows, num_in).to(dtype))
    head = PackedLinear.pack(torch.randn(VOCAB, HIDDEN), dtype=dtype)
    for rows in (1, 32):
        yield linear_case(f"linear head M={rows}", [head], torch.randn(rows, HIDDEN).to(dtype))


def linear_case(name: str, layers: list[PackedLinear], x: torch.Tensor) -> Case:
    """One linear layer's case; its bytes are its weight."""
    size = layers[0].num_out * layers[0].num_in
    return Case(
        name=name,
        call=lambda layer: linear(x, layers[layer % len(layers)]),
        flops=2.0 * x.shape[0] * size,
        bytes=size * x.dtype.itemsize,
    )


def make_kv(dtype: torch.dtype, num_pages: int) -> KVView:
    """A pool of random pages."""
    page = LAYERS * 2 * KV_HEADS * DIM * PAGE
    return KVView(
        storage=torch.randn(num_pages * page).to(dtype), page_stride=page, num_pages=num_pages,
        num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=DIM, page_size=PAGE, dtype=str(dtype)[6:],
    )  # fmt: skip


def attention_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Prefill of one and four prompts, a late chunk, and decode of 1, 8 and 32 sequences."""
    steps = {
        "prefill 1024": ([1024], [1024]),
        "prefill 4x256": ([256] * 4, [256] * 4),
        "chunk 256 of 3072": ([256], [3072]),
        "decode 1 ctx 128": ([1], [128]),
        "decode 8 ctx 300": ([1] * 8, [300] * 8),
        "decode 32 ctx 300": ([1] * 32, [300] * 32),
    }
    for name, (queries, contexts) in steps.items():
        need = [-(-context // PAGE) for context in contexts]
        pages = torch.randperm(sum(need)).tolist()
        kv = make_kv(dtype, sum(need))
        meta = AttentionMeta.build(
            queries, contexts, [[pages.pop() for _ in range(n)] for n in need], page_size=PAGE
        )
        yield attention_case(name, queries, contexts, kv, meta)


def attention_case(
    name: str, queries: list[int], contexts: list[int], kv: KVView, meta: AttentionMeta
) -> Case:
    """One step's attention; flops count what is visible, bytes are the pages' K and V."""
    q = torch.randn(sum(queries), HEADS, DIM).to(kv.storage.dtype)
    seen = sum(n * (2 * context - n + 1) / 2 for n, context in zip(queries, contexts, strict=True))
    return Case(
        name=f"attention {name}",
        call=lambda layer: paged_attention(q, kv, layer, meta, scale=DIM**-0.5),
        flops=4.0 * seen * HEADS * DIM,
        bytes=2.0 * sum(contexts) * KV_HEADS * DIM * q.dtype.itemsize,
    )


def small_cases(dtype: torch.dtype) -> Iterator[Case]:
    """The operators between the products; bytes are what they read and write."""
    for rows in (1, 32, 1024):
        x, weight = torch.randn(rows, HIDDEN).to(dtype), torch.randn(HIDDEN).to(dtype)
        gate_up = torch.randn(rows, 2 * INTER).to(dtype)
        qkv = torch.randn(rows, LINEARS["qkv"][0]).to(dtype)
        cos = torch.randn(rows, DIM)
        pages = -(-rows // PAGE)
        kv, slots = make_kv(dtype, pages), torch.arange(rows, dtype=torch.int32)
        size = dtype.itemsize
        yield Case(
            name=f"add_rms_norm M={rows}",
            call=lambda _, x=x, weight=weight: add_rms_norm(x, x, weight, 1e-5),
            bytes=4 * x.numel() * size,
        )
        yield Case(
            name=f"silu_mul M={rows}",
            call=lambda _, x=gate_up: silu_mul(x),
            bytes=1.5 * gate_up.numel() * size,
        )
        yield Case(
            name=f"rope_and_write_kv M={rows}",
            call=lambda layer, qkv=qkv, cos=cos, kv=kv, slots=slots: rope_and_write_kv(
                qkv, cos, cos, kv, layer, slots, num_heads=HEADS
            ),
            bytes=2 * qkv.numel() * size,
        )


def best_ms(case: Case, clock: Callable[[], float], budget_s: float = 0.4) -> float:
    """Least time per call, layers taking turns, over rounds of all layers."""
    for layer in range(LAYERS):
        case.call(layer)
    best, end = float("inf"), time.monotonic() + budget_s
    while time.monotonic() < end:
        begin = clock()
        for layer in range(LAYERS):
            case.call(layer)
        best = min(best, (clock() - begin) / LAYERS)
    return best * 1e3


def main() -> None:
    """Print the table as it grows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--only", default="")
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    native.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    clock = time.thread_time if options.cpu_time else time.perf_counter
    print(f"{native.numerics_id(options.dtype)}, {options.threads} threads, {LAYERS} layers in turn")
    print(f"{'op':36}{'ms':>10}{'GFLOP/s':>10}{'GB/s':>8}")
    for cases in (attention_cases, small_cases, linear_cases):
        for case in cases(dtype):
            if options.only not in case.name:
                continue
            ms = best_ms(case, clock)
            print(
                f"{case.name:36}{ms:10.4f}{case.flops / ms / 1e6:10.0f}{case.bytes / ms / 1e6:8.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
