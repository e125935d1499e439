"""Settings of a step scheduler, and the arithmetic of what can ever fit. A leaf of `sched`; no behaviour."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.errors import ConfigError
from pdserve.kvcache.layout import pages_for


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedConfig:
    """How a worker fills its steps. Raises ConfigError for a count below its lowest value."""

    page_size: int
    """Rows per KV page."""
    chunk_tokens: int
    """Prefill chunks end at absolute multiples of this many tokens (but see tail_tokens)."""
    token_budget: int
    """Rows per step to aim at. Decode rows always run, and a step always has room for some prefill."""
    max_num_seqs: int
    """Sequences admitted at the same time."""
    deterministic: bool = False
    """A chunk runs whole or not at all, so that its borders do not depend on neighbours."""
    tail_tokens: int = 0
    """A last chunk of more than twice so many tokens, of a prompt that is handed over, leaves all but so many
    to the chunk before it; 0: never. No later chunk hides the transfer of the last one's pages."""
    floor_pages: int = 0
    """Pages that `StepScheduler.reserve` leaves available (protocol.md §5, the prefill floor)."""
    prefix_caching: bool = True
    """Look prompts up in the prefix cache and publish full pages to it."""
    end_token_ids: tuple[int, ...] = ()
    """The model's end tokens."""
    model: str = ""
    """The model's digest, part of every content key."""
    numerics: str = ""
    """How pages are computed, part of every content key."""

    def __post_init__(self) -> None:
        for name in ("page_size", "chunk_tokens", "token_budget", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1")
        for name in ("floor_pages", "tail_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: must not be negative")

    @property
    def least_prefill_rows(self) -> int:
        """Room for prefill in a step that decode rows fill up: no prompt waits for ever behind them."""
        return self.chunk_tokens if self.deterministic else min(self.chunk_tokens, self.page_size)


def pages_needed(num_prompt: int, max_tokens: int, page_size: int) -> int:
    """Pages that a request takes at its longest. More than the pool has: it never fits; refuse it at once."""
    return pages_for(num_prompt + max_tokens, page_size)
