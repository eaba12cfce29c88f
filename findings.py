"""What the results files say: their rows, and means and ratios with intervals. Used by charts.py and tables.py.

Speeds and their ratios are geometric means over prompts by the definitions of summary.py, so that the benchmark's own
last line, the tables and the charts cannot disagree; of a ratio, over the prompts that both variants ran. Other figures are
arithmetic means over prompts. The same rows, in any order, give the same figures.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import results
import summary

Row = dict[str, Any]
COMMANDS = {  # what makes a file, or its rows of one type
    "benchmark": "python benchmark.py", "memory": "python benchmark.py --memory --max-new-tokens 16",
    "card": "python benchmark.py --card", "policies": "python benchmark.py --policies --limit 24", "baseline": "python run_baseline.py",
    "benchmark-ablations": "python benchmark.py --ablations",
    "benchmark-sampling": "python benchmark.py --temperature 0.8 --limit 8 --max-new-tokens 64 "
                          "--variants plain,hf-greedy,dynamic,rejection",
    "shapes": "python verify.py --shapes", "verify": "python verify.py --limit 24",
    "verify-sampling": "python verify.py --temperature 0.8 --seeds 0,1,2 --drafters model:int4,model:bf16,lookup -K 1,4,7 "
                       "--limit 12 --max-new-tokens 16 --no-cross-checks",
    "verify-negative-control": "python verify.py --negative-control", "sampling": "python run_sampling.py",
    "verify-fp32": "python verify.py --dtype fp32 --limit 4 -K 5 --max-new-tokens 48 --output results/verify-fp32.jsonl",
    "sampling-check": "python run_sampling.py --check", "sampling-two-sample": "python run_sampling.py --two-sample",
    "trace": "python run_spec.py --trace results/trace.jsonl",
}
HEADLINE = ("hf-greedy", "hf-assisted", "hf-assisted-k4", "hf-lookup", "plain", "dynamic")
FIXED_K = ("k2", "k4", "k7", "k11")
ABLATIONS = ("dynamic-no-siblings", "dynamic-model", "dynamic-lookup", "dynamic-bf16", "dynamic-int8", "dynamic-self",
             "k4-bf16", "stop-bf16", "stop-int4")
ORDER = (*HEADLINE[:5], *FIXED_K, "dynamic", *ABLATIONS)
BASELINES = ("hf-greedy", "hf-assisted", "plain")
FIGURES = ("decode_tokens_per_second", "first_token_seconds", "acceptance_rate", "tokens_per_round")


class NoData(ValueError):
    """The results that something is drawn from are not there; the message says which command makes them."""


@dataclass(frozen=True)
class Estimate:
    """A geometric mean over n prompts with its 95% interval (none for a single prompt)."""

    mean: float
    low: float | None
    high: float | None
    n: int


def estimate(values: Sequence[float]) -> Estimate | None:
    """Geometric mean and bootstrap interval over prompts; None of nothing."""
    positive = [value for value in values if value > 0]
    found = summary.geometric_mean(positive)
    if found is None:
        return None
    low, high = (found["low"], found["high"]) if len(positive) > 1 else (None, None)
    return Estimate(found["mean"], low, high, len(positive))


def per_prompt(rows: Iterable[Row], field: str) -> dict[str, float]:
    """Prompt id -> the mean of a field over repeats, in the order of the ids; prompts without a value are left out."""
    values: dict[str, list[float]] = {}
    for row in rows:
        if row.get(field) is not None:
            values.setdefault(str(row["prompt_id"]), []).append(float(row[field]))
    return {prompt: fmean(sorted(values[prompt])) for prompt in sorted(values)}


def speed(rows: Sequence[Row]) -> Estimate | None:
    """Tokens per second of the whole generation."""
    return estimate(list(summary.per_prompt(rows, rows[0]["variant"]).values())) if rows else None


def mean(rows: Iterable[Row], field: str) -> float | None:
    """The arithmetic mean of a field over prompts, or None where no row has it."""
    values = per_prompt(rows, field)
    return fmean(values.values()) if values else None


def ratio(rows: Sequence[Row], baseline: Sequence[Row]) -> Estimate | None:
    """Geometric mean over shared prompts of speeds, rows / baseline; None where nothing is shared, never a made-up 1."""
    if not rows or not baseline:
        return None
    above, below = (summary.per_prompt(side, side[0]["variant"]) for side in (rows, baseline))
    return estimate([above[prompt] / below[prompt] for prompt in sorted(above) if below.get(prompt)])


def in_order(variants: Iterable[str]) -> list[str]:
    """Variants in the order of presentation; those not known here come last, by name."""
    return sorted(variants, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))


class Findings:
    """The results files of one folder, read when they are asked for. benchmark: the file that `runs` and `ratio` are of."""

    def __init__(self, folder: Path, benchmark: str = "benchmark") -> None:
        self.folder, self.benchmark = folder, benchmark
        self._files: dict[str, tuple[Row, list[Row]]] = {}

    def _file(self, name: str) -> tuple[Row, list[Row]]:
        if name not in self._files:
            path = self.folder / f"{name}.jsonl"
            if not path.is_file():
                raise NoData(f"{path} is missing; {make_with(name)}")
            header, rows = results.read(path)
            # In an order of their own: the order in which rows were written must not show in any figure.
            self._files[name] = header, sorted(rows, key=lambda row: json.dumps(row, sort_keys=True))
        return self._files[name]

    def header(self, name: str) -> Row:
        """The header row of a file. Raises NoData where the file is missing."""
        return self._file(name)[0]

    def rows(self, name: str, kind: str | None = None) -> list[Row]:
        """The rows of a file, or those of one type. Raises NoData where there are none."""
        rows = [row for row in self._file(name)[1] if kind in (None, row.get("type"))]
        if not rows:
            raise NoData(f"{self.folder / name}.jsonl has no {kind or 'data'} rows; {make_with(name, kind)}")
        return rows

    def optional(self, name: str, kind: str | None = None) -> list[Row]:
        """As `rows`, but nothing is nothing."""
        try:
            return self.rows(name, kind)
        except NoData:
            return []

    @cached_property
    def runs(self) -> dict[str, list[Row]]:
        """The benchmark's runs by variant, in the order of presentation. Raises NoData where there are none."""
        grouped: dict[str, list[Row]] = {}
        for row in self.rows(self.benchmark, "run"):
            grouped.setdefault(str(row["variant"]), []).append(row)
        return {name: grouped[name] for name in in_order(grouped)}

    @cached_property
    def sampled(self) -> Findings:
        """The same folder, with the benchmark that was run at a temperature above 0."""
        return Findings(self.folder, "benchmark-sampling")

    @cached_property
    def ablated(self) -> Findings:
        """The same folder, with the benchmark of what each piece is worth."""
        return Findings(self.folder, "benchmark-ablations")

    def label(self, variant: str) -> str:
        """What to call a variant: the benchmark's words, and whether it is ours; its name where it was not run."""
        return variant_label(self.runs.get(variant, [{"variant": variant}])[0])

    def ratio(self, variant: str, baseline: str, category: str | None = None) -> Estimate | None:
        """`ratio` of two variants by name, within one category if given."""
        above, below = ([row for row in self.runs.get(name, []) if category in (None, row.get("category"))]
                        for name in (variant, baseline))
        return ratio(above, below)

    def figures(self, variant: str) -> Mapping[str, Any]:
        """All figures of a variant, for single numbers in prose. Raises NoData where it was not run."""
        if variant not in self.runs:
            raise NoData(f"the variant {variant!r} has no rows; {make_with('benchmark')} --variants {variant}")
        rows = self.runs[variant]
        found: dict[str, Any] = {field: mean(rows, field) for field in FIGURES}
        found["tokens_per_second"] = as_dict(speed(rows))
        found["vs"] = {name: as_dict(self.ratio(variant, name)) for name in self.runs if name != variant}
        return found | {"n": len({row["prompt_id"] for row in rows}), "runs": len(rows), "same_ids": same(rows, "same_ids"),
                        "same_bits": same(rows, "same_bits")}

    def caption(self, name: str) -> str:
        """How a file was measured, in one line; each part of a file that was measured in parts."""
        parts = {f"{header.get('backend')}, {header.get('weights')}": header for header in self.optional(name, "header")}
        if not parts:
            return caption(self.header(name), self.optional(name, "run"))
        own = self.header(name)
        parts[f"{own.get('backend')}, {own.get('weights')}"] = own
        return "; ".join(f"{part}: {caption(parts[part])}" for part in sorted(parts))


def variant_label(row: Row) -> str:
    """What to call the variant of a row: the benchmark's words, and whether it is ours."""
    return str(row.get("label") or row["variant"]) + (" (ours)" if row.get("family") in ("plain", "ours") else "")


def make_with(name: str, kind: str | None = None) -> str:
    """The remedy for a missing file, or for rows that it lacks."""
    command = COMMANDS.get(f"{name} {kind}") or COMMANDS.get(name)
    return f"make it with: {command}" if command else "no script here makes such a file"


def as_dict(found: Estimate | None) -> dict[str, Any] | None:
    return None if found is None else vars(found)


def same(rows: Iterable[Row], field: str) -> int | None:
    """How many runs gave the reference's output; None where that was not judged."""
    judged = [bool(row[field]) for row in rows if row.get(field) is not None]
    return sum(judged) if judged else None


def caption(header: Row, runs: Sequence[Row] = ()) -> str:
    """CPU or GPU, threads, dtype, models, commit, prompts and tokens: what a figure needs to be judged by itself."""
    device = header.get("device", "cpu")
    parts = [str(header.get("cpu", "CPU not recorded")) if device == "cpu" else f"{device}",
             f"{header.get('threads', '?')} threads", str(header.get("dtype", "dtype not recorded"))]
    parts.append(f"{header.get('target', 'target not recorded')} + {header.get('draft') or 'no draft model'}")
    parts.append(f"commit {header.get('commit', 'unknown')}{' with changes' if header.get('dirty') else ''}")
    if runs:
        tokens = header.get("max_new_tokens") or max(int(row.get("new_tokens") or 0) for row in runs)
        prompts, repeats = len({row["prompt_id"] for row in runs}), len({row.get("repeat", 0) for row in runs})
        parts.append(f"{prompts} prompts × {tokens} tokens" + (f" × {repeats} repeats" if repeats > 1 else ""))
    return " · ".join(parts)
