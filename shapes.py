"""Which widths of a target pass may be used, and what each costs.

With the kernels of native.py every width gives the same bits, so all may be used; the measured seconds say which is
cheapest. On PyTorch's operators the bits depend on the width: there only widths are used that were *shown* to agree on
this machine, or a single fixed one. `verify.py --shapes` measures which, and also whether a row's bits depend on its place
in a pass of one width, which would make even a fixed width inexact.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

FIXED_WIDTH = 8  # where nothing is proven
CANDIDATES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24)


class Steppable(Protocol):
    """What is needed of a decoder to measure it."""

    cache: Any  # with `crop(length)`

    def reserve(self, slots: int) -> None: ...
    def prefill(self, token_ids: Tensor) -> Tensor: ...
    def forward(self, token_ids: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Widths:
    """seconds: the cost of a pass by width. any_width: widths in between may be used too (their cost is interpolated)."""

    seconds: Mapping[int, float]
    any_width: bool = True

    def __post_init__(self) -> None:
        if not self.seconds:
            raise ValueError("no width may be used; measure some or use Widths.fixed()")

    @classmethod
    def fixed(cls, width: int = FIXED_WIDTH) -> Widths:
        """One width for every pass."""
        return cls({width: 1.0}, any_width=False)

    @property
    def largest(self) -> int:
        return max(self.seconds)

    @property
    def most_rows(self) -> int:
        """Rows of the widest pass that may be used; beyond any need where every width may."""
        return 1 << 62 if self.any_width else self.largest

    def fit(self, rows: int) -> int:
        """The cheapest width that holds `rows` rows. Raises ValueError beyond the largest."""
        if self.any_width:
            return rows
        fitting = [width for width in self.seconds if width >= rows]
        if not fitting:
            raise ValueError(f"{rows} rows exceed the largest width in use, {self.largest}; draft fewer tokens")
        return min(fitting, key=lambda width: (self.seconds[width], width))

    def cost(self, rows: int) -> float:
        """Seconds of the pass that `fit` chooses."""
        if not self.any_width:
            return self.seconds[self.fit(rows)]
        known = self._ascending
        above = bisect.bisect_left(known, rows)
        if above == 0:
            return self.seconds[known[0]]
        if above == len(known):
            return self.seconds[known[-1]] * rows / known[-1]
        low, high = known[above - 1], known[above]
        share = (rows - low) / (high - low)
        return self.seconds[low] * (1 - share) + self.seconds[high] * share

    @functools.cached_property
    def _ascending(self) -> list[int]:
        return sorted(self.seconds)


def measure_seconds(decoder: Steppable, widths: Sequence[int], context: int = 64, rounds: int = 7,
                    budget: float = 10.0) -> dict[int, float]:
    """Seconds of an undisturbed pass by width: the fastest of `rounds`, of at least 3 where `budget` seconds are over before.

    Made monotonic, see `monotonic`.
    """
    decoder.reserve(context + max(widths))
    ids = torch.arange(context) % 50 + 5
    decoder.prefill(ids)
    fastest = dict.fromkeys(sorted(widths), math.inf)
    begun = time.perf_counter()
    for done in range(rounds):
        if done >= 3 and time.perf_counter() - begun > budget:
            break
        for width in fastest:  # interleaved: a slow moment of the machine does not fall on one width
            start = time.perf_counter()
            decoder.forward(ids[:width])[-1, 0].item()  # waits for the device
            fastest[width] = min(fastest[width], time.perf_counter() - start)
            decoder.cache.crop(context)
    return monotonic(fastest)


def monotonic(seconds: Mapping[int, float]) -> dict[int, float]:
    """No width dearer than a wider one, which could stand in for it; ascending.

    What disturbs a pass only makes it longer, so a wider one that was faster shows that the narrower one was disturbed.
    """
    widest_first = sorted(seconds, reverse=True)
    lowest = itertools.accumulate((seconds[width] for width in widest_first), min)
    return dict(reversed(list(zip(widest_first, lowest, strict=True))))
