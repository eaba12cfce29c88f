"""The two operations of native.py on PyTorch's operators: for CUDA, for fp16, and where the kernels cannot be built.

On a CPU the bits of a row depend here on the width of the pass and on the visible length (see shapes.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quantize import QuantizedWeight


class PackedWeight:
    """A bf16 weight reordered once for oneDNN, which then reads it at the memory's speed.

    Private operators of PyTorch 2.13; tests/test_layers.py says when an upgrade changes them.
    """

    def __init__(self, weight: Tensor, rows: int = 6) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        self.nbytes = weight.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")

    @staticmethod
    def supports(weight: Tensor) -> bool:
        return (weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and torch.backends.mkldnn.is_available()
                and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Int4Weight:
    """A 4-bit weight for PyTorch's own kernels; `supports` says for which shapes there is one."""

    def __init__(self, weight: QuantizedWeight, device: torch.device) -> None:
        values = weight.values.to(device)
        if device.type == "cuda":
            self.packed = torch.ops.aten._convert_weight_to_int4pack(values[:, ::2] << 4 | values[:, 1::2], 8)
            self._multiply = torch.ops.aten._weight_int4pack_mm
        else:
            self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.int(), 1)
            self._multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        scales = weight.scales.to(device)
        zeros = (weight.minimums.to(device).float() + 8 * scales.float()).to(torch.bfloat16)  # these kernels read q - 8
        self.scales_and_zeros = torch.stack([scales, zeros], -1).transpose(0, 1).contiguous()  # (k / group, n, 2)
        self.group = weight.group
        self.nbytes = self.packed.nbytes + self.scales_and_zeros.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y = self._multiply(x, self.packed, self.group, self.scales_and_zeros)
        return y if bias is None else y + bias

    @staticmethod
    def supports(weight: QuantizedWeight, device: torch.device, dtype: torch.dtype) -> bool:
        n, k = weight.shape
        return (weight.bits == 4 and weight.group >= 32 and dtype == torch.bfloat16 and n % 64 == 0 and k % 128 == 0
                and device.type in ("cpu", "cuda"))


class TorchLinear:
    """Same contract as native.NativeLinear, in `dtype` activations."""

    def __init__(self, weight: Tensor | QuantizedWeight, bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.to(device, dtype)
        self.kernel: PackedWeight | Int4Weight | None = None
        self.weight: Tensor | QuantizedWeight | None = None
        if isinstance(weight, QuantizedWeight):
            if Int4Weight.supports(weight, device, dtype):
                self.kernel = Int4Weight(weight, device)
            else:  # restored on each use: slow, but as small as promised
                self.weight = QuantizedWeight(weight.values.to(device), weight.scales.to(device),
                                              weight.minimums.to(device), weight.bits, weight.group)
        elif PackedWeight.supports(weight):
            self.kernel = PackedWeight(weight)
        else:
            self.weight = weight.to(device, dtype)

    @property
    def nbytes(self) -> int:
        held = self.kernel or self.weight
        assert held is not None
        return held.nbytes

    def rows(self, index: Tensor) -> Tensor:
        """Rows of an unpacked float weight, (W,) -> (W, k): a tied head serves as the embedding too."""
        assert isinstance(self.weight, Tensor)
        return self.weight[index]

    def _project(self, x: Tensor) -> Tensor:
        if self.kernel is not None:
            return self.kernel(x, self.bias)
        weight = self.weight.dequantize().to(x.dtype) if isinstance(self.weight, QuantizedWeight) else self.weight
        assert weight is not None
        return F.linear(x, weight, self.bias)

    def __call__(self, x: Tensor, norm: Tensor | None = None, eps: float = 0.0, swiglu: bool = False,
                 residual: Tensor | None = None) -> Tensor:
        if norm is not None:
            x = rms_norm(x, norm, eps)
        if swiglu:
            gate, up = x.chunk(2, dim=-1)
            x = F.silu(gate) * up
        y = self._project(x)
        return y if residual is None else residual + y  # (W, n)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square normalisation over the last dimension, computed in fp32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: x (W, heads, head_dim), cos and sin (W, head_dim / 2)."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query attention without copying K and V: the query heads of a group become rows.

    queries (W, heads, head_dim); keys and values (kv_heads, L, head_dim); mask (W, L), True = may see. -> (W, heads * head_dim)
    """
    rows, heads, dim = queries.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    folded = queries.view(rows, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, group * rows, dim)
    mixed = F.scaled_dot_product_attention(folded, keys[None], values[None], attn_mask=mask.repeat(group, 1))
    return mixed.view(kv_heads, group, rows, dim).permute(2, 0, 1, 3).reshape(rows, heads * dim)
