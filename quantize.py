"""Weight-only quantisation to 8 or 4 bits per weight, in groups along the input dimension.

A group of `group` neighbouring weights of one output channel shares a scale and a minimum (both bf16):
weight = scale * value + minimum. The draft may be rounded as roughly as its acceptance allows, since only the target
decides what is emitted; a quantised *target* is another model, and results name it so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 64  # weights that share a scale: 4.5 bits a weight in int4
ROWS_AT_ONCE = 4096  # bounds the working memory


@dataclass(frozen=True)
class QuantizedWeight:
    """values (n, k) uint8 below 2**bits; scales and minimums (n, k / group) bf16."""

    values: Tensor
    scales: Tensor
    minimums: Tensor
    bits: int
    group: int

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes + self.minimums.nbytes

    def dequantize(self) -> Tensor:
        """(n, k) fp32."""
        n, k = self.values.shape
        grouped = self.values.view(n, k // self.group, self.group).float()
        return (grouped * self.scales.float()[..., None] + self.minimums.float()[..., None]).view(n, k)


def group_size(k: int) -> int:
    """The largest group up to GROUP that divides k. Raises ValueError where none does."""
    for group in (GROUP, 32, 16, 8):
        if k % group == 0:
            return group
    raise ValueError(f"layers with {k} inputs cannot be quantised: no group of 8 to {GROUP} divides them; use bf16")


def quantize(weight: Tensor, bits: int) -> QuantizedWeight:
    """Quantise (n, k) weights to 8 or 4 bits, each group over its own range.

    Searching the range for the least squared error was tried and raised neither acceptance nor agreement (see the report).
    """
    if bits not in (4, 8):
        raise ValueError(f"{bits} bits are not supported; choose 4 or 8")
    n, k = weight.shape
    group, levels = group_size(k), 2**bits - 1
    parts = []
    for rows in weight.split(ROWS_AT_ONCE):
        groups = rows.to(torch.float32, copy=True).view(-1, k // group, group)
        minimums = groups.amin(-1).bfloat16()
        scales = ((groups.amax(-1) - minimums.float()) / levels).bfloat16()
        steps = scales.float().clamp_min(torch.finfo(torch.float32).tiny)[..., None]
        values = groups.sub_(minimums.float()[..., None]).div_(steps).round_().clamp_(0, levels).to(torch.uint8)
        parts.append((values, scales, minimums))
    values, scales, minimums = (torch.cat(column) for column in zip(*parts, strict=True))
    return QuantizedWeight(values.view(n, k), scales, minimums, bits, group)
