"""The form of weights a worker computes with: its wish, its CPU and its model put before the rule.

What lives here: finding the facts. What does not: the rule (`pdserve.config.precision`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from pdserve.config.precision import EXACT, Choice, CpuFacts, ModelFacts, Wish, choose
from pdserve.config.worker import WorkerConfig
from pdserve.errors import ConfigError
from pdserve.kernels.build import has_byte_products
from pdserve.kvcache.layout import INT8
from pdserve.models.facts import facts_of


def chosen(wish: Wish, model: str) -> Choice:
    """The form for a wish, with this machine's CPU. model: as for `load_model`; its headers are read for
    precision fast. Raises ModelError."""
    if wish.precision == EXACT:
        return choose(wish, ModelFacts(), CpuFacts())
    return choose(wish, facts_of(model, wish.role), cpu_facts())


def cpu_facts() -> CpuFacts:
    """Of this machine."""
    try:
        return CpuFacts(byte_products=has_byte_products())
    except ConfigError:
        return CpuFacts(kernels=False)


def settled(config: WorkerConfig, progress: Callable[[str], None]) -> WorkerConfig:
    """The configuration with weights and pages named. progress: hears what was chosen and why."""
    wish = Wish(
        role=config.role, precision=config.precision, weights=config.weights,
        kv_mixing=config.mixing, ranks=config.tp,
    )  # fmt: skip
    choice = chosen(wish, config.model)
    config = dataclasses.replace(config, weights=choice.weights)
    if config.kv_dtype is None and choice.int8_pages:
        config = dataclasses.replace(config, kv_dtype=INT8)
    what = f"{choice.weights} with KV in {config.page_dtype}, {choice.why}"
    progress("loading the model" if config.precision == EXACT else f"loading the model: {what}")
    return config
