"""Which widths of a target pass give the same bits on this machine: measured on the real model, by `verify.py --shapes`.

One sequence is run in passes of each candidate width; widths whose logits and KV entries agree to the bit at every
position form a class, and the engine may mix the widths of one class freely.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm

from shapes import CANDIDATES, FIXED_WIDTH, Widths
from transformer import Decoder

CONTEXT, POSITIONS = 40, 25  # tokens of the sequence: read first, then compared


@dataclass(frozen=True)
class Shape:
    """One width: a digest of logits and KV entries per position, and the seconds of a pass."""

    width: int
    digests: tuple[str, ...]
    seconds: float

    def num_equal(self, other: Shape) -> int:
        """At how many positions both give the same bits."""
        return sum(a == b for a, b in zip(self.digests, other.digests, strict=True))


def run_shape(target: Decoder, tokens: torch.Tensor, width: int) -> Shape:
    """The same positions in passes of one width: first one row and padding, as in plain decoding, then full passes."""
    target.cache.crop(CONTEXT)
    logits: list[torch.Tensor] = []
    seconds: list[float] = []
    while len(logits) < POSITIONS:
        start = CONTEXT + len(logits)
        rows = min(width if logits else 1, POSITIONS - len(logits))
        ids = torch.cat([tokens[start:start + rows], tokens[start + rows - 1].expand(width - rows)])
        begun = time.perf_counter()
        found = target.forward(ids)
        if target.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
        logits += found[:rows].cpu().unbind()
        target.cache.crop(start + rows)
    digests = tuple(position_digest(target, CONTEXT + i, row) for i, row in enumerate(logits))
    return Shape(width, digests, statistics.median_low(seconds))


def position_digest(target: Decoder, slot: int, logits: torch.Tensor) -> str:
    """Equal digests: the same logits and the same KV entries in all layers, to the bit."""
    digest = hashlib.blake2b(logits.numpy().tobytes(), digest_size=8)
    for entries in (target.cache.keys, target.cache.values):
        digest.update(entries[:, :, slot].contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


@torch.inference_mode()
def measure_shapes(target: Decoder) -> list[Shape]:
    """All candidates on one sequence of random tokens after one context."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(target.config.vocab_size, (CONTEXT + POSITIONS,), generator=generator)
    target.reserve(CONTEXT + POSITIONS + max(CANDIDATES))
    target.prefill(tokens[:CONTEXT])
    target.forward(tokens[:max(CANDIDATES)])  # warm up
    return [run_shape(target, tokens, width) for width in tqdm(CANDIDATES, desc="widths", leave=False)]


def largest_class(shapes: Sequence[Shape]) -> list[Shape]:
    """The most widths that agree at every position; of classes of one size, the one with the widest pass."""
    classes: dict[tuple[str, ...], list[Shape]] = {}
    for shape in shapes:
        classes.setdefault(shape.digests, []).append(shape)
    return max(classes.values(), key=lambda members: (len(members), members[-1].width))


def proven_widths(shapes: Sequence[Shape], agreeing: Sequence[Shape], native: bool) -> Widths:
    """What the engine may use; with no two widths equal, one fixed width."""
    if len(agreeing) == 1:
        return Widths({shape.width: shape.seconds for shape in shapes if shape.width == FIXED_WIDTH}, any_width=False)
    seconds, slowest = {}, 0.0
    for shape in sorted(agreeing, key=lambda shape: shape.width):
        slowest = max(slowest, shape.seconds)  # as in shapes.measure_seconds: wider is never taken to be cheaper
        seconds[shape.width] = slowest
    return Widths(seconds, any_width=native and len(agreeing) == len(shapes))
