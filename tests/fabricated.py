"""Made-up but plausible results files for the tests of charts, tables and the trace page. Never written to results/."""

import json
import random
from pathlib import Path
from typing import Any

from findings import ABLATIONS, ORDER

Row = dict[str, Any]
CATEGORIES = {"chat": 0.75, "code": 1.3, "edit": 1.55, "math": 1.05, "passage": 1.2, "qa": 0.8, "summarise": 1.1,
              "translate": 0.7}  # how fast speculation is there, against the average
SPEED = {"hf-greedy": 3.1, "hf-assisted": 4.2, "hf-assisted-k4": 4.0, "hf-lookup": 4.4, "plain": 6.5, "k2": 12.1,
         "k4": 15.2, "k7": 16.3, "k11": 14.9, "dynamic": 18.0, "dynamic-no-siblings": 16.4, "dynamic-model": 16.9,
         "dynamic-lookup": 9.8, "dynamic-bf16": 11.2, "dynamic-int8": 15.8, "dynamic-self": 10.1,
         "k4-bf16": 9.5, "stop-bf16": 10.6, "stop-int4": 16.6}  # tokens per second
LABELS = {"plain": "plain decoding", "dynamic": "dynamic K", "hf-greedy": "Hugging Face greedy",
          "hf-assisted": "Hugging Face assisted", "hf-assisted-k4": "Hugging Face assisted, K = 4",
          "hf-lookup": "Hugging Face prompt lookup", "dynamic-no-siblings": "dynamic K, no siblings",
          "dynamic-model": "dynamic K, draft model only", "dynamic-lookup": "dynamic K, prompt lookup only",
          "dynamic-bf16": "dynamic K, bf16 draft", "dynamic-int8": "dynamic K, int8 draft",
          "dynamic-self": "dynamic K, the target's int4 copy drafts", "k4-bf16": "K = 4, bf16 draft alone",
          "stop-bf16": "confidence stop, bf16 draft alone", "stop-int4": "confidence stop, int4 draft alone",
          **{f"k{k}": f"K = {k}" for k in (2, 4, 7, 11)}}
HEADER: Row = {
    "type": "header", "script": "benchmark.py", "command": "python benchmark.py", "commit": "0123456789ab", "dirty": False,
    "date": "2025-01-01T00:00:00Z", "device": "cpu", "cpu": "Imaginary(R) Xeon(R) Processor @ 2.20GHz", "cores": 2,
    "threads": 2, "dtype": "bfloat16", "target": "packaged:qwen2.5-coder-1.5b-instruct", "target_digest": "aa",
    "draft": "packaged:qwen2.5-coder-0.5b-instruct", "draft_digest": "bb", "versions": {"torch": "2.13.0"}, "seed": 0,
    "max_new_tokens": 96,
}


def write(path: Path, rows: list[Row], header: Row | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in [header or HEADER, *rows]), "utf-8")


def run_row(variant: str, category: str, number: int, repeat: int, dice: random.Random) -> Row:
    """One run of one prompt."""
    ours = variant.startswith(("dynamic", "k"))
    gain = CATEGORIES[category] if ours or variant in ("hf-assisted", "hf-lookup") else 1.0
    speed = SPEED[variant] * gain * random.Random(f"{category}{number}").uniform(0.85, 1.2) * dice.uniform(0.98, 1.02)
    first, seconds = dice.uniform(0.35, 0.5) * (1 if variant == "plain" or ours else 2.2), 96 / speed
    rounds = 95 if not ours else round(95 / (1.9 + 1.9 * gain))
    rate = min(0.97, 0.6 + 0.22 * gain + dice.uniform(-0.05, 0.05)) if ours or "assist" in variant else None
    decode = seconds - first
    return {
        "type": "run", "variant": variant, "label": LABELS[variant],
        "k": int(variant[1:]) if variant[1:].isdigit() else None,
        "family": "ours" if ours else "plain" if variant == "plain" else "hf", "prompt_id": f"{category}-{number}",
        "category": category, "repeat": repeat, "prompt_tokens": 80, "new_tokens": 96, "seconds": seconds,
        "first_token_seconds": first, "tokens_per_second": speed, "decode_tokens_per_second": 95 / decode,
        "same_ids": None if variant == "plain" else ours or dice.random() < 0.6, "same_bits": True if ours else None,
        "acceptance_rate": rate, "tokens_per_round": 95 / rounds if variant == "plain" or ours else None,
        "draft_seconds": decode * 0.3 if ours else 0.0, "verify_seconds": decode * (0.67 if ours else 0.99),
        "rest_seconds": decode * (0.03 if ours else 0.01), "target_passes": rounds,
        "acceptance_by_position": [[round(40 * (rate or 0) ** p * (rate or 0)), round(40 * (rate or 0) ** p)]
                                   for p in range(int(variant[1:]) if variant[1:].isdigit() else 12)] if ours else [],
    }


def benchmark_rows(seed: int = 1, variants: tuple[str, ...] = ORDER, prompts: int = 4, repeats: int = 1) -> list[Row]:
    """Runs and summary."""
    dice = random.Random(seed)
    rows = [run_row(variant, category, number, repeat, dice) for number in range(1, prompts + 1) for category in CATEGORIES
            for repeat in range(repeats) for variant in variants]
    value = {"mean": 4.56, "low": 4.1, "high": 5.02}
    rows.append({"type": "summary", "ratio_vs_hf_greedy": value, "ratio_vs_hf_assisted": value, "ratio_vs_plain": value,
                 "categories": {"code": {"ratio_vs_plain": value}}, "differences": 0})
    return rows


def card_rows() -> list[Row]:
    rows: list[Row] = [{"type": "bandwidth", "read_gbps": 21.4}]
    for model, weights, size in (("target", "bf16", 3.09e9), ("draft", "int4", 0.35e9), ("draft", "int8", 0.55e9),
                                 ("draft", "bf16", 0.99e9)):
        for width in (1, 2, 3, 4, 6, 8, 12, 16, 24):
            seconds = size / 19.5e9 + (0.0006 if model == "draft" else 0.0035) * max(0, width - 4) + 0.003
            rows.append({"type": "step", "model": model, "weights": weights, "backend": "native", "width": width,
                         "seconds": seconds, "bytes": size, "bandwidth_gbps": size / seconds / 1e9,
                         "share_of_machine": size / seconds / 21.4e9})
    for model, seconds in (("target", 0.275), ("draft", 0.118)):
        rows.append({"type": "step", "model": model, "weights": "bf16", "backend": "transformers", "width": 1, "bytes": 1e9,
                     "seconds": seconds, "bandwidth_gbps": 11.0, "share_of_machine": 0.5})
    for acceptance in (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95):
        k = round(1 / (1 - acceptance))
        speedup = (1 - acceptance ** (k + 1)) / (1 - acceptance) / (1 + 0.13 * k + 0.02 * max(0, k - 3))
        rows.append({"type": "prediction", "acceptance": acceptance, "k": k, "width": k + 1, "speedup": speedup,
                     "tokens_per_second": 6.5 * speedup, "advice": f"K = {k}"})
    rows += [{"type": "context", "length": n, "ms_per_token": 150 + n / 60, "round_ms": 260 + n / 50} for n in (128, 512, 2000)]
    parts = {"target": 2.9, "draft": 0.33, "cache": 0.08}
    return [*rows, {"type": "memory", "parts": parts, "total_gib": sum(parts.values())}]


def shapes_rows() -> list[Row]:
    """The native backend agrees at every width, PyTorch's at all but 1."""
    return [{"type": "shape", "backend": backend, "weights": "bf16", "width": width, "positions": 25,
             "seconds": 0.15 + width / 999, "equal": 25 if backend == "native" or width > 1 else 0,
             "proven": backend == "native" or width > 1}
            for backend in ("native", "torch") for width in (1, 2, 3, 4, 6, 8, 12, 16, 24)]


def policy_rows() -> list[Row]:
    regret = {"dynamic": -0.018, "heuristic": 0.112, "confidence-stop": 0.064} | {
        f"fixed-{k}": abs(k - 7) * 0.03 + 0.3 / (k + 1) - 0.0375 for k in range(16)}
    return [{"type": "policy", "policy": name, "tokens_per_second": 19 * (1 - value), "regret": value,
             "regret_per_prompt": value + 0.02, "tokens_per_round": 3.4, "mean_k": 5.2} for name, value in regret.items()]


def verify_rows() -> list[Row]:
    rows: list[Row] = [{"type": "comparison", "id": f"code-{n}", "num_speculative_tokens": k, "equal": True}
                       for k in ("1", "3", "15", "dynamic") for n in range(4)]
    return [*rows, *({"type": "cross-check", "id": f"code-{n}", "against": "Hugging Face generate", "verdict": verdict}
                     for n, verdict in enumerate(("equal", "near-tie")))]


def sampling_rows() -> list[Row]:
    return [{"type": "run", "variant": name, "prompt_id": f"code-{n}", "acceptance_rate": rate, "tokens_per_round": 2.5,
             "tokens_per_second": 13.2 + n, "same_as_plain": same}
            for name, rate, same in (("plain", None, None), ("gumbel", 0.54, True), ("rejection", 0.56, None)) for n in (1, 2)]


def sampling_benchmark_rows() -> list[Row]:
    """The benchmark at a temperature: coupled and rejection sampling at 3 and 2.5 times the stock's rate."""
    rows = []
    for name, label, family, seconds in (("hf-greedy", "Hugging Face sampling", "hf", 30.0), ("plain", "plain sampling", "plain", 15.0),
                                         ("dynamic", "dynamic K, coupled sampling", "ours", 10.0),
                                         ("rejection", "dynamic K, rejection sampling", "ours", 12.0)):
        rows += [{"type": "run", "variant": name, "label": label, "family": family, "prompt_id": f"code-{n}", "category": "code",
                  "repeat": 0, "new_tokens": 96, "seconds": seconds + n, "first_token_seconds": 1.0, "sampled": True,
                  "same_ids": True if name in ("plain", "dynamic") else None, "same_bits": None, "acceptance_rate": 0.5,
                  "tokens_per_round": 2.5} for n in (1, 2)]
    return rows


def verify_sampling_rows() -> list[Row]:
    return [{"type": "comparison", "id": f"code-{n}", "seed": seed, "drafter": drafter, "num_speculative_tokens": k, "equal": True,
             "drafted": 10, "accepted": 4} for drafter in ("model, int4", "model, bf16", "lookup") for k in ("1", "4", "7")
            for seed in (0, 1, 2) for n in (1, 2)]


def sampling_check_rows() -> list[Row]:
    cells = [{"type": "cell", "coupling": name, "name": f"K = {k}", "p_adjusted": 0.5 / k, "p": 0.1, "draws": 500}
             for name in ("gumbel", "rejection") for k in (1, 3)]
    pooled = [{"type": "coupling", "coupling": name, "cells": 2, "draws": 1000, "p": 0.42} for name in ("gumbel", "rejection")]
    return [*cells, *pooled, {"type": "control", "name": "control: recorded wrongly", "draws": 500, "p": 1e-40}]


def two_sample_rows() -> list[Row]:
    return [{"type": "two-sample", "variant": name, "draws": 150, "outcomes": 40, "drafted": n, "accepted": n // 2, "top": []} | more
            for name, n, more in (("plain", 0, {}), ("gumbel", 90, {"p": 0.3, "p_adjusted": 0.6}),
                                  ("rejection", 90, {"p": 0.5, "p_adjusted": 0.6}))]


def trace_rows(texts: list[str] | None = None) -> list[Row]:
    """Rounds as run_spec.py --trace records them; the given texts are spread over the tokens."""
    dice, rows = random.Random(5), list[Row]()
    words = texts or [" the", " quick", "\n", " brown", " fox", ",", " naïve", " 中", "文", "", "    ", " def", "(", "x", ")",
                      ":\n"]
    count = iter(range(10**6))
    for index in range(24):
        accepted = 0 if index == 0 else dice.choice([0, 1, 2, 3, 4, 5])
        last = "prefill" if index == 0 else dice.choice(["corrected", "bonus"]) if index % 6 else "plain"
        origins = ["accepted"] * (accepted if last != "plain" else 0) + [last]
        tokens = []
        for origin in origins:
            number = next(count)
            text, prob = words[number % len(words)], dice.uniform(0.3, 1)
            token = {"id": number, "text": text, "origin": origin, "target_prob": prob,
                     "target_top": [[number, text, prob], [7, " other", (1 - prob) / 2], [8, "\t", (1 - prob) / 4]]}
            if origin in ("accepted", "corrected"):
                token |= {"draft_confidence": dice.uniform(0.3, 1), "draft_top": [[7, " other", 0.1]]}
            tokens.append(token)
        drafted = 0 if last in ("plain", "prefill") else accepted + (last == "corrected")
        drafts = [[number, words[number % len(words)]] for number in range(60)]
        draft, verify = (0.0 if not drafted else 14.0 * drafted), 420.0 if index == 0 else 150 + dice.uniform(0, 12)
        rows.append({"type": "round", "index": index, "tokens": tokens, "source": "model" if drafted else "none",
                     "drafted": drafts[:drafted], "num_accepted": accepted if drafted else 0, "k": drafted,
                     "stopped": "rate", "width": drafted + 3, "siblings": 2, "sibling_hit": index % 7 == 3,
                     "suggested": index % 7 == 4, "draft_ms": draft, "verify_ms": verify, "total_ms": draft + verify + 1.5})
    text = "".join(token["text"] for row in rows for token in row["tokens"])
    return [*rows, {"type": "summary", "prompt": "Write a function that merges intervals.", "text": text,
                    "tokens_per_second": 17.3, "acceptance_rate": 0.81, "tokens_per_round": 3.4}]


def memory_rows() -> list[Row]:
    return [{"type": "memory", "variant": name, "label": name, "family": family, "how": "resident set, loading included",
             "peak_mb": peak} for name, family, peak in (("plain", "plain", 3400), ("hf-assisted", "hf", 4800))]


def write_all(folder: Path, **options: Any) -> Path:
    """Every file that visualize.py knows."""
    write(folder / "benchmark.jsonl", benchmark_rows(**options))
    write(folder / "memory.jsonl", memory_rows())
    write(folder / "benchmark-ablations.jsonl", benchmark_rows(variants=("plain", "dynamic", *ABLATIONS)))
    write(folder / "card.jsonl", card_rows())
    write(folder / "shapes.jsonl", shapes_rows())
    write(folder / "policies.jsonl", policy_rows())
    write(folder / "trace.jsonl", trace_rows())
    write(folder / "verify.jsonl", verify_rows())
    write(folder / "sampling.jsonl", sampling_rows())
    write(folder / "benchmark-sampling.jsonl", sampling_benchmark_rows())
    write(folder / "verify-sampling.jsonl", verify_sampling_rows())
    write(folder / "sampling-check.jsonl", sampling_check_rows())
    write(folder / "sampling-two-sample.jsonl", two_sample_rows())
    return folder
