"""The key/value cache: preallocated, appended in place, cropped by moving a number.

Entries past `length` are stale and never read by a later pass, so taking back rejected tokens costs nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 512  # slots; the visible length is rounded up to it, so that shapes repeat (the block of PyTorch's CPU attention)


class KVCache:
    """Keys and values of all layers, each (layers, kv_heads, capacity, head_dim); the first `length` slots hold tokens."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self._shape = (layers, kv_heads, head_dim)
        self._dtype, self._device = dtype, device
        self.length = self.capacity = 0
        self.keys = self.values = torch.empty(0, dtype=dtype, device=device)
        self.reserve(BLOCK)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def reserve(self, slots: int) -> None:
        """Make room for `slots` slots, in whole blocks. Only between generations: the contents are zeroed."""
        self.length = 0
        capacity = -(-slots // BLOCK) * BLOCK
        if capacity > self.capacity:
            layers, kv_heads, head_dim = self._shape
            self.keys = self.values = torch.empty(0, dtype=self._dtype)  # free the old ones first
            self.keys = torch.zeros(layers, kv_heads, capacity, head_dim, dtype=self._dtype, device=self._device)
            self.values = torch.zeros_like(self.keys)
            self.capacity = capacity
        else:  # a hidden slot has weight 0, and 0 * NaN would be NaN: one generation that overflowed would spoil the next
            self.keys[:, :, :capacity], self.values[:, :, :capacity] = 0, 0

    def check_room(self, rows: int) -> None:
        """Raise ValueError when `rows` more rows do not fit."""
        if self.length + rows > self.capacity:
            raise ValueError(f"the KV cache holds {self.length} of {self.capacity} slots and {rows} more do not fit; "
                             "reserve more before the generation")

    def append(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write (kv_heads, W, head_dim) entries at the W `slots` of one layer; `length` is moved by the caller."""
        self.keys[layer].index_copy_(1, slots, keys)
        self.values[layer].index_copy_(1, slots, values)

    def visible_length(self, rows: int) -> int:
        """How many slots a pass of `rows` rows looks at: whole blocks, unless the capacity ends first."""
        return min(self.capacity, -(-(self.length + rows) // BLOCK) * BLOCK)

    def crop(self, length: int) -> None:
        """Forget every slot from `length` on. O(1). Raises ValueError for a length outside 0..length."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop a cache of {self.length} slots to {length}; a crop only shortens")
        self.length = length
