"""All layers of a dense decoder in one call of the compiled library, and the descriptors it takes.

What lives here: the C side's structures and the call. What does not: which decoders fit
(`pdserve.models.fused`).

Legend: T tokens, E hidden size, R rows whose logits are wanted, V vocabulary, D head dim.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pdserve.kernels.attention_meta import AttentionMeta
from pdserve.kernels.kv_view import KVView
from pdserve.kernels.linear import PackedLinear
from pdserve.kernels.native import DTYPE_CODE, check, library
from pdserve.kernels.quant_linear import QuantLinear


class _Linear(ctypes.Structure):
    """The C++ side's `StackLinear` (csrc/stack.cpp)."""

    _fields_ = (
        ("quant", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_out", ctypes.c_int64),
        ("num_in", ctypes.c_int64),
    )


class _Layer(ctypes.Structure):
    """The C++ side's `StackLayer`."""

    _fields_ = (
        ("qkv", _Linear),
        ("out", _Linear),
        ("gate_up", _Linear),
        ("down", _Linear),
        ("mlp_norm", ctypes.c_void_p),
        ("next_norm", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("eps", ctypes.c_float),
    )


class _Stack(ctypes.Structure):
    """The C++ side's `StackDesc`."""

    _fields_ = (
        ("layers", ctypes.c_void_p),
        ("head", _Linear),
        ("first_norm", ctypes.c_void_p),
        ("num_layers", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("dtype", ctypes.c_int),
    )


class _Step(ctypes.Structure):
    """The C++ side's `StackStep`."""

    _fields_ = (
        ("kv", ctypes.c_void_p),
        ("meta", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("seconds", ctypes.c_void_p),
    )


PHASES = ("rows", "qkv", "out", "gate_up", "down", "head", "write", "attention")
"""The C++ side's `Phase` (csrc/phases.h): what it takes to make and quantise rows, products by layer, rotary
positions and writing pages, attention."""


class PhaseSeconds:
    """Adds up where the time of steps goes, while it is on."""

    def __init__(self) -> None:
        self.on = False
        self._seconds = (ctypes.c_double * len(PHASES))()

    @property
    def native(self) -> int | None:
        """Address for the C++ side, or None."""
        return ctypes.addressof(self._seconds) if self.on else None

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        taken = dict(zip(PHASES, self._seconds, strict=True))
        ctypes.memset(self._seconds, 0, ctypes.sizeof(self._seconds))
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class StackLayer:
    """One layer's weights. mlp_norm_E: before the MLP; next_norm_E: after it. q_norm_D, k_norm_D: or None, of
    eps `eps`. window: 0 for all positions.
    """

    qkv: PackedLinear | QuantLinear
    out: PackedLinear | QuantLinear
    gate_up: PackedLinear | QuantLinear
    down: PackedLinear | QuantLinear
    mlp_norm_E: torch.Tensor
    next_norm_E: torch.Tensor
    q_norm_D: torch.Tensor | None
    k_norm_D: torch.Tensor | None
    window: int
    scale: float
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Layers, head and norms of one dtype. num_heads: of queries."""

    layers: Sequence[StackLayer]
    head: PackedLinear | QuantLinear
    first_norm_E: torch.Tensor
    num_heads: int
    eps: float
    seconds: PhaseSeconds = field(init=False, repr=False, default_factory=PhaseSeconds)
    _native: int = field(init=False, repr=False)
    _keep: tuple[object, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        layers = (_Layer * len(self.layers))(*(_layer(layer) for layer in self.layers))
        stack = _Stack(
            ctypes.addressof(layers), _linear(self.head), self.first_norm_E.data_ptr(), len(self.layers),
            self.first_norm_E.shape[0], self.num_heads, self.eps, DTYPE_CODE[self.first_norm_E.dtype],
        )  # fmt: skip
        object.__setattr__(self, "_keep", (layers, stack))
        object.__setattr__(self, "_native", ctypes.addressof(stack))

    def run(
        self,
        residual_TE: torch.Tensor,
        cos_TD: torch.Tensor,
        sin_TD: torch.Tensor,
        kv: KVView,
        meta: AttentionMeta,
        rows_R: torch.Tensor,
    ) -> torch.Tensor:
        """Logits [R, V], float32, with keys and values written. residual_TE: embeddings; used up.

        cos_TD, sin_TD: float32. rows_R: int64, ascending. Raises InternalError for a page outside the pool.
        """
        assert residual_TE.is_contiguous()
        assert residual_TE.dtype is self.first_norm_E.dtype
        assert kv.takes(residual_TE.dtype)
        logits_RV = torch.empty(rows_R.numel(), self.head.num_out)
        step = _Step(
            kv.native, meta.native, cos_TD.data_ptr(), sin_TD.data_ptr(), meta.slots_T.data_ptr(),
            residual_TE.data_ptr(), rows_R.data_ptr(), logits_RV.data_ptr(), residual_TE.shape[0],
            rows_R.numel(), self.seconds.native,
        )  # fmt: skip
        check(library().pds_stack(self._native, ctypes.addressof(step)))
        return logits_RV


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _linear(linear: PackedLinear | QuantLinear) -> _Linear:
    quant = linear.native if isinstance(linear, QuantLinear) else None
    return _Linear(quant, linear.weight.data_ptr(), _pointer(linear.bias), linear.num_out, linear.num_in)


def _layer(layer: StackLayer) -> _Layer:
    return _Layer(
        _linear(layer.qkv), _linear(layer.out), _linear(layer.gate_up), _linear(layer.down),
        layer.mlp_norm_E.data_ptr(), layer.next_norm_E.data_ptr(), _pointer(layer.q_norm_D),
        _pointer(layer.k_norm_D), layer.window, layer.scale, layer.eps,
    )  # fmt: skip
