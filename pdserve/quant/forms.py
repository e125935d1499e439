"""A quantised linear layer's weight as plain data: what loaders and schemes make and what kernels pack.

What lives here: `QuantWeight`, the form of its activations, and the plain reference of its product. What does
not: how codes are chosen (`rounding` and the schemes), files' layouts (`formats`), packing for a CPU
(`pdserve.kernels`), models.

A weight is `(code - zero) * scale`, one scale (and zero) for each output and group of inputs. Codes are
signed: -128 to 127 at 8 bits, -8 to 7 at 4 bits, one code a byte. Groups are of `group_size` inputs in
order, the last one may be shorter; `group_size` 0 is one group over all inputs (a scale for each output).
GGUF's Q4_1 has a real minimum in place of a zero: `code * scale + minimum`. A kernel need not tell apart:
for both the weight is `code * scale + shift` (`QuantWeight.shift`).

Activations are quantised to symmetric signed 8 bits, codes -127 to 127, by a rule that a kernel can repeat
bit for bit in float32 (`quantise_rows`):

| form | scale |
|---|---|
| `none` | activations stay as they are (weight-only) |
| `token` | one for each token, over all inputs |
| `token_group` | one for each token and group of `Activation.group_size` inputs (the last may be shorter) |
| `tensor` | one for the layer, found in calibration; what lies outside saturates |

The dynamic rule: amax = max |x| of the token (and group); scale = amax / 127; code = round half to even of
x * (127 / amax), clamped. amax under 2**-100 gives scale 0 and codes 0. The static rule: code = round half
to even of x * (1 / scale), clamped. Products of codes are summed exactly in integers within a group; a row's
result depends on the row alone.

Legend: M rows (tokens), N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from pdserve.errors import ModelError

CODE_RANGE = {4: (-8, 7), 8: (-128, 127)}
MAX_ACTIVATION_CODE = 127
TINY = 2.0**-100
MOST = 2.0**64
"""Of a scale or minimum: more is a damaged file, and products with it would leave float32."""


class ActivationKind(enum.StrEnum):
    """Whether and how a layer's input is quantised; see the module."""

    NONE = "none"
    TOKEN = "token"  # noqa: S105
    TOKEN_GROUP = "token_group"  # noqa: S105
    TENSOR = "tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """The form of a layer's input. group_size: inputs of a group, for token_group; scale: for tensor.

    Raises ModelError for a form without its number, or with one that is not its own.
    """

    kind: ActivationKind = ActivationKind.NONE
    group_size: int = 0
    scale: float = 0.0

    def __post_init__(self) -> None:
        if (self.group_size > 0) != (self.kind is ActivationKind.TOKEN_GROUP):
            raise ModelError("Activations have a group size if and only if they are scaled by group.")
        if not 0 <= self.scale < float("inf") or (self.scale > 0) != (self.kind is ActivationKind.TENSOR):
            raise ModelError("Activations have a fixed scale, over 0, if and only if they are static.")


NO_ACTIVATION = Activation()


def num_groups(num_in: int, group_size: int) -> int:
    """Groups of a row of `num_in` inputs; group_size 0 is one group."""
    return -(-num_in // group_size) if group_size else 1


def _usable(values: torch.Tensor) -> bool:
    """Finite, and so small that products with codes and inputs are too."""
    return bool((values.abs() <= MOST).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantWeight:
    """codes_NK: int8. scale_NG: float32, finite. zero_NG: int8, minimum_NG: float32; one of them, or neither
    for symmetric. bits: 4 or 8.

    Raises ModelError for types, shapes or codes that do not fit together.
    """

    codes_NK: torch.Tensor
    scale_NG: torch.Tensor
    zero_NG: torch.Tensor | None = None
    minimum_NG: torch.Tensor | None = None
    bits: int
    group_size: int = 0
    activation: Activation = NO_ACTIVATION

    def __post_init__(self) -> None:
        if self.bits not in CODE_RANGE or self.group_size < 0:
            raise ModelError("A quantised weight has 4 or 8 bits, and groups of no negative size.")
        if self.codes_NK.dtype is not torch.int8 or self.codes_NK.dim() != 2 or not self.codes_NK.numel():
            raise ModelError("The codes of a quantised weight are an int8 matrix.")
        self._check_scales()
        low, high = CODE_RANGE[self.bits]
        if self.bits < 8 and bool(((self.codes_NK < low) | (self.codes_NK > high)).any()):
            raise ModelError(f"A quantised weight of {self.bits} bits has codes from {low} to {high}.")

    def _check_scales(self) -> None:
        shape = (self.num_out, num_groups(self.num_in, self.group_size))
        if self.scale_NG.dtype is not torch.float32 or self.scale_NG.shape != shape:
            raise ModelError("The scales of a quantised weight are float32, one for each output and group.")
        if not _usable(self.scale_NG):
            raise ModelError("A quantised weight has scales that are not usable; the file is damaged.")
        if self.zero_NG is not None and (self.zero_NG.dtype is not torch.int8 or self.zero_NG.shape != shape):
            raise ModelError("The zeros of a quantised weight are int8, one for each output and group.")
        least = self.minimum_NG
        if least is None:
            return
        if least.dtype is not torch.float32 or least.shape != shape or self.zero_NG is not None:
            raise ModelError("The minima of a quantised weight are float32, in place of zeros.")
        if not _usable(least):
            raise ModelError("A quantised weight has minima that are not usable; the file is damaged.")

    @property
    def num_out(self) -> int:
        """N."""
        return self.codes_NK.shape[0]

    @property
    def num_in(self) -> int:
        """K."""
        return self.codes_NK.shape[1]

    @property
    def packed_bytes(self) -> int:
        """Bytes of codes, scales and minima (16 bits each) and zeros as a file or a kernel stores them."""
        zeros = 0 if self.zero_NG is None else self.zero_NG.numel() * self.bits
        minima = 0 if self.minimum_NG is None else self.minimum_NG.numel() * 16
        return (self.codes_NK.numel() * self.bits + self.scale_NG.numel() * 16 + zeros + minima) // 8

    def shift(self) -> torch.Tensor | None:
        """[N, G] float32; weight = code * scale + shift, for zeros and minima alike. None for symmetric."""
        if self.zero_NG is None:
            return self.minimum_NG
        return -self.zero_NG.to(torch.float32) * self.scale_NG

    def dequantise(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The plain [N, K] weight."""
        codes_NK = self.codes_NK.to(torch.float32)
        if self.zero_NG is not None:
            codes_NK = codes_NK - spread(self.zero_NG.to(torch.float32), self.num_in, self.group_size)
        plain_NK = codes_NK * spread(self.scale_NG, self.num_in, self.group_size)
        if self.minimum_NG is not None:
            plain_NK = plain_NK + spread(self.minimum_NG, self.num_in, self.group_size)
        return plain_NK.to(dtype)

    def rows(self, index: slice | torch.Tensor) -> QuantWeight:
        """The outputs that a slice or a list of indices (int64) picks, as a weight of their own."""
        zero_NG = None if self.zero_NG is None else self.zero_NG[index]
        minimum_NG = None if self.minimum_NG is None else self.minimum_NG[index]
        return replace(
            self,
            codes_NK=self.codes_NK[index],
            scale_NG=self.scale_NG[index],
            zero_NG=zero_NG,
            minimum_NG=minimum_NG,
        )

    def with_activation(self, activation: Activation) -> QuantWeight:
        """The same weight, for another form of its input."""
        return replace(self, activation=activation)


def stacked(parts: Sequence[QuantWeight]) -> QuantWeight:
    """One weight whose outputs are those of the parts in order (q, k, v; gate, up).

    Raises ModelError if they differ in form: callers keep them apart or dequantise.
    """
    first = parts[0]
    kinds = {_form(p) for p in parts}
    if len(kinds) > 1:
        raise ModelError("Weights that share an input are quantised in different forms.")
    zeros = [p.zero_NG for p in parts if p.zero_NG is not None]
    minima = [p.minimum_NG for p in parts if p.minimum_NG is not None]
    return replace(
        first,
        codes_NK=torch.cat([p.codes_NK for p in parts]),
        scale_NG=torch.cat([p.scale_NG for p in parts]),
        zero_NG=torch.cat(zeros) if zeros else None,
        minimum_NG=torch.cat(minima) if minima else None,
    )


def _form(weight: QuantWeight) -> tuple[object, ...]:
    """What weights must share to be stacked."""
    return (
        weight.bits, weight.group_size, weight.activation, weight.num_in,
        weight.zero_NG is None, weight.minimum_NG is None,
    )  # fmt: skip


def spread(values_NG: torch.Tensor, num_in: int, group_size: int) -> torch.Tensor:
    """[N, G] by group to [N, K] by input (or broadcastable [N, 1])."""
    if not group_size:
        return values_NG
    return values_NG.repeat_interleave(min(group_size, num_in), dim=1)[:, :num_in]


def quantise_rows(x_MK: torch.Tensor, activation: Activation) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 [M, K] and scales float32 [M, A] of activations, by the module's rule; A groups, 1 without.

    Raises ModelError for the form `none`.
    """
    x_MK = x_MK.to(torch.float32)
    if activation.kind is ActivationKind.NONE:
        raise ModelError("Activations of this layer are not quantised.")
    if activation.kind is ActivationKind.TENSOR:
        scale = torch.full((x_MK.shape[0], 1), activation.scale, dtype=torch.float32)
        return _codes(x_MK * (1 / scale)), scale
    size = activation.group_size
    amax_MA = _amax(x_MK.abs(), size)
    tiny = amax_MA < TINY
    most = torch.tensor(float(MAX_ACTIVATION_CODE))  # as a number, torch would multiply it by 1 / amax
    inverse_MA = torch.where(tiny, 0.0, most / amax_MA.clamp(min=TINY))
    scale_MA = torch.where(tiny, 0.0, amax_MA / MAX_ACTIVATION_CODE)
    return _codes(x_MK * spread(inverse_MA, x_MK.shape[1], size)), scale_MA


def _amax(x_MK: torch.Tensor, group_size: int) -> torch.Tensor:
    if not group_size:
        return x_MK.amax(dim=1, keepdim=True)
    group_size = min(group_size, x_MK.shape[1])
    padding = -x_MK.shape[1] % group_size
    padded = torch.nn.functional.pad(x_MK, (0, padding))
    return padded.view(x_MK.shape[0], -1, group_size).amax(dim=2)


def _codes(x_MK: torch.Tensor) -> torch.Tensor:
    return x_MK.round().clamp_(-MAX_ACTIVATION_CODE, MAX_ACTIVATION_CODE).to(torch.int8)


def fake_quantise(x_MK: torch.Tensor, activation: Activation) -> torch.Tensor:
    """float32 [M, K]: what a kernel's codes of these activations stand for; unchanged for the form `none`."""
    if activation.kind is ActivationKind.NONE:
        return x_MK.to(torch.float32)
    codes_MK, scale_MA = quantise_rows(x_MK, activation)
    return codes_MK.to(torch.float32) * spread(scale_MA, x_MK.shape[1], activation.group_size)


def linear_reference(
    x_MK: torch.Tensor, weight: QuantWeight, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """float32 [M, N]: fake-quantised activations times the dequantised weight, plus the bias."""
    out_MN = fake_quantise(x_MK, weight.activation) @ weight.dequantise().T
    return out_MN if bias_N is None else out_MN + bias_N.to(torch.float32)
