"""Rotary position embedding: frequencies of every scaling kind, and the table of cosines and sines.

What lives here: which angle a position turns by. What does not: turning queries and keys (a kernel).

Sources: RoPE (arXiv 2104.09864), linear (arXiv 2306.15595), dynamic NTK, YaRN (arXiv 2309.00071),
llama3 (the Llama 3.1 model card); "factors" are GGUF's per-frequency divisors.

Dynamic NTK beyond the original length: a row's angle depends on its own position alone (base of a
sequence that ends there). That is what a token-by-token decode computes, and it makes keys independent
of chunking, batching and of which worker computed them; for positions within the original length it
equals plain RoPE.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import torch


class RopeKind(StrEnum):
    """How frequencies are scaled to longer contexts."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"
    FACTORS = "factors"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """A model's rotary embedding.

    rotary_dim: elements of a head that turn, even. original_context: tokens the model was trained on
    before scaling. attention_factor: multiplies cosines and sines (YaRN). freq_factors: divisors, one per
    frequency (kind "factors").
    """

    kind: RopeKind = RopeKind.DEFAULT
    theta: float = 10_000.0
    rotary_dim: int
    original_context: int
    factor: float = 1.0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    freq_factors: tuple[float, ...] = ()


def _exponents(dim: int) -> torch.Tensor:
    return torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim


def _plain(theta: float, dim: int) -> torch.Tensor:
    return 1.0 / (theta ** _exponents(dim))


def _llama3(config: RopeConfig) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended."""
    freqs = _plain(config.theta, config.rotary_dim)
    low, high, length = config.low_freq_factor, config.high_freq_factor, config.original_context
    wavelength = 2 * math.pi / freqs
    scaled = torch.where(wavelength > length / low, freqs / config.factor, freqs)
    smooth = (length / wavelength - low) / (high - low)
    blended = (1 - smooth) * scaled / config.factor + smooth * scaled
    between = (wavelength >= length / high) & (wavelength <= length / low)
    return torch.where(between, blended, scaled)


def _yarn_range(config: RopeConfig) -> tuple[float, float]:
    """First and last frequency index of YaRN's ramp (arXiv 2309.00071, section 3.2)."""

    def index_of(rotations: float) -> float:
        turns = config.original_context / (rotations * 2 * math.pi)
        return config.rotary_dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = index_of(config.beta_fast), index_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    return low, high + 0.001 if low == high else high


def _yarn(config: RopeConfig) -> torch.Tensor:
    wave = config.theta ** _exponents(config.rotary_dim)
    low, high = _yarn_range(config)
    index = torch.arange(config.rotary_dim // 2, dtype=torch.float32)
    keep = 1 - torch.clamp((index - low) / (high - low), 0, 1)
    return (1.0 / (config.factor * wave)) * (1 - keep) + (1.0 / wave) * keep


def _frequencies(config: RopeConfig) -> torch.Tensor:
    """Inverse frequencies [rotary_dim/2], float32, for kinds where they do not depend on the position."""
    if config.kind is RopeKind.LLAMA3:
        return _llama3(config)
    if config.kind is RopeKind.YARN:
        return _yarn(config)
    plain = _plain(config.theta, config.rotary_dim)
    if config.kind is RopeKind.LINEAR:
        return plain / config.factor
    if config.kind is RopeKind.FACTORS:
        return plain / torch.tensor(config.freq_factors, dtype=torch.float32)
    return plain


def _dynamic_angles(config: RopeConfig, positions_T: torch.Tensor) -> torch.Tensor:
    """Angles [T, rotary_dim/2] where each position has the base of a sequence that ends with it."""
    dim, length = config.rotary_dim, config.original_context
    ends = torch.clamp(positions_T.to(torch.float64) + 1, min=float(length))
    grown = config.factor * ends / length - (config.factor - 1)
    theta = (config.theta * grown ** (dim / (dim - 2))).to(torch.float32)
    freqs = 1.0 / (theta[:, None] ** _exponents(dim)[None, :])
    return positions_T.to(torch.float32)[:, None] * freqs


def angles(config: RopeConfig, positions_T: torch.Tensor) -> torch.Tensor:
    """Angles in radians [T, rotary_dim/2], float32."""
    if config.kind is RopeKind.DYNAMIC and config.rotary_dim > 2:
        return _dynamic_angles(config, positions_T)
    return positions_T.to(torch.float32)[:, None] * _frequencies(config)[None, :]


class RopeTable:
    """Cosines and sines by position, grown on demand in blocks. Used by one thread (the compute thread).

    Rows are a whole head wide, the second half repeating the first, as the kernels want them.
    """

    BLOCK = 1024

    def __init__(self, config: RopeConfig) -> None:
        self._config = config
        self._cos = torch.empty(0, config.rotary_dim)
        self._sin = torch.empty(0, config.rotary_dim)

    def _grow(self, length: int) -> None:
        end = -(-length // self.BLOCK) * self.BLOCK
        fresh = angles(self._config, torch.arange(self._cos.shape[0], end)).repeat(1, 2)
        factor = self._config.attention_factor
        self._cos = torch.cat([self._cos, torch.cos(fresh) * factor])
        self._sin = torch.cat([self._sin, torch.sin(fresh) * factor])

    def rows(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos_TD, sin_TD), float32. positions_T: int32 or int64, not negative."""
        length = int(positions_T.max()) + 1
        if length > self._cos.shape[0]:
            self._grow(length)
        return self._cos.index_select(0, positions_T), self._sin.index_select(0, positions_T)
