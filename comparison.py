"""Speculative against plain decoding: what was compared, and where two outputs part."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cli import Prompt
from crosscheck import CrossCheck
from metrics import Statistics


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
        """Sums per K, in the order they were run."""
        counts = list(dict.fromkeys(row["num_speculative_tokens"] for row in self.rows))
        groups = [[row for row in self.rows if row["num_speculative_tokens"] == count] for count in counts]
        return [{"num_speculative_tokens": count, "comparisons": len(group),
                 "differences": sum(not row["equal"] for row in group),
                 **{key: sum(row[key] for row in group) for key in ("tokens", "drafted", "accepted")}}
                for count, group in zip(counts, groups, strict=True)]

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
