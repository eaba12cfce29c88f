"""Peak memory of a variant, each in a fresh process: a peak never sinks, so one process would hide all but the largest."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import re
import resource
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import results
from models import Pair, load_pair
from variants import VARIANTS, HuggingFace, Ours


def peak_rss_mb() -> float:
    """The largest resident set of this process so far, in MB.

    Linux: VmHWM of its address space; ru_maxrss there starts with the peak of the process that launched this one.
    """
    with contextlib.suppress(OSError, AttributeError):
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024 / 1e6  # type: ignore[index]
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def measure(name: str, args: argparse.Namespace, prompt: Sequence[int]) -> dict[str, Any]:
    """In the fresh process: load what the variant needs, generate once, and report the peak."""
    if args.threads:
        torch.set_num_threads(args.threads)
    pair, variant = load_pair(args.pair, args.target, args.draft), VARIANTS[name]
    side = HuggingFace(pair, args) if variant.family == "hf" else Ours(pair, args, digests=False)
    side.runner(variant)(prompt, args.max_new_tokens)
    peak, how = peak_rss_mb(), "resident set, loading included"
    if args.device.type == "cuda":
        peak, how = torch.cuda.max_memory_allocated(args.device) / 1e6, "allocated on the GPU, loading included"
    return {"type": "memory", "peak_mb": peak, "how": how} | variant.row()


def in_fresh_process(name: str, args: argparse.Namespace, prompt: Sequence[int]) -> dict[str, Any]:
    """`measure` in a new interpreter, which shares nothing with this one."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, name, args, list(prompt)).result()


def run(args: argparse.Namespace, pair: Pair, prompt: Sequence[int]) -> int:
    """benchmark.py --memory: a row per variant, and a line of each on stdout."""
    header = results.header(args, pair, variants=list(args.variants), max_new_tokens=args.max_new_tokens)
    with results.Writer(args.output, header) as writer:
        for name in tqdm(args.variants, desc="variants", disable=None):
            row = in_fresh_process(name, args, prompt)
            writer.write(row)
            tqdm.write(f"{row['label']:30} {row['peak_mb']:8,.0f} MB  ({row['how']})", file=sys.stdout)
    return 0
