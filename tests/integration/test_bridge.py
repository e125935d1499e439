"""Prefill and decode workers whose pages are cut differently hand over to each other: the aggregated tokens.

Real workers without a router, the default model in deterministic float32. Each worker is started once and
paired with every other.
"""

from __future__ import annotations
