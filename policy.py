"""How long to draft: while more tokens are worth their time.

A round that drafts k tokens emits 1 + sum of reach_i tokens on average, where reach_i is the chance that draft tokens
1..i are all accepted. In the long run the tokens per second are highest when a round goes on exactly while some number of
further tokens promises more than the same time earns elsewhere: sum of reach > rate * seconds (the renewal-reward rule). It
looks further than one token because the seconds are no straight line: a row may cost nothing, and one more open a tile of the
kernels that holds several. `rate` is the call's own running rate, and what a pass costs is what the call's passes have taken:
the seconds on file say only how widths compare, for they may have been measured on a busier machine. Acceptance is
calibrated online, from the draft's confidence to the observed share, and starts anew in each call. Where drafting does not
pay, one token is drafted now and then to see whether that has changed: after a wait twice as long as before if the last such
token was wrong, half as long if it was right, and never where even a certain token would cost more than it brings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shapes import Widths

MOST_TOKENS = 15  # drafted in a round
BINS = 8  # of draft confidence
PRIOR_WEIGHT = 6.0  # observations that the prior counts for
PRIOR_ACCEPTANCE = 0.7
PRIOR_ROUNDS = 3.0  # that the prior counts for in the rate
FADE = 0.97  # what a round counts for in the rate, against the one after it
PROBE_AFTER, PROBE_AFTER_AT_MOST = 8, 32  # rounds without a draft before a probe: at first, and after some in vain


class Policy(Protocol):
    """Decides before each draft step, and learns from each round."""

    def begin(self) -> None: ...
    def limit(self) -> int: ...
    def chance(self, confidence: float) -> float: ...
    def goes_on(self, chances: Sequence[float], draft_seconds: float, room: int, next_chance: float | None = None) -> bool: ...
    def lookup_pays(self, chance: float, num_tokens: int) -> bool: ...
    def sibling_pays(self, chance: float, rows: int) -> bool: ...
    def observe(self, drafted: int, confidences: Sequence[float | None], num_accepted: int, emitted: int,
                seconds: float, pass_seconds: float | None = None) -> None: ...


@dataclass
class Calibration:
    """Draft confidence -> observed acceptance, by bins with a prior."""

    accepted: list[float] = field(default_factory=lambda: [PRIOR_WEIGHT * (i + 0.5) / BINS for i in range(BINS)])
    judged: list[float] = field(default_factory=lambda: [PRIOR_WEIGHT] * BINS)
    all_accepted: float = PRIOR_WEIGHT * PRIOR_ACCEPTANCE
    all_judged: float = PRIOR_WEIGHT

    def __call__(self, confidence: float) -> float:
        """The estimated chance that a draft token of this confidence is accepted."""
        index = min(int(confidence * BINS), BINS - 1)
        return self.accepted[index] / self.judged[index]

    @property
    def average(self) -> float:
        return self.all_accepted / self.all_judged

    def observe(self, confidences: Sequence[float | None], num_accepted: int) -> None:
        """Count the draft's own tokens (None: another's) that were judged: the accepted ones and the first wrong one."""
        for position, confidence in enumerate(confidences[:num_accepted + 1]):
            if confidence is None:
                continue
            index, right = min(int(confidence * BINS), BINS - 1), float(position < num_accepted)
            self.accepted[index] += right
            self.judged[index] += 1
            self.all_accepted = 0.95 * self.all_accepted + right
            self.all_judged = 0.95 * self.all_judged + 1


class DynamicK:
    """The rule above. `widths` says what a target pass costs; draft steps are timed as they happen."""

    def __init__(self, widths: Widths) -> None:
        self.widths, self.max_tokens = widths, min(MOST_TOKENS, widths.largest - 1)
        self.begin()

    def begin(self) -> None:
        """Forget everything: each call is judged on its own."""
        self.calibration = Calibration()
        self.skipped, self.patience = 0, PROBE_AFTER
        self.step = self.widths.cost(1) / 8  # seconds of a draft step: a guess until one was timed
        self.prior = PRIOR_ROUNDS
        self.tokens = self.seconds = self.pass_seconds = self.expected_seconds = 0.0

    @property
    def pace(self) -> float:
        """Seconds that this call's passes took, siblings and the choice of tokens included, / those on file for their drafts."""
        return self.pass_seconds / self.expected_seconds if self.expected_seconds else 1.0

    def cost(self, rows: int) -> float:
        """Seconds of a target pass, here and now."""
        return self.pace * self.widths.cost(rows)

    @property
    def rate(self) -> float:
        """Tokens per second of this call's rounds, and of some that the prior makes up: drafting four tokens or none."""
        made_up = [(sum(PRIOR_ACCEPTANCE**i for i in range(rows)), (rows - 1) * self.step + self.cost(rows))
                   for rows in (1, min(5, self.widths.largest))]
        tokens, seconds = max(made_up, key=lambda made: made[0] / made[1])
        return (self.prior * tokens + self.tokens) / (self.prior * seconds + self.seconds)

    def limit(self) -> int:
        return self.max_tokens

    def chance(self, confidence: float) -> float:
        """The estimated chance that a draft token of this confidence is accepted if those before it are."""
        return self.calibration(confidence)

    def goes_on(self, chances: Sequence[float], draft_seconds: float, room: int, next_chance: float | None = None) -> bool:
        """Whether to draft one more token, given the chances of those drafted and the seconds of a draft step.

        room: for how many more there is room; next_chance: that of each further token where it is known beforehand; else the
        average is expected.
        """
        self.step = draft_seconds or self.step
        rows, rate = len(chances) + 1, self.rate
        if not chances and self.skipped >= self.patience:  # a probe, unless not even a certain token would pay
            return rate * (draft_seconds + self.cost(2) - self.cost(1)) < 1
        reach, gain = math.prod(chances), 0.0
        expected = self.calibration.average if next_chance is None else next_chance
        for more in range(1, min(room, self.max_tokens - len(chances)) + 1):
            reach *= expected
            gain += reach
            if gain > rate * (more * draft_seconds + self.cost(rows + more) - self.cost(rows)):
                return True
        return False

    def lookup_pays(self, chance: float, num_tokens: int) -> bool:
        """Whether looked-up tokens, each accepted with this chance, promise more tokens per second than the rate so far."""
        tokens, reach, rate = 1.0, 1.0, self.rate
        for drafted in range(1, min(num_tokens, self.max_tokens) + 1):
            reach *= chance
            tokens += reach
            if tokens > rate * self.cost(drafted + 1):
                return True
        return False

    def sibling_pays(self, chance: float, rows: int) -> bool:
        """Whether a sibling that is hit with this chance is worth being row number rows + 1 of the pass.

        A hit replaces the next round's first draft token by one that is practically always accepted.
        """
        rate = self.rate
        gain = (1 - self.calibration.average) + rate * self.step
        return chance * gain > rate * (self.cost(rows + 1) - self.cost(rows)) + 0.005

    def observe(self, drafted: int, confidences: Sequence[float | None], num_accepted: int, emitted: int, seconds: float,
                pass_seconds: float | None = None) -> None:
        """Learn from a round: `confidences` are the draft model's, by position; None for a token that it did not draw.

        seconds: of the whole round; pass_seconds: of its target pass, siblings included.
        """
        self.calibration.observe(confidences, num_accepted)
        if drafted and self.skipped < self.patience:
            self.patience = PROBE_AFTER
        elif drafted:  # a probe
            self.patience = max(1, self.patience // 2) if num_accepted else min(2 * self.patience, PROBE_AFTER_AT_MOST)
        self.skipped = 0 if drafted else self.skipped + 1
        self.prior *= FADE
        self.tokens, self.seconds = FADE * self.tokens + emitted, FADE * self.seconds + seconds
        if pass_seconds is not None:
            self.pass_seconds = FADE * self.pass_seconds + pass_seconds
            self.expected_seconds = FADE * self.expected_seconds + self.widths.cost(drafted + 1)


class FixedK(DynamicK):
    """Always the same number of draft tokens (fewer where a generation ends)."""

    def __init__(self, num_tokens: int, widths: Widths) -> None:
        if num_tokens < 0:
            raise ValueError(f"the number of speculative tokens is {num_tokens}; use 0 for plain decoding or more")
        if num_tokens >= widths.most_rows:
            raise ValueError(f"{num_tokens} speculative tokens need a pass of {num_tokens + 1} rows; the largest width "
                             f"in use is {widths.largest}")
        super().__init__(widths)
        self.max_tokens = num_tokens

    def goes_on(self, chances: Sequence[float], draft_seconds: float, room: int, next_chance: float | None = None) -> bool:
        return len(chances) < self.max_tokens


class ConfidenceStop(FixedK):
    """Hugging Face's stopping rule: draft until the draft's confidence falls below a threshold (there 0.4, up to 20)."""

    def __init__(self, widths: Widths, threshold: float = 0.4, num_tokens: int = 20) -> None:
        super().__init__(min(num_tokens, widths.most_rows - 1), widths)
        self.threshold = threshold

    def chance(self, confidence: float) -> float:
        return confidence

    def goes_on(self, chances: Sequence[float], draft_seconds: float, room: int, next_chance: float | None = None) -> bool:
        return super().goes_on(chances, draft_seconds, room) and (not chances or chances[-1] >= self.threshold)


class Heuristic(FixedK):
    """Hugging Face's schedule: two tokens more after a round that was right throughout, else one less (at least one)."""

    def __init__(self, widths: Widths, num_tokens: int = 5) -> None:
        self.start, self.most = num_tokens, min(20, widths.most_rows - 1)
        super().__init__(num_tokens, widths)

    def begin(self) -> None:
        super().begin()
        self.max_tokens = self.start

    def observe(self, drafted: int, confidences: Sequence[float | None], num_accepted: int, emitted: int, seconds: float,
                pass_seconds: float | None = None) -> None:
        super().observe(drafted, confidences, num_accepted, emitted, seconds, pass_seconds)
        if drafted:
            right = num_accepted == drafted
            self.max_tokens = min(self.max_tokens + 2, self.most) if right else max(1, self.max_tokens - 1)
