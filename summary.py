"""What the rows of a benchmark say: ratios with intervals, and a table for people. The order of the rows is irrelevant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum
from typing import Any

import numpy as np

Row = Mapping[str, Any]
OF = "dynamic"  # the variant that the ratios are of
SAMPLERS = {"coupled": OF, "rejection": "rejection", "plain": "plain"}  # at a temperature above 0
RESAMPLES, SEED = 2000, 20250
RATIOS = {"ratio_vs_hf_greedy": "hf-greedy", "ratio_vs_hf_assisted": "hf-assisted", "ratio_vs_plain": "plain"}
Interval = dict[str, float]


def per_prompt(rows: Sequence[Row], variant: str, total: str = "new_tokens") -> dict[str, float]:
    """Prompt id -> tokens per second over all its repeats (or, with `total` a column of seconds, the mean of that)."""
    chosen: dict[str, list[Row]] = {}
    for row in rows:
        if row["variant"] == variant:
            chosen.setdefault(row["prompt_id"], []).append(row)
    if total == "new_tokens":
        return {key: sum(r["new_tokens"] for r in each) / fsum(r["seconds"] for r in each) for key, each in chosen.items()}
    return {key: fsum(r[total] for r in each) / len(each) for key, each in chosen.items()}


def geometric_mean(ratios: Sequence[float]) -> Interval | None:
    """Geometric mean with a 95% bootstrap interval over prompts; None of nothing."""
    if not ratios:
        return None
    logs = np.log(np.sort(np.asarray(ratios)))
    draws = np.random.default_rng(SEED).integers(len(logs), size=(RESAMPLES, len(logs)))
    low, high = np.percentile(logs[draws].mean(axis=1), [2.5, 97.5])
    return {"mean": float(np.exp(logs.mean())), "low": float(np.exp(low)), "high": float(np.exp(high))}


def ratio(rows: Sequence[Row], first: str, second: str, total: str = "new_tokens") -> Interval | None:
    """first / second over the prompts that both have finished; None where a variant is missing."""
    ours, theirs = per_prompt(rows, first, total), per_prompt(rows, second, total)
    return geometric_mean([ours[key] / theirs[key] for key in ours if key in theirs])


def is_different(row: Row) -> bool:
    """An output of ours that is not the reference's, in ids or bits."""
    return row["family"] != "hf" and (row["same_ids"] is False or row["same_bits"] is False)


def ratios(rows: Sequence[Row]) -> dict[str, Interval | None]:
    return {name: ratio(rows, OF, other) for name, other in RATIOS.items()}


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """The object that benchmark.py prints last."""
    categories = sorted({row["category"] for row in rows})
    found = {**ratios(rows), "categories": {name: ratios([r for r in rows if r["category"] == name]) for name in categories},
             "first_token_ratio_vs_hf_assisted": ratio(rows, OF, "hf-assisted", "first_token_seconds"),
             "differences": sum(is_different(row) for row in rows), "runs": len(rows)}
    if any(row.get("sampled") for row in rows):  # the variant hf-greedy samples then
        found |= {f"{name}_ratio_vs_hf_sampling": ratio(rows, variant, "hf-greedy") for name, variant in SAMPLERS.items()}
    return found


# ---- the table ----


def _number(value: float | None, digits: int = 2) -> str:
    return "n/a" if value is None else f"{value:.{digits}f}"


def _interval(value: Interval | None) -> str:
    return "n/a" if value is None else f"{value['mean']:.2f} ({value['low']:.2f}-{value['high']:.2f})"


def _line(rows: Sequence[Row], variant: str) -> list[str]:
    own = [row for row in rows if row["variant"] == variant]
    rates = geometric_mean(list(per_prompt(rows, variant).values()))
    names = ("acceptance_rate", "tokens_per_round", "first_token_seconds")
    mean = {name: _mean([row[name] for row in own]) for name in names}
    judged = [row["same_ids"] is not False and row["same_bits"] is not False for row in own if row["same_ids"] is not None]
    return [own[0]["label"], _number(rates["mean"] if rates else None, 1), _interval(ratio(rows, variant, "hf-greedy")),
            _interval(ratio(rows, variant, "hf-assisted")), _interval(ratio(rows, variant, "plain")),
            _number(mean["first_token_seconds"]), _number(mean["acceptance_rate"]), _number(mean["tokens_per_round"]),
            f"{sum(judged)}/{len(judged)}" if judged else "n/a"]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def columns(lines: Sequence[Sequence[str]]) -> str:
    """Aligned text, the first column to the left."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) if i == 0 else cell.rjust(width)
                               for i, (cell, width) in enumerate(zip(line, widths, strict=True))) for line in lines)


def table(rows: Sequence[Row], variants: Sequence[str]) -> str:
    """Variants as lines, those that have rows."""
    if not rows:
        return "nothing was measured"
    stock = "vs HF sampling" if any(row.get("sampled") for row in rows) else "vs HF greedy"
    head = ["variant", "tokens/s", stock, "vs HF assisted", "vs plain", "first token s", "accepted", "per round",
            "= reference"]
    measured = {row["variant"] for row in rows}
    return columns([head, *(_line(rows, name) for name in variants if name in measured)])
