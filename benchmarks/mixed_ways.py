"""The systems of the mixed load, their settings, and starting them. What is measured: `mixed`, `mixed_load`.

A step of a peer computes decode rows and a part of a prompt together, so the size of that part is its
inter-token latency. vLLM's documentation names 2,048 tokens as a small `max_num_batched_tokens` for latency
on accelerators; OpenVINO GenAI has 256 unless told otherwise, with `dynamic_split_fuse` on. A step of 256
takes more than 0.1 s here, the limit of the mix, so both were tried with 128 too: at 0.5 requests a second 80
instead of 40 % of requests were within the limits (OpenVINO), and 30 instead of none (vLLM). vLLM's
`long_prefill_token_threshold` leaves half of a step to prompts behind a long one; OpenVINO has nothing like
it. The first setting of each system is the one that is measured; `--pilot` runs them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.ours import Ours
from benchmarks.peers.install import install
from benchmarks.peers.process import Peer
from benchmarks.peers.specs import ENGINES
from benchmarks.peers.weights import prepare
from benchmarks.systems import say

OURS, AGGREGATED, OPENVINO, VLLM = "ours", "ours_aggregated", "openvino", "vllm"
PEERS = (OPENVINO, VLLM)
PRECISION = ("--precision", "fast")
VARIANT = {OPENVINO: "int8", VLLM: "bf16 all cores"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a system is run. serve_args: of `pdserve up`; flags: of a peer."""

    name: str
    serve_args: tuple[str, ...] = ()
    flags: tuple[tuple[str, Any], ...] = ()


def _ours(tokens: int) -> Setting:
    """As installed a step has 1,024, which takes half a second here. Short prompts overtake long ones."""
    flags = ("--prefill-chunk-tokens", str(tokens), "--token-budget", str(tokens))
    return Setting(name=f"steps of {tokens}", serve_args=flags)


def _peer(tokens: int, **more: object) -> Setting:
    return Setting(name=f"steps of {tokens}", flags=(("max_num_batched_tokens", tokens), *more.items()))


SETTINGS: dict[str, tuple[Setting, ...]] = {
    OURS: (Setting(name="as installed"),),
    AGGREGATED: (_ours(64), _ours(128)),
    OPENVINO: (_peer(128, dynamic_split_fuse=True), _peer(256, dynamic_split_fuse=True)),
    VLLM: (
        _peer(128, max_num_seqs=64, long_prefill_token_threshold=64),
        _peer(256, max_num_seqs=64, long_prefill_token_threshold=128),
    ),
}


def start(name: str, setting: Setting, loop: asyncio.Runner | None, serve_args: Sequence[str]) -> Ours | Peer:
    """One system in one setting. loop: of ours, None for a peer. Raises OursError or PeerError."""
    if loop is not None:
        return Ours(name, loop, [*PRECISION, *setting.serve_args, *serve_args])
    engine = next(e for e in ENGINES if e.name == name)
    install(engine, say)
    usual = next(v for v in engine.variants if v.name == VARIANT[name])
    prepare(usual.model, say)
    return Peer(engine, replace(usual, flags=dict(setting.flags)))
