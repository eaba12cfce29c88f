"""What a generation is measured by. Every figure has one definition, here.

tokens are counted by id, times are in seconds, prefill is apart from decoding.

acceptance_rate   accepted / drafted tokens
tokens_per_round  emitted tokens / target passes, without prefill and the token it yields (plain decoding: 1)
tokens_per_second emitted tokens / seconds of the whole generation, prefill included (what a user feels)
decode_tokens_per_second  the same without prefill and the token it yields
first_token_seconds  from the call to the first token: the target's prefill
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Round:
    """One round: tokens drafted, checked by one target pass, and emitted. The first round of a generation is the prefill.

    origins name each token: 'prefill', 'accepted' (drafted and right), 'corrected' (the target's instead of a wrong
    draft token), 'bonus' (the target's after a draft that was right throughout) or 'plain' (nothing was drafted).
    """

    tokens: list[int]
    origins: list[str]
    source: str = "none"  # who drafted: 'model', 'lookup', 'none'
    draft_tokens: list[int] = field(default_factory=list)
    num_accepted: int = 0
    suggested: bool = False  # the first draft token came from a sibling of the round before
    num_siblings: int = 0
    sibling_hit: bool = False
    width: int = 0  # rows of the target pass, padding included
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    seconds: float = 0.0  # the whole round
    stopped: str = ""  # why drafting stopped: 'limit', 'rate', 'off', 'room', 'exhausted', 'context'
    finish_reason: str = ""  # 'end', 'stop', 'length' or 'context' in the last round
    digests: list[str] = field(default_factory=list)  # of the target's logits for each emitted token, when asked for
    details: list[dict[str, Any]] = field(default_factory=list)  # per emitted token, when asked for

    @property
    def num_drafted(self) -> int:
        return len(self.draft_tokens)


@dataclass
class Statistics:
    """The rounds of one call and what follows from them. Filled while the call runs, readable at any time."""

    rounds: list[Round] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def decode_rounds(self) -> list[Round]:
        return self.rounds[1:]

    @property
    def tokens(self) -> list[int]:
        return [token for r in self.rounds for token in r.tokens]

    @property
    def emitted(self) -> int:
        return sum(len(r.tokens) for r in self.rounds)

    @property
    def drafted(self) -> int:
        return sum(r.num_drafted for r in self.rounds)

    @property
    def accepted(self) -> int:
        return sum(r.num_accepted for r in self.rounds)

    @property
    def target_passes(self) -> int:
        return len(self.decode_rounds)

    @property
    def finish_reason(self) -> str:
        return self.rounds[-1].finish_reason if self.rounds else "length"

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_round(self) -> float | None:
        return sum(len(r.tokens) for r in self.decode_rounds) / self.target_passes if self.target_passes else None

    @property
    def seconds(self) -> float:
        return sum(r.seconds for r in self.rounds)

    @property
    def first_token_seconds(self) -> float | None:
        return self.rounds[0].seconds if self.rounds else None

    @property
    def draft_seconds(self) -> float:
        return sum(r.draft_seconds for r in self.rounds)

    @property
    def verify_seconds(self) -> float:
        return sum(r.verify_seconds for r in self.decode_rounds)

    @property
    def tokens_per_second(self) -> float | None:
        return self.emitted / self.seconds if self.seconds else None

    @property
    def decode_tokens_per_second(self) -> float | None:
        spent = sum(r.seconds for r in self.decode_rounds)
        return sum(len(r.tokens) for r in self.decode_rounds) / spent if spent else None

    def acceptance_by_position(self) -> list[tuple[int, int]]:
        """(accepted, judged) per draft position. A position after the first wrong one is never judged (censored)."""
        counts: list[tuple[int, int]] = []
        for r in self.rounds:
            for position in range(r.num_accepted + ("corrected" in r.origins)):  # not behind an end token either
                if position == len(counts):
                    counts.append((0, 0))
                accepted, judged = counts[position]
                counts[position] = (accepted + (position < r.num_accepted), judged + 1)
        return counts

    def as_dict(self) -> dict[str, Any]:
        """The figures as plain values, for results files and --json."""
        first = self.first_token_seconds
        return {
            "emitted": self.emitted, "drafted": self.drafted, "accepted": self.accepted,
            "acceptance_rate": self.acceptance_rate, "target_passes": self.target_passes,
            "tokens_per_round": self.tokens_per_round, "tokens_per_second": self.tokens_per_second,
            "decode_tokens_per_second": self.decode_tokens_per_second, "seconds": self.seconds,
            "first_token_seconds": first, "draft_seconds": self.draft_seconds, "verify_seconds": self.verify_seconds,
            "rest_seconds": self.seconds - self.draft_seconds - self.verify_seconds - (first or 0.0),
            "siblings": sum(r.num_siblings for r in self.rounds), "sibling_hits": sum(r.sibling_hit for r in self.rounds),
            "suggestions": sum(r.suggested for r in self.rounds),
            "suggestions_accepted": sum(r.suggested and r.num_accepted > 0 for r in self.rounds),
            "acceptance_by_position": self.acceptance_by_position(), "largest_draft": max(
                (r.num_drafted for r in self.rounds), default=0),
            "finish_reason": self.finish_reason, "notes": self.notes,
        }


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading elements are equal."""
    limit = min(len(first), len(second))
    return next((i for i in range(limit) if first[i] != second[i]), limit)
