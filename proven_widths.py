"""Which widths of a target pass give the same bits on this machine: measured on the real model, by `verify.py --shapes`.

Each candidate width runs two passes over the same tokens, the second one position later: every position but the first is
computed by two rows of the width, and its last row is padding once, as in plain decoding. A width whose rows disagree is of
no use even alone; widths that agree with each other, in all rows, may be mixed freely by the engine.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import results
from assemble import DTYPE_NAMES, load_decoder, shapes_file, store_widths
from models import Pair
from shapes import CANDIDATES, FIXED_WIDTH, Widths, measure_seconds, monotonic
from transformer import Decoder

CONTEXT = 40  # slots before the first position, filled at random: a prefill would take as long as the widest pass
SLOW_CANDIDATES = (1, 2, 4, 6, 8, 12, 16)  # for PyTorch's operators on a CPU, where one pass may take three seconds
SAME = ("target_digest", "cpu", "device", "threads")  # what other backends' rows must share to stay in the file


@dataclass(frozen=True)
class Shape:
    """One width: by position, the digests of logits and KV entries that its rows gave; and the seconds of a pass."""

    width: int
    digests: tuple[frozenset[str], ...]
    seconds: float

    def num_equal(self, other: Shape) -> int:
        """At how many positions that both computed all their rows give the same bits."""
        return sum(len(ours | theirs) == 1 for ours, theirs in zip(self.digests, other.digests, strict=False))

    def num_compared(self, other: Shape) -> int:
        return min(len(self.digests), len(other.digests))

    def agrees(self, other: Shape) -> bool:
        """Everywhere; with itself: its rows agree with each other."""
        return self.num_equal(other) == self.num_compared(other)


def run_shape(target: Decoder, tokens: torch.Tensor, width: int) -> Shape:
    """A full pass from the first position on, and one from the second on with its last row padding."""
    found: list[set[str]] = [set() for _ in range(max(width, 2))]
    fastest = float("inf")
    for first, rows in ((0, width), (1, max(width - 1, 1))):
        target.cache.length = CONTEXT + first
        ids = torch.cat([tokens[first:first + rows], tokens[first + rows - 1].expand(width - rows)])
        begun = time.perf_counter()
        logits = target.forward(ids)
        if target.device.type == "cuda":
            torch.cuda.synchronize()
        fastest = min(fastest, time.perf_counter() - begun)
        for row, own in enumerate(logits[:rows].cpu()):
            found[first + row].add(position_digest(target, CONTEXT + first + row, own))
    return Shape(width, tuple(map(frozenset, found)), fastest)


def position_digest(target: Decoder, slot: int, logits: torch.Tensor) -> str:
    """Equal digests: the same logits and the same KV entries in all layers, to the bit."""
    digest = hashlib.blake2b(logits.numpy().tobytes(), digest_size=8)
    for entries in (target.cache.keys, target.cache.values):
        digest.update(entries[:, :, slot].contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


@torch.inference_mode()
def measure_shapes(target: Decoder) -> list[Shape]:
    """All candidates on one sequence of random tokens, in ascending order."""
    slow = target.backend != "native" and target.device.type == "cpu"
    widths = SLOW_CANDIDATES if slow else CANDIDATES
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(target.config.vocab_size, (max(widths) + 1,), generator=generator)
    target.reserve(CONTEXT + max(widths) + 1)
    for entries in (target.cache.keys, target.cache.values):
        slots = entries[:, :, :CONTEXT]
        slots.copy_(torch.randn(slots.shape, generator=generator))
    target.forward(tokens[:1])  # warm up
    shapes = [run_shape(target, tokens, width) for width in tqdm(widths, desc="widths", leave=False)]
    if slow:  # two passes have to do
        return shapes
    seconds = measure_seconds(target, widths)
    return [replace(shape, seconds=seconds[shape.width]) for shape in shapes]


def largest_class(shapes: Sequence[Shape]) -> list[Shape]:
    """The most widths that agree with the widest of them, ascending; of classes of one size, the one with the widest pass.

    A width computes all positions that a narrower one does, so members agree with each other too. Empty: no width's rows
    agree even with each other.
    """
    classes = [[shape for shape in shapes if shape.width <= widest.width and shape.agrees(widest)]
               for widest in shapes if widest.agrees(widest)]
    return max(classes, key=lambda members: (len(members), members[-1].width), default=[])


def proven_widths(shapes: Sequence[Shape], agreeing: Sequence[Shape], native: bool) -> Widths:
    """What the engine may use; where no two widths agree, one fixed width, if possible one whose rows agree."""
    if len(agreeing) < 2:
        usable = [shape for shape in shapes if shape.agrees(shape)] or shapes
        fixed = min(usable, key=lambda shape: abs(shape.width - FIXED_WIDTH))
        return Widths({fixed.width: fixed.seconds}, any_width=False)
    seconds = monotonic({shape.width: shape.seconds for shape in agreeing})
    return Widths(seconds, any_width=native and len(agreeing) == len(shapes))


# ---- verify.py --shapes ----


def run(args: argparse.Namespace, pair: Pair, path: Path) -> dict[str, Any]:
    """Measure, print, keep for the engine and write the results file; what --json is to say."""
    weights = args.target_weights or DTYPE_NAMES[args.dtype]
    target = load_decoder(pair.target, weights, args.device, args.backend)
    header = results.header(args, pair, mode="shapes", backend=target.backend, weights=weights, draft=None, draft_digest=None)
    others = rows_of_others(path, header)
    with results.Writer(path, header) as writer:
        for row in others:
            writer.write(row)
        shapes = measure_shapes(target)
        agreeing, native = largest_class(shapes), target.backend == "native"
        widths = proven_widths(shapes, agreeing, native)
        store_widths(shapes_file(target, pair.target.digest), widths)
        reference = agreeing[-1] if agreeing else shapes[-1]
        rows = [{"type": "shape", "backend": target.backend, "weights": weights, "width": shape.width,
                 "equal": shape.num_equal(reference), "positions": shape.num_compared(reference), "seconds": shape.seconds,
                 "proven": bool(agreeing) and shape.width in widths.seconds} for shape in shapes]
        for row in rows:
            writer.write(row)
    print(f"{pair.target.name}, {weights}, {target.backend} backend; reference: width {reference.width}")
    print(report(rows))
    text, code = verdict(widths, bool(agreeing), native)
    print(f"verdict: {text}")
    return {"shapes": rows, "any_width": widths.any_width, "verdict": text, "exit_code": code}


def rows_of_others(path: Path, header: dict[str, Any]) -> list[dict[str, Any]]:
    """What an older file holds of other backends and weights, with their headers: the same model on the same machine."""
    try:
        old, rows = results.read(path)
    except (OSError, ValueError):
        return []
    kept = {(row.get("backend"), row.get("weights")) for row in (old, *rows)
            if row.get("type") == "header" and all(row.get(name) == header[name] for name in SAME)}
    kept -= {(header["backend"], header["weights"])}
    return [row for row in (old, *rows) if (row.get("backend"), row.get("weights")) in kept]


def report(rows: Sequence[dict[str, Any]]) -> str:
    """A line per width."""
    lines = [f"{'width':>5} {'equal positions':>15} {'ms':>8}  proven"]
    for row in rows:
        equal = f"{row['equal']} of {row['positions']}"
        lines.append(f"{row['width']:>5} {equal:>15} {1000 * row['seconds']:>8.1f}  {'yes' if row['proven'] else 'no'}")
    return "\n".join(lines)


def verdict(widths: Widths, proven: bool, native: bool) -> tuple[str, int]:
    """In words, and the exit code."""
    text = f"the engine uses {'any width' if widths.any_width else f'only width {sorted(widths.seconds)}'}"
    if native and not widths.any_width:
        return f"{text}; the native kernels should agree at every width: this is a bug", 1
    if not proven:
        return f"{text}, although a row's bits depend on its place: speculative output may differ from plain decoding's", 1
    return text, 0
