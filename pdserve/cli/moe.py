"""`pdserve moe upcycle`: a mixture-of-experts checkpoint from a dense model, ready for `pdserve up`."""

from __future__ import annotations

import sys
from pathlib import Path

from pdserve.cli.bar import progress_bar
from pdserve.models.loader import load_model
from pdserve.models.upcycle import Upcycling, upcycle


def run(model: str, output: Path, made: Upcycling, dtype: str) -> None:
    """Loads, writes, says what was made. Raises ModelError and ConfigError."""
    print(f"loading {model}…", file=sys.stderr, flush=True)
    dense = load_model(model, dtype)
    with progress_bar(dense.config.num_layers + 1) as advance:
        size_bytes = upcycle(dense, output, made, lambda done, total: advance(False))
    noise = f"noise {made.noise:g}" if made.noise else "identical experts: greedy text is the dense model's"
    print(
        f"{made.num_experts} experts, {made.top_k} per token, {made.router} router; {noise}\n"
        f"{size_bytes / 1e9:.2f} GB of {dtype} weights\n"
        f"serve it with: pdserve up --model {output}"
    )
