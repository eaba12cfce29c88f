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
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)  # ranges tried per group; the least squared error wins
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


def _round(groups: Tensor, levels: int, shrink: float) -> tuple[Tensor, Tensor, Tensor]:
    """Round groups (n, g, group) to 0..levels over their range times `shrink`: values, scales, minimums."""
    low, high = groups.amin(-1), groups.amax(-1)
    margin = (high - low) * (1 - shrink) / 2
    minimums = (low + margin).bfloat16()
    scales = ((high - margin - minimums.float()) / levels).bfloat16()
    safe = scales.float().clamp_min(torch.finfo(torch.float32).tiny)
    values = ((groups - minimums.float()[..., None]) / safe[..., None]).round_().clamp_(0, levels)
    return values, scales, minimums


def quantize(weight: Tensor, bits: int, shrinks: tuple[float, ...] = SHRINKS) -> QuantizedWeight:
    """Quantise (n, k) weights to 8 or 4 bits; each group keeps the shrink of its range with the least squared error."""
    if bits not in (4, 8):
        raise ValueError(f"{bits} bits are not supported; choose 4 or 8")
    n, k = weight.shape
    group, levels = group_size(k), 2**bits - 1
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for rows in weight.split(ROWS_AT_ONCE):
        groups = rows.float().view(-1, k // group, group)
        best, best_error = None, None
        for shrink in shrinks if bits == 4 else shrinks[:1]:
            values, scales, minimums = _round(groups, levels, shrink)
            candidate = (values.to(torch.uint8), scales, minimums)
            if len(shrinks) == 1 or bits == 8:
                best = candidate
                break
            error = (values.mul_(scales.float()[..., None]).add_(minimums.float()[..., None]).sub_(groups)).square_().sum(-1)
            if best is None or best_error is None:
                best, best_error = candidate, error
                continue
            better = error < best_error
            best = (torch.where(better[..., None], candidate[0], best[0]), torch.where(better, scales, best[1]),
                    torch.where(better, minimums, best[2]))
            best_error = torch.minimum(error, best_error)
        assert best is not None
        parts.append(best)
    values, scales, minimums = (torch.cat(column) for column in zip(*parts, strict=True))
    return QuantizedWeight(values.view(n, k), scales, minimums, bits, group)
