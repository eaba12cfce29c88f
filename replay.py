"""Replay of policies for K on recorded traces: what each would have earned on the very same drafts.

A trace holds, for every position of a reference output, what the draft model proposes from there (its confidences) and
how many of these tokens the target would accept. With the measured time of a draft step and of a target pass, any policy
can be played through without a model: it decides how long to draft, is told what was accepted, and moves on.
Regret: 1 - its tokens per second / those of the best fixed K in hindsight, K = 0 included.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

import results
from assemble import shared_vocabulary
from metrics import common_prefix
from models import Pair
from policy import ConfidenceStop, DynamicK, FixedK, Heuristic, Policy
from shapes import Widths
from summary import columns
from transformer import Decoder
from variants import VARIANTS, Ours

DEPTH = 12  # draft tokens recorded per position; no policy drafts more
DEFINITIONS = {
    "tokens_per_second": "decoding, without prefill, prompt lookup and siblings: rounds of measured draft steps and passes",
    "regret": "1 - tokens_per_second / that of the best fixed K (0 included) over all traces",
    "regret_per_prompt": "the mean over prompts of the same against the best fixed K of the prompt",
    "mean_k": "draft tokens per round",
}


@dataclass(frozen=True)
class Position:
    """What the draft proposes after the first tokens of an output: confidences, and how many tokens are right."""

    confidences: tuple[float, ...]
    matching: int


@dataclass(frozen=True)
class Trace:
    """One output; positions[i] is the state after i + 1 tokens. The last one leaves no room to draft."""

    prompt_id: str
    positions: tuple[Position, ...]

    def row(self) -> dict[str, Any]:
        return {"type": "trace", "prompt_id": self.prompt_id,
                "positions": [[[round(c, 4) for c in p.confidences], p.matching] for p in self.positions]}


@dataclass(frozen=True)
class Earned:
    """What a policy made of one or more traces."""

    tokens: int
    seconds: float
    rounds: int
    drafted: int

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def total(parts: Sequence[Earned]) -> Earned:
    return Earned(sum(p.tokens for p in parts), sum(p.seconds for p in parts), sum(p.rounds for p in parts),
                  sum(p.drafted for p in parts))


def play(trace: Trace, policy: Policy, draft_seconds: float, widths: Widths) -> Earned:
    """One generation under a policy, as the engine would run it."""
    policy.begin()
    place = rounds = drafted = 0
    seconds, end = 0.0, len(trace.positions)
    while place < end:
        position = trace.positions[place]
        chances: list[float] = []
        limit = min(policy.limit(), len(position.confidences), end - place - 1)
        while len(chances) < limit and policy.goes_on(chances, draft_seconds, limit - len(chances)):
            chances.append(policy.chance(position.confidences[len(chances)]))
        k = len(chances)
        accepted = min(k, position.matching)
        spent = k * draft_seconds + widths.cost(k + 1)
        policy.observe(k, position.confidences[:k], accepted, accepted + 1, spent)
        place, seconds, rounds, drafted = place + accepted + 1, seconds + spent, rounds + 1, drafted + k
    return Earned(end, seconds, rounds, drafted)


def policies(widths: Widths) -> dict[str, Callable[[], Policy]]:
    """Everything that is compared; fixed K as far as passes and traces reach."""
    largest = min(DEPTH, widths.most_rows - 1)
    fixed: dict[str, Callable[[], Policy]] = {f"fixed-{k}": partial(FixedK, k, widths) for k in range(largest + 1)}
    return fixed | {"dynamic": partial(DynamicK, widths),
                    "confidence-stop": partial(ConfidenceStop, widths, num_tokens=largest),
                    "heuristic": partial(Heuristic, widths, min(5, largest))}


def compare(traces: Sequence[Trace], draft_seconds: float, widths: Widths) -> list[dict[str, Any]]:
    """A row per policy."""
    earned = {name: [play(trace, make(), draft_seconds, widths) for trace in traces]
              for name, make in policies(widths).items()}
    fixed = [name for name in earned if name.startswith("fixed-")]
    best = max(total(earned[name]).rate for name in fixed)
    best_each = [max(earned[name][i].rate for name in fixed) for i in range(len(traces))]
    rows = []
    for name, parts in earned.items():
        whole = total(parts)
        rows.append({"type": "policy", "policy": name, "tokens_per_second": whole.rate, "regret": 1 - whole.rate / best,
                     "regret_per_prompt": statistics.mean(1 - p.rate / b for p, b in zip(parts, best_each, strict=True)),
                     "tokens_per_round": whole.tokens / whole.rounds, "mean_k": whole.drafted / whole.rounds})
    return rows


# ---- recording ----


class Recorder:
    """Drafts from every position of an output, greedily, and times the steps."""

    def __init__(self, draft: Decoder, vocab_size: int) -> None:
        self.draft, self.vocab_size = draft, vocab_size
        self.step_seconds: list[float] = []

    @torch.inference_mode()
    def record(self, prompt_id: str, prompt: Sequence[int], output: Sequence[int]) -> Trace:
        """What the draft would propose after each token of the output."""
        tokens = [*prompt, *output]
        self.draft.reserve(len(tokens) + DEPTH)
        self.draft.prefill(torch.tensor(list(prompt)), num_logits=0)
        positions = []
        for known in range(len(prompt) + 1, len(tokens) + 1):
            drafted, confidences = self._draft(tokens[known - 1], min(DEPTH, len(tokens) - known - 1))
            positions.append(Position(tuple(confidences), common_prefix(drafted, tokens[known:])))
            if self.draft.cache.length < known:  # nothing was drafted
                self.draft.forward(torch.tensor(tokens[known - 1:known]), num_logits=0)
            self.draft.cache.crop(known)
        return Trace(prompt_id, tuple(positions[:-1]))  # after the last token nothing is decoded

    def _draft(self, token: int, limit: int) -> tuple[list[int], list[float]]:
        """A greedy chain after `token`, and the probability of each of its tokens."""
        drafted: list[int] = []
        confidences: list[float] = []
        while len(drafted) < limit:
            start = time.perf_counter()
            logits = self.draft.forward(torch.tensor([token]))[-1, :self.vocab_size]
            token = int(logits.argmax())
            confidences.append(float((logits[token] - logits.logsumexp(-1)).exp()))
            drafted.append(token)
            self.step_seconds.append(time.perf_counter() - start)
        return drafted, confidences


def run(args: argparse.Namespace, pair: Pair, tasks: Sequence[Any]) -> int:
    """Record traces of the first prompts, replay all policies, write --output and print the table."""
    ours = Ours(pair, args, digests=False)
    draft, plain = ours.draft("model", "int4"), ours.runner(VARIANTS["plain"])
    recorder = Recorder(draft, shared_vocabulary(pair, ours.target, draft))
    header = results.header(args, pair, prompts=len(tasks), max_new_tokens=args.max_new_tokens, depth=DEPTH,
                            definitions=DEFINITIONS)
    with results.Writer(args.output, header) as writer:
        traces = []
        for task in tqdm(tasks, desc="traces", disable=None):
            output = plain(task.ids, args.max_new_tokens).tokens
            traces.append(recorder.record(task.id, task.ids, output))
            writer.write(traces[-1].row())
        if not recorder.step_seconds:
            raise ValueError("nothing was drafted; use a --max-new-tokens of 3 or more")
        step = statistics.median(recorder.step_seconds)
        writer.write({"type": "costs", "draft_seconds": step, "pass_seconds": dict(ours.widths.seconds)})
        rows = compare([trace for trace in traces if trace.positions], step, ours.widths)
        for row in rows:
            writer.write(row)
    print(report(rows))
    return 0


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Policies as lines, the fastest first."""
    lines = [["policy", "tokens/s", "regret", "per prompt", "tokens/round", "mean K"]]
    for row in sorted(rows, key=lambda row: -row["tokens_per_second"]):
        lines.append([row["policy"], f"{row['tokens_per_second']:.2f}", f"{row['regret']:.1%}",
                      f"{row['regret_per_prompt']:.1%}", f"{row['tokens_per_round']:.2f}", f"{row['mean_k']:.2f}"])
    return columns(lines)
