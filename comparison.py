"""Speculative against plain decoding: who drafts, what was compared, and where two outputs part."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, replace
from typing import Any

import assemble
from assemble import Assembled
from cli import Prompt
from crosscheck import CrossCheck
from metrics import Statistics
from models import Pair
from spec_decode import SpeculativeDecoder


@dataclass
class Reference:
    """Plain decoding of one prompt with one seed; computed once, used for every K."""

    prompt: Prompt
    ids: list[int]
    seed: int
    output: Statistics


@dataclass
class Outcome:
    """All that was compared."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    references: list[Reference] = field(default_factory=list)
    checks: list[CrossCheck] = field(default_factory=list)

    @property
    def differences(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if not row["equal"]]

    @property
    def bugs(self) -> list[CrossCheck]:
        return [check for check in self.checks if check.verdict == "bug"]

    def by_count(self) -> list[dict[str, Any]]:
        """Sums per drafter and K, in the order they were run."""
        groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in self.rows:
            groups.setdefault((row["drafter"], row["num_speculative_tokens"]), []).append(row)
        return [{"drafter": drafter, "num_speculative_tokens": count, "comparisons": len(group),
                 "differences": sum(not row["equal"] for row in group),
                 **{key: sum(row[key] for row in group) for key in ("tokens", "drafted", "accepted")}}
                for (drafter, count), group in groups.items()]

    def as_dict(self) -> dict[str, Any]:
        """For --json: `differences` is 0 when all is identical."""
        return {"comparisons": len(self.rows), "differences": len(self.differences), "bugs": len(self.bugs),
                "by_num_speculative_tokens": self.by_count(), "difference_details": self.differences,
                "cross_checks": [check.row() for check in self.checks]}


def first_difference(plain: Statistics, other: Statistics) -> dict[str, Any] | None:
    """Where two outputs part, in ids or in the bits of the logits; None if nowhere."""
    columns = [[(token, digest) for r in s.rounds for token, digest in zip(r.tokens, r.digests, strict=True)]
               for s in (plain, other)]
    shortest = min(map(len, columns))
    position = next((i for i in range(shortest) if columns[0][i] != columns[1][i]), shortest)
    if position == len(columns[0]) == len(columns[1]):
        ends = plain.finish_reason, other.finish_reason
        return None if ends[0] == ends[1] else {"position": position, "kind": "ends by {} / {}".format(*ends)}
    sides = [column[position] if position < len(column) else (None, None) for column in columns]
    kind = "logit bits" if sides[0][0] == sides[1][0] else "token ids" if None not in sides[0] + sides[1] else "length"
    return {"position": position, "kind": kind, "ids_equal": plain.tokens == other.tokens,
            "tokens": [side[0] for side in sides], "digests": [side[1] for side in sides]}


# ---- several drafters around one target ----


def drafter_list(text: str) -> list[tuple[str, str]]:
    """Parse 'model:bf16,lookup' to (drafter, draft weights); weights are int4 unless given."""
    pairs = []
    for part in text.split(","):
        kind, _, weights = part.strip().partition(":")
        if kind not in assemble.DRAFTERS or weights not in ("", "bf16", "int8", "int4"):
            raise argparse.ArgumentTypeError(f"{part!r} is not DRAFTER or DRAFTER:WEIGHTS; for example model:bf16, lookup, both")
        pairs.append((kind, weights or "int4"))
    return pairs


def with_drafters(assembled: Assembled, pair: Pair, args: argparse.Namespace) -> dict[str, Assembled]:
    """What is verified, by drafter: those asked for, around the one target."""
    if len(args.drafters) == 1:
        return {drafter_name(*args.drafters[0]): assembled}
    found = {}
    loaded = {(args.drafters[0][0] == "self", args.drafters[0][1]): assembled.draft}
    for kind, weights in args.drafters:
        draft, key = None, (kind == "self", weights)
        if kind != "lookup":
            draft = loaded[key] = loaded.get(key) or assemble.load_draft(pair, kind, weights, args)
        engine = SpeculativeDecoder(assembled.target, assemble.make_drafter(kind, draft), widths=assembled.engine.widths,
                                    vocab_size=assemble.shared_vocabulary(pair, assembled.target, draft))
        if engine.vocab_size != assembled.engine.vocab_size:
            raise ValueError(f"the drafter {kind} knows another number of tokens than {args.drafters[0][0]}, so plain decoding "
                             "differs too; verify it in a run of its own")
        found[drafter_name(kind, weights)] = replace(assembled, engine=engine, draft=draft)
    return found


def drafter_name(kind: str, weights: str) -> str:
    return kind if kind == "lookup" else f"{kind}, {weights}"
