"""How the tensors of one quantised linear lie in checkpoints of others, and in ours.

What lives here: from a linear's tensors to `QuantWeight`, and for the layouts that we write, back. What does
not: files and configurations (`pdserve.models.hf_quantised`).

- compressed-tensors, packed: `weight_packed` int32 [N, K bits / 32]; `weight_scale` [N, G]; `weight_shape`;
  `weight_zero_point` int32 [N bits / 32, G], packed over outputs.
- compressed-tensors, int: `weight` int8 [N, K]; `weight_scale` [N, G]; `weight_zero_point` int8 [N, G].
- compressed-tensors, float: `weight` FP8 [N, K]; `weight_scale` [N, 1], [1] or by block.
- AWQ, gemm: `qweight` int32 [K, N / 8]; `qzeros` int32 [G, N / 8]; `scales` [G, N]; words hold outputs in the
  order 0 2 4 6 1 3 5 7.
- GPTQ: `qweight` int32 [K bits / 32, N]; `qzeros` int32 [G, N bits / 32], less one in version 1; `scales`
  [G, N]; `g_idx` [K], the group of each input.
- FP8: `weight` FP8 [N, K]; `weight_scale` or `weight_scale_inv`: one, by output or by block.

compressed-tensors' packed codes have 2^(bits - 1) added; those of AWQ and GPTQ are unsigned.

Legend: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pdserve.errors import ModelError
from pdserve.quant.float8 import FLOAT8, Float8Weight
from pdserve.quant.forms import Activation, ActivationKind, QuantWeight, num_groups
from pdserve.quant.packing import pack_words, unpack_words

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Parts = Mapping[str, torch.Tensor]


def _part(parts: Parts, name: str) -> torch.Tensor:
    if name not in parts:
        raise ModelError(f"A quantised weight of the model has no {name}.")
    return parts[name]


def _expect(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
    if tensor.dtype is not dtype or tensor.shape != shape:
        raise ModelError(
            f"A quantised weight's {name} has another shape or type than the configuration says."
        )
    return tensor


def _scales(parts: Parts, name: str, shape: tuple[int, int]) -> torch.Tensor:
    scale = _part(parts, name).to(torch.float32)
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(shape).contiguous()
    if scale.shape == shape[:1] and shape[1] == 1:
        scale = scale[:, None]
    return _expect(scale, shape, torch.float32, name).contiguous()


def activation_of(parts: Parts, activation: Activation | None) -> Activation:
    """The form of a layer's input; None stands for a static one, whose scale is among the parts."""
    if activation is not None:
        return activation
    scale = _part(parts, "input_scale").to(torch.float32)
    if scale.numel() != 1:
        raise ModelError("A quantised weight's input_scale is not one number.")
    return Activation(kind=ActivationKind.TENSOR, scale=float(scale))


def from_packed(
    parts: Parts, shape: tuple[int, int], bits: int, group_size: int, activation: Activation | None
) -> QuantWeight:
    """compressed-tensors' packed integers."""
    each, (num_out, num_in) = 32 // bits, shape
    groups, half = num_groups(num_in, group_size), 1 << (bits - 1)
    words = _part(parts, "weight_packed")
    _expect(words, (num_out, -(-num_in // each)), torch.int32, "weight_packed")
    zero_NG = None
    if "weight_zero_point" in parts:
        packed = parts["weight_zero_point"]
        _expect(packed, (-(-num_out // each), groups), torch.int32, "weight_zero_point")
        zero_NG = (unpack_words(packed.T, bits, num_out) - half).T.contiguous().to(torch.int8)
    return QuantWeight(
        codes_NK=(unpack_words(words, bits, num_in) - half).to(torch.int8),
        scale_NG=_scales(parts, "weight_scale", (num_out, groups)),
        zero_NG=zero_NG,
        bits=bits,
        group_size=group_size,
        activation=activation_of(parts, activation),
    )


def to_packed(weight: QuantWeight, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """As `from_packed` reads it. dtype: of scales."""
    half = 1 << (weight.bits - 1)
    parts = {
        "weight_packed": pack_words(weight.codes_NK.to(torch.int16) + half, weight.bits),
        "weight_scale": weight.scale_NG.to(dtype),
        "weight_shape": torch.tensor([weight.num_out, weight.num_in]),
    }
    if weight.zero_NG is not None:
        zeros_GN = weight.zero_NG.T.to(torch.int16) + half
        parts["weight_zero_point"] = pack_words(zeros_GN, weight.bits).T.contiguous()
    return parts | _input_scale(weight)


def from_int(parts: Parts, bits: int, group_size: int, activation: Activation | None) -> QuantWeight:
    """compressed-tensors' integers, one a byte."""
    codes_NK = _part(parts, "weight")
    if codes_NK.dim() != 2:
        raise ModelError("A quantised weight of the model is not a matrix.")
    shape = (codes_NK.shape[0], num_groups(codes_NK.shape[1], group_size))
    zero_NG = parts.get("weight_zero_point")
    if zero_NG is not None and not bool(zero_NG.any()):
        zero_NG = None
    if zero_NG is not None:
        zero_NG = _expect(zero_NG.to(torch.int8), shape, torch.int8, "weight_zero_point")
    return QuantWeight(
        codes_NK=codes_NK,
        scale_NG=_scales(parts, "weight_scale", shape),
        zero_NG=zero_NG,
        bits=bits,
        group_size=group_size,
        activation=activation_of(parts, activation),
    )


def to_int(weight: QuantWeight, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """As `from_int` reads it. dtype: of scales."""
    parts = {"weight": weight.codes_NK, "weight_scale": weight.scale_NG.to(dtype)}
    if weight.zero_NG is not None:
        parts["weight_zero_point"] = weight.zero_NG
    return parts | _input_scale(weight)


def _input_scale(weight: QuantWeight) -> dict[str, torch.Tensor]:
    static = weight.activation.kind is ActivationKind.TENSOR
    return {"input_scale": torch.tensor([weight.activation.scale])} if static else {}


def from_float8(parts: Parts, *, inputs: bool, block: tuple[int, int] | None) -> Float8Weight | torch.Tensor:
    """FP8 of compressed-tensors and of others; a float32 matrix where scales go by block."""
    values_NK = _part(parts, "weight")
    if values_NK.dtype not in FLOAT8.values() or values_NK.dim() != 2:
        raise ModelError("An FP8 weight of the model is not a matrix of E4M3 or E5M2.")
    name = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
    scale = _part(parts, name).to(torch.float32)
    if block is None:
        scale_N1 = scale.reshape(-1, 1)
        return Float8Weight(values_NK=values_NK, scale_N1=scale_N1, inputs=inputs)
    rows, columns = values_NK.shape
    _expect(scale, (-(-rows // block[0]), -(-columns // block[1])), torch.float32, name)
    tall = scale.repeat_interleave(min(block[0], rows), 0)[:rows]
    wide = tall.repeat_interleave(min(block[1], columns), 1)[:, :columns]
    return values_NK.to(torch.float32) * wide


def to_float8_parts(weight: Float8Weight, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """As `from_float8` reads it. dtype: of scales."""
    return {"weight": weight.values_NK, "weight_scale": weight.scale_N1.to(dtype)}


def from_awq(parts: Parts, shape: tuple[int, int], group_size: int) -> QuantWeight:
    """AutoAWQ's gemm version, 4 bits with zeros."""
    num_out, num_in = shape
    groups = num_groups(num_in, group_size)
    words = _expect(_part(parts, "qweight"), (num_in, num_out // 8), torch.int32, "qweight")
    zeros = _expect(_part(parts, "qzeros"), (groups, num_out // 8), torch.int32, "qzeros")
    scale_GN = _expect(_part(parts, "scales").to(torch.float32), (groups, num_out), torch.float32, "scales")
    return QuantWeight(
        codes_NK=(unpack_words(words, 4, num_out, AWQ_ORDER) - 8).T.contiguous().to(torch.int8),
        scale_NG=scale_GN.T.contiguous(),
        zero_NG=(unpack_words(zeros, 4, num_out, AWQ_ORDER) - 8).T.contiguous().to(torch.int8),
        bits=4,
        group_size=group_size,
    )


def from_gptq(
    parts: Parts, shape: tuple[int, int], bits: int, group_size: int, *, zero_offset: int
) -> QuantWeight | torch.Tensor:
    """GPTQ's layout; a float32 matrix where `g_idx` gives inputs their groups out of order.

    zero_offset: added to stored zeros (1 in version 1 of the layout).
    """
    (num_out, num_in), each, half = shape, 32 // bits, 1 << (bits - 1)
    groups = num_groups(num_in, group_size)
    words = _expect(_part(parts, "qweight"), (-(-num_in // each), num_out), torch.int32, "qweight")
    zeros = _expect(_part(parts, "qzeros"), (groups, -(-num_out // each)), torch.int32, "qzeros")
    scale_GN = _expect(_part(parts, "scales").to(torch.float32), (groups, num_out), torch.float32, "scales")
    codes_NK = unpack_words(words.T.contiguous(), bits, num_in) - half
    zero_GN = unpack_words(zeros, bits, num_out) + zero_offset - half
    order_K = parts.get("g_idx")
    in_order_K = torch.arange(num_in) // (group_size or num_in)
    if order_K is not None and not torch.equal(order_K.to(torch.int64), in_order_K):
        if order_K.shape != (num_in,) or bool(((order_K < 0) | (order_K >= groups)).any()):
            raise ModelError("A quantised weight's g_idx does not name its groups.")
        index_K = order_K.to(torch.int64)
        return (codes_NK.to(torch.float32) - zero_GN.T[:, index_K]) * scale_GN.T[:, index_K]
    if bits == 8 and bool((zero_GN > 127).any()):
        return (codes_NK.to(torch.float32) - zero_GN.T[:, in_order_K]) * scale_GN.T[:, in_order_K]
    zero_NG = zero_GN.T.contiguous().to(torch.int8)
    return QuantWeight(
        codes_NK=codes_NK.to(torch.int8),
        scale_NG=scale_GN.T.contiguous(),
        zero_NG=zero_NG if bool(zero_NG.any()) else None,
        bits=bits,
        group_size=group_size,
    )
