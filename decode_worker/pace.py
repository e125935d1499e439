"""How far apart decode steps are while prompts are computed on the same cores. Pure (decision 5)."""

from __future__ import annotations

BURST = 16
"""With so many prompts under way steps are twice as far apart: they will soon have twice the rows."""


def pace_s(least_s: float, num_prompts: int) -> float:
    """Seconds from one step to the next, with `num_prompts` under way on this machine for this worker; 0: as
    fast as can be. least_s: of a single prompt, WorkerConfig's decode_pace_s."""
    return least_s * (1 + min(1.0, (num_prompts - 1) / BURST)) if num_prompts else 0.0
