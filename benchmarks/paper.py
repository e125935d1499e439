"""On paper: what a step costs on 8 to 64 GPUs with tensor or expert parallelism. Prints
docs/parallelism-sizes.md's tables.

    python -m benchmarks.paper

Arithmetic alone: two published model shapes, measured speeds of a GPU and its links, the bytes each plan
reads and sends. A test holds the document to this output. What it leaves out is said in the document.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, log2

NODE = 8
"""GPUs of a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Seconds, bytes and operations. reduce: bus bandwidth of an all-reduce. cross: one GPU's link to another
    node.
    """

    flops: float = 2 * 4096 * 8192 * 8192 / 0.6640e-3
    memory: float = 2 * 8192 * 8192 / 0.0349e-3
    capacity: float = 0.9 * 151397597184
    reduce: float = 2 * 7 / 8 * 2 * 268435456 / 2.04031e-3
    reduce_wait: float = 4.8e-6
    exchange: float = 7 / 8 * 2 * 268435456 / 1.50991e-3
    exchange_wait: float = 9e-6
    cross: float = 64 * 2**20 / 1.871e-3
    cross_wait: float = 17e-6


H200 = Speeds()


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One layer's attention. weights: parameters. cache_bytes: of a token. score_flops: for a token and a
    token before it. heads: KV heads; more ranks than these hold copies of the cache.
    """

    weights: float
    cache_bytes: float
    score_flops: float
    heads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model. width: hidden size. dense: parameters of the MLP in each of the layers without experts.
    expert: parameters of one. weight_bytes: of a parameter.
    """

    name: str
    layers: int
    width: int
    vocab: int
    attention: Part
    dense: float
    dense_layers: int
    num_experts: int = 0
    top_k: int = 0
    expert: float = 0.0
    weight_bytes: float = 2.0

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers

    @property
    def parameters(self) -> float:
        """All of them, an expert that every token takes included where there are experts."""
        experts = self.moe_layers * (self.num_experts + 1) * self.expert if self.num_experts else 0.0
        table = 2 * self.vocab * self.width
        return self.layers * self.attention.weights + self.dense_layers * self.dense + experts + table


LLAMA = Shape(
    name="Llama-3-70B", layers=80, width=8192, vocab=128256, dense_layers=80, dense=3 * 8192 * 28672,
    attention=Part(
        weights=8192 * 128 * (64 + 8 + 8 + 64), cache_bytes=2 * 8 * 128 * 2, score_flops=4 * 64 * 128, heads=8
    ),
)  # fmt: skip
DEEPSEEK = Shape(
    name="DeepSeek-V3", layers=61, width=7168, vocab=129280, dense_layers=3, dense=3 * 7168 * 18432,
    num_experts=256, top_k=8, expert=3 * 7168 * 2048, weight_bytes=1.0,
    attention=Part(
        weights=7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168,
        cache_bytes=576 * 2, score_flops=2 * 128 * (576 + 512), heads=1,
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """ranks: GPUs of one replica. tp: each layer is divided over all of them, with two all-reduces; else
    attention is whole for a rank's own tokens and experts are divided, with two all-to-alls in each layer
    that has experts.
    """

    name: str
    ranks: int
    tp: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Seconds of a step, and bytes that one GPU sends in it, inside its node and out of it."""

    compute: float
    talk: float
    inside: float
    outside: float
    memory: float

    @property
    def total(self) -> float:
        return self.compute + self.talk


def step(
    shape: Shape, plan: Plan, gpus: int, tokens: int, context: int, *, decode: bool, s: Speeds = H200
) -> Step:
    """One step of `tokens` tokens in all on so many GPUs. context: tokens before each, on average.

    decode: every token is a sequence's; else they are of prompts of 2 * context, and none is divided over
    replicas or, without TP, over ranks.
    """
    unit = 1 if decode else 2 * context
    of_replica = ceil(ceil(tokens / unit) / (gpus // plan.ranks))
    sequences = of_replica if plan.tp else ceil(of_replica / plan.ranks)
    mine, rows = of_replica * unit, sequences * unit
    split = plan.ranks if plan.tp else 1
    copies = min(split, shape.attention.heads)
    compute = shape.layers * _attention(shape, rows, sequences, context, split, copies, s)
    compute += shape.dense_layers * _product(shape.dense / split, rows, shape, s)
    compute += shape.moe_layers * _experts(shape, plan, mine, rows, s) if shape.num_experts else 0.0
    compute += _product(shape.vocab * shape.width / split, sequences, shape, s)
    talk, inside, outside = _reduces(shape, plan, rows, s) if plan.tp else _exchanges(shape, plan, rows, s)
    held = sequences * (context if decode else 2 * context)
    cache = held * shape.layers * shape.attention.cache_bytes / copies
    return Step(
        compute=compute, talk=talk, inside=inside, outside=outside, memory=_held(shape, plan) + cache
    )  # fmt: skip


def _attention(
    shape: Shape, rows: float, sequences: float, context: int, split: int, copies: int, s: Speeds
) -> float:
    """Projections, then scores and values over the cache; a latent cache is whole on every rank."""
    flops = rows * context * shape.attention.score_flops / split
    bytes_ = sequences * context * shape.attention.cache_bytes / copies
    return _product(shape.attention.weights / split, rows, shape, s) + max(flops / s.flops, bytes_ / s.memory)


def _product(weights: float, rows: float, shape: Shape, s: Speeds) -> float:
    """Seconds of products with so many parameters: computing, or reading them."""
    return max(2 * weights * rows / s.flops, weights * shape.weight_bytes / s.memory)


def _experts(shape: Shape, plan: Plan, mine: int, rows: float, s: Speeds) -> float:
    """A layer's experts on one rank, evenly loaded; read are those some token chose, and the shared one."""
    touched = shape.num_experts * (1 - (1 - shape.top_k / shape.num_experts) ** mine)
    flops = 2 * shape.expert * mine * shape.top_k / plan.ranks
    read = touched * shape.expert / plan.ranks * shape.weight_bytes
    shared = _product(shape.expert / (plan.ranks if plan.tp else 1), rows, shape, s)
    return max(flops / s.flops, read / s.memory) + shared


def _reduces(shape: Shape, plan: Plan, rows: float, s: Speeds) -> tuple[float, float, float]:
    """Two all-reduces a layer; across nodes: reduced in each node, then each GPU's part across, then
    gathered.
    """
    inner, nodes = min(plan.ranks, NODE), ceil(plan.ranks / NODE)
    size = rows * shape.width * 2
    inside = 2 * (inner - 1) / inner * size
    outside = 2 * (nodes - 1) / nodes * size / inner
    wait = s.reduce_wait + 2 * log2(nodes) * s.cross_wait
    times = 2 * shape.layers
    return times * (inside / s.reduce + outside / s.cross + wait), times * inside, times * outside


def _exchanges(shape: Shape, plan: Plan, rows: float, s: Speeds) -> tuple[float, float, float]:
    """Tokens to their experts and back: top-k copies each, evenly over ranks; links inside and out work at
    once.
    """
    size = rows * shape.top_k * shape.width * 2
    inner = min(plan.ranks, NODE)
    inside, outside = size * (inner - 1) / plan.ranks, size * (plan.ranks - inner) / plan.ranks
    wait = s.exchange_wait + (s.cross_wait if outside else 0.0)
    times = 2 * shape.moe_layers
    return times * (max(inside / s.exchange, outside / s.cross) + wait), times * inside, times * outside


def _held(shape: Shape, plan: Plan) -> float:
    """Bytes of weights on one GPU."""
    if plan.tp:
        return shape.parameters * shape.weight_bytes / plan.ranks
    experts = shape.moe_layers * shape.num_experts * shape.expert
    return (shape.parameters - experts + experts / plan.ranks) * shape.weight_bytes


def plans(shape: Shape, gpus: int) -> list[Plan]:
    """Those that a machine of so many GPUs can have."""
    if shape.num_experts:
        wide = [Plan(name=f"EP {gpus}", ranks=gpus, tp=False)] if gpus > NODE else []
        across = [Plan(name="TP 16", ranks=16, tp=True)] if gpus > NODE else []
        return [
            Plan(name="TP 8", ranks=8, tp=True), *across, Plan(name="EP 8", ranks=8, tp=False), *wide,
        ]  # fmt: skip
    sizes = [n for n in (2, 4, 8, 16) if n <= gpus]
    return [Plan(name=f"TP {n}", ranks=n, tp=True) for n in sizes]


GPUS = (8, 16, 32, 64)
DECODE, CONTEXT = (16, 128, 1024, 4096), 4096
PREFILL, PROMPT = (4096, 32768, 262144), 4096


def table(shape: Shape, sizes: Sequence[int], *, decode: bool) -> list[str]:
    """Milliseconds of a step and the share of communication; the shortest that fits is bold."""
    names = list(dict.fromkeys(_column(plan) for gpus in GPUS for plan in plans(shape, gpus)))
    lines = [f"| GPUs | tokens | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    for gpus in GPUS:
        for tokens in sizes:
            found = {
                _column(p): step(shape, p, gpus, tokens, _before(decode), decode=decode)
                for p in plans(shape, gpus)
            }
            fits = {name: done for name, done in found.items() if done.memory <= H200.capacity}
            best = min(fits, key=lambda name: fits[name].total, default="")
            cells = [_cell(found.get(name), name in fits, name == best) for name in names]
            lines.append(f"| {gpus} | {tokens:,} | {' | '.join(cells)} |")
    return lines


def _column(plan: Plan) -> str:
    return plan.name if plan.tp or plan.ranks == NODE else "EP all"


def _before(decode: bool) -> int:
    """Tokens before a token: the context, or on average half of a prompt."""
    return CONTEXT if decode else PROMPT // 2


def _cell(done: Step | None, fits: bool, best: bool) -> str:
    if done is None:
        return "–"
    if not fits:
        return "no room"
    words = f"{1e3 * done.total:.1f} ({100 * done.talk / done.total:.0f} %)"
    return f"**{words}**" if best else words


def traffic(shape: Shape, tokens: int) -> list[str]:
    """Bytes that one GPU sends in a decode step, MB inside the node / out of it."""
    lines = [
        "| GPUs | plan | all-reduce or all-to-all, MB inside | MB outside | ms |",
        "|---|---|---|---|---|",
    ]
    for gpus in GPUS:
        for plan in plans(shape, gpus):
            done = step(shape, plan, gpus, tokens, CONTEXT, decode=True)
            inside, outside = done.inside / 1e6, done.outside / 1e6
            lines.append(f"| {gpus} | {plan.name} | {inside:.1f} | {outside:.1f} | {1e3 * done.talk:.2f} |")
    return lines


def speeds(s: Speeds = H200) -> list[str]:
    """What the times come from."""
    return [
        f"- products: {s.flops / 1e12:.0f} TFLOP/s; memory: {s.memory / 1e12:.2f} TB/s; "
        f"room: {s.capacity / 1e9:.0f} GB",
        f"- all-reduce in a node: {s.reduce / 1e9:.0f} GB/s (bus), {1e6 * s.reduce_wait:.1f} us; "
        f"all-to-all: {s.exchange / 1e9:.0f} GB/s, {1e6 * s.exchange_wait:.0f} us",
        f"- to another node: {s.cross / 1e9:.1f} GB/s a GPU, {1e6 * s.cross_wait:.0f} us",
        *(
            f"- {m.name}: {m.parameters / 1e9:.1f} G parameters of {m.weight_bytes:.0f} B"
            for m in (LLAMA, DEEPSEEK)
        ),
    ]


SECTIONS: dict[str, Callable[[], list[str]]] = {
    "speeds": speeds,
    "Llama-3-70B, decode": lambda: table(LLAMA, DECODE, decode=True),
    "Llama-3-70B, prefill": lambda: table(LLAMA, PREFILL, decode=False),
    "Llama-3-70B, bytes of a decode step of 1,024": lambda: traffic(LLAMA, 1024),
    "DeepSeek-V3, decode": lambda: table(DEEPSEEK, DECODE, decode=True),
    "DeepSeek-V3, prefill": lambda: table(DEEPSEEK, PREFILL, decode=False),
    "DeepSeek-V3, bytes of a decode step of 1,024": lambda: traffic(DEEPSEEK, 1024),
}


def main() -> None:
    """Every table under its name."""
    for name, lines in SECTIONS.items():
        print(f"<!-- paper: {name} -->\n\n" + "\n".join(lines()) + "\n")


if __name__ == "__main__":
    main()
