"""Does the loop sample from the target's distribution? Chi-square tests of whole generations against exact probabilities.

The models are small tables, so the probability of every four tokens is known by enumeration: from
`sampling.probabilities`, prefix by prefix, without any of the loop. The loop is the real one, with drafts, lookup,
siblings, suggestions, adapted K, padding and end tokens. `CONTROL` records its proposals wrongly and has to be rejected.
Every generation has a seed of its own and nothing depends on the clock, so a cell gives the same counts everywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from drafters import Chooser, CombinedDrafter, Drafter, LookupDrafter, ModelDrafter
from policy import DynamicK
from sampling import SamplingParams, probabilities
from shapes import Widths
from spec_decode import GenerationConfig, SpeculativeDecoder

LENGTH = 4  # tokens of a generation that are looked at
PROMPT = (0, 0, 1, 0, 2, 0, 3, 1, 1, 2, 1, 3, 2, 2, 3, 3, 0)  # every pair of the tokens 0 to 3: prompt lookup finds them
PADDING = 3  # logits of the draft beyond the vocabulary: the largest, and never to be chosen
SMALLEST_EXPECTED = 5.0  # outcomes are merged until a cell of the chi-square expects this many
LARGEST_JOINT = 2000  # outcomes; with more, pairs of neighbouring tokens are looked at instead of all four jointly
SEEDS_PER_CELL = 2**20
DRAFT_SECONDS = 0.15  # of the made-up clock, where a pass of one row takes a second
CLOCK = Widths({1: 1.0, 16: 1.6})


class TableModel:
    """A `drafters.Model` whose logits are a table's row for the last two tokens that a row of the pass sees."""

    def __init__(self, table: Tensor, max_length: int = 64) -> None:
        self._rows = [list(previous) for previous in table]  # table: (V, V, logits)
        self._ids: list[int] = []
        self.cache, self.max_length = self, max_length

    @property
    def length(self) -> int:
        return len(self._ids)

    def crop(self, length: int) -> None:
        del self._ids[length:]

    def reserve(self, slots: int) -> None:
        self._ids.clear()

    def prefill(self, token_ids: Tensor, num_logits: int = 1) -> Tensor:
        return self.forward(token_ids)[len(token_ids) - num_logits:]

    def forward(self, token_ids: Tensor, positions: Tensor | None = None, visible: Tensor | None = None,
                num_logits: int | None = None) -> Tensor:
        ids, masks = token_ids.tolist(), None if visible is None else visible.tolist()
        previous = []
        for row in range(len(ids)):
            seen = ids[:row] if masks is None else list(itertools.compress(ids[:row], masks[row]))
            previous.append((seen or self._ids or [0])[-1])
        self._ids += ids
        return torch.stack([self._rows[before][token] for before, token in zip(previous, ids, strict=True)])


class SteadyK(DynamicK):
    """Adapted K by a made-up clock, so that how long it drafts depends on the tokens drawn and not on the machine."""

    def goes_on(self, chances: Sequence[float], draft_seconds: float, room: int, next_chance: float | None = None) -> bool:
        return super().goes_on(chances, DRAFT_SECONDS if next_chance is None else 0.0, room, next_chance)

    def observe(self, drafted: int, confidences: Sequence[float | None], num_accepted: int, emitted: int, seconds: float,
                pass_seconds: float | None = None) -> None:
        seconds = DRAFT_SECONDS * len(confidences) + self.widths.cost(drafted + 1)
        super().observe(drafted, confidences, num_accepted, emitted, seconds)


class MisrecordingDrafter(ModelDrafter):
    """The control: draws from the warped distribution, and records the one before temperature."""

    def _next(self, sequence: list[int], chooser: Chooser) -> tuple[int, float, Tensor | None, list[tuple[int, float]]]:
        token, confidence, probs, others = super()._next(sequence, chooser)
        assert probs is not None, "the control is for rejection sampling"
        unwarped = probs**chooser.params.temperature
        return token, confidence, unwarped / unwarped.sum(), others


@dataclass(frozen=True)
class Cell:
    """One setting to test. num_speculative_tokens: None adapts K."""

    name: str
    sampling: SamplingParams
    num_speculative_tokens: int | None = 3
    drafter: str = "model"  # 'model', 'lookup' or 'both'
    vocab_size: int = 6
    max_new_tokens: int = LENGTH + 1  # room for a bonus token; what is drafted beyond has no part in those looked at
    end_token: int | None = None
    fixed_width: bool = False  # every pass padded to 8 rows
    noise: float = 0.8  # how far the draft's logits are from the target's
    misrecorded: bool = False


def cell(name: str, *, temperature: float = 1.0, coupling: Any = "rejection", top_k: int = 0, top_p: float = 1.0,
         min_p: float = 0.0, repetition_penalty: float = 1.0, **settings: Any) -> Cell:
    return Cell(name, SamplingParams(temperature, top_k, top_p, min_p, repetition_penalty, 0, coupling), **settings)


CONTROL = cell("control: proposals recorded before temperature", temperature=0.5, misrecorded=True)
CELLS = tuple(replace(c, sampling=replace(c.sampling, seed=number * SEEDS_PER_CELL)) for number, c in enumerate((
    cell("K = 1, V = 5", temperature=0.7, num_speculative_tokens=1, vocab_size=5),
    cell("K = 3", temperature=1.3),
    cell("K adapted, penalty 1.3", temperature=1.3, repetition_penalty=1.3, num_speculative_tokens=None),
    cell("K adapted, lookup and model", temperature=0.7, num_speculative_tokens=None, drafter="both"),
    cell("lookup", temperature=1.3, drafter="lookup"),
    cell("top-k 4, lookup and model, passes of 8 rows", temperature=1.3, top_k=4, drafter="both", fixed_width=True),
    cell("top-p 0.9, ends after 4", temperature=1.3, top_p=0.9, max_new_tokens=LENGTH),
    cell("min-p 0.1, end token", temperature=1.3, min_p=0.1, end_token=3),
    cell("K = 7, top-k 3, top-p 0.9, min-p 0.05", num_speculative_tokens=7, max_new_tokens=9, top_k=3, top_p=0.9, min_p=0.05),
    cell("V = 16, pairs", temperature=0.7, vocab_size=16),
    cell("K = 3", temperature=0.7, coupling="gumbel", drafter="both"),
    cell("K adapted, penalty 1.3", temperature=1.3, coupling="gumbel", repetition_penalty=1.3, num_speculative_tokens=None),
    cell("K = 1, top-p 0.9, end token", temperature=1.3, coupling="gumbel", top_p=0.9, num_speculative_tokens=1,
         end_token=3),
    cell("K = 7, min-p 0.1", coupling="gumbel", min_p=0.1, num_speculative_tokens=7, max_new_tokens=9),
    cell("top-k 4, lookup, passes of 8 rows", coupling="gumbel", top_k=4, drafter="lookup", fixed_width=True),
), start=1))


@dataclass
class Tally:
    """The outcomes of a cell's generations, and what the loop did meanwhile."""

    outcomes: list[int] = field(default_factory=list)  # the LENGTH tokens read as digits to the base V
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    suggestions: int = 0

    def __iadd__(self, other: Tally) -> Tally:
        for name in ("outcomes", "rounds", "drafted", "accepted", "suggestions"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self

    def counts(self, vocab_size: int) -> Tensor:
        """(V,) * LENGTH int64"""
        counts = torch.bincount(torch.tensor(self.outcomes, dtype=torch.int64), minlength=vocab_size**LENGTH)
        return counts.view([vocab_size] * LENGTH)


@dataclass(frozen=True)
class Fit:
    """A chi-square statistic over merged outcomes; p is 0 where something came up that has no probability."""

    statistic: float
    degrees: int
    p: float


@dataclass(frozen=True)
class Finding:
    """One fit of a cell."""

    cell: Cell
    tokens: str  # which of the generation
    draws: int
    fit: Fit


# ---- the loop under test ----


def tables(vocab_size: int, noise: float) -> tuple[Tensor, Tensor]:
    """Logits of target (V, V, V) and draft (V, V, V + PADDING), after the last two tokens."""
    generator = torch.Generator().manual_seed(vocab_size)
    target, other = torch.randn(2, vocab_size, vocab_size, vocab_size, generator=generator)
    padding = torch.full((vocab_size, vocab_size, PADDING), 9.0)
    return 1.5 * target, torch.cat([target + noise * other, padding], -1)


def engine_of(cell: Cell) -> SpeculativeDecoder:
    target, draft = tables(cell.vocab_size, cell.noise)
    model = (MisrecordingDrafter if cell.misrecorded else ModelDrafter)(TableModel(draft))
    drafters: Mapping[str, Drafter] = {
        "model": model, "lookup": LookupDrafter(), "both": CombinedDrafter(model, LookupDrafter())}
    return SpeculativeDecoder(
        TableModel(target), drafters[cell.drafter], vocab_size=cell.vocab_size,
        widths=Widths.fixed() if cell.fixed_width else CLOCK if cell.num_speculative_tokens is None else None,
        policy=SteadyK(CLOCK) if cell.num_speculative_tokens is None else None)


def count(cell: Cell, generations: range) -> Tally:
    """Run the generations of these numbers, each with its own seed. After an end token only that token counts on."""
    engine, tally = engine_of(cell), Tally()
    ends = () if cell.end_token is None else (cell.end_token,)
    for number in generations:
        sampling = replace(cell.sampling, seed=cell.sampling.seed + number)
        tokens: list[int] = []
        for this_round in engine.generate(PROMPT, GenerationConfig(
                cell.max_new_tokens, cell.num_speculative_tokens, sampling, end_token_ids=ends)):
            tokens += this_round.tokens
            tally.rounds += 1
            tally.drafted += this_round.num_drafted
            tally.accepted += this_round.num_accepted
            tally.suggestions += this_round.suggested
            if len(tokens) >= LENGTH:
                break
        tokens += tokens[-1:] * (LENGTH - len(tokens))
        tally.outcomes.append(sum(token * cell.vocab_size**place for place, token in enumerate(reversed(tokens[:LENGTH]))))
    return tally


def exact(cell: Cell) -> Tensor:
    """The probability of every LENGTH tokens, by enumeration of their prefixes. (V,) * LENGTH, fp64"""
    table, size, joint = tables(cell.vocab_size, cell.noise)[0], cell.vocab_size, torch.ones((), dtype=torch.float64)
    for length in range(LENGTH):
        rows = []
        for prefix in itertools.product(range(size), repeat=length):
            history = [*PROMPT, *prefix]
            if cell.end_token in prefix:
                rows.append(torch.eye(size, dtype=torch.float64)[cell.end_token])
            else:
                row = probabilities(table[history[-2], history[-1]], cell.sampling, torch.tensor(history)).double()
                rows.append(row / row.sum())
        joint = joint.unsqueeze(-1) * torch.stack(rows).view([size] * (length + 1))
    return joint


# ---- statistics ----


def survival(statistic: float, degrees: int) -> float:
    """The chance that a chi-square variable exceeds the statistic: the regularised upper incomplete gamma function."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def merged(expected: Tensor) -> Tensor:
    """The group of each outcome, rare ones joined until a group expects SMALLEST_EXPECTED. (n,) -> (n,) int64"""
    groups = torch.zeros(len(expected), dtype=torch.int64)
    group, mass = 0, 0.0
    for index in expected.argsort(stable=True).tolist():
        if mass >= SMALLEST_EXPECTED:
            group, mass = group + 1, 0.0
        groups[index] = group
        mass += float(expected[index])
    return groups.clamp(max=group if mass >= SMALLEST_EXPECTED else max(group - 1, 0))


def grouped(values: Tensor, groups: Tensor) -> Tensor:
    """Sums by group. (n,) -> (groups,) fp64"""
    return torch.zeros(int(groups.max()) + 1, dtype=torch.float64).index_add_(0, groups, values.double())


def chi_square(observed: Tensor, probs: Tensor) -> Fit:
    """Pearson's test of counts (n,) against probabilities (n,)."""
    expected = probs.double() * float(observed.sum())
    groups = merged(expected)
    seen, wanted = grouped(observed, groups), grouped(expected, groups)
    if len(wanted) < 2:
        raise ValueError("too few draws for a chi-square test: expect at least 5 in each of two outcomes")
    statistic, degrees = float(((seen - wanted) ** 2 / wanted).sum()), len(wanted) - 1
    impossible = bool((observed[expected == 0] > 0).any())
    return Fit(statistic, degrees, 0.0 if impossible else survival(statistic, degrees))


def two_sample(first: Mapping[int, int], second: Mapping[int, int]) -> Fit:
    """Pearson's test of two histograms for one common distribution."""
    outcomes = sorted({*first, *second})
    counts = [[sample.get(outcome, 0) for outcome in outcomes] for sample in (first, second)]
    table = torch.tensor(counts, dtype=torch.float64)  # (2, n)
    shares = table.sum(1, keepdim=True) / table.sum()
    groups = merged(table.sum(0) * shares.min())
    seen = torch.stack([grouped(row, groups) for row in table])  # (2, groups)
    if seen.shape[1] < 2:
        raise ValueError("too few draws, or always the same token: draw more, or use another prompt or temperature")
    expected = seen.sum(0) * shares
    statistic, degrees = float(((seen - expected) ** 2 / expected).sum()), seen.shape[1] - 1
    return Fit(statistic, degrees, survival(statistic, degrees))


def judge(cell: Cell, tally: Tally) -> list[Finding]:
    """The four tokens jointly where the table is small, else the three pairs of neighbours."""
    probs, counts = exact(cell), tally.counts(cell.vocab_size)
    draws = len(tally.outcomes)
    if probs.numel() <= LARGEST_JOINT:
        return [Finding(cell, "1-4", draws, chi_square(counts.flatten(), probs.flatten()))]
    found = []
    for first in range(LENGTH - 1):
        others = [place for place in range(LENGTH) if place not in (first, first + 1)]
        fit = chi_square(counts.sum(others).flatten(), probs.sum(others).flatten())
        found.append(Finding(cell, f"{first + 1}-{first + 2}", draws, fit))
    return found


def holm(p_values: Sequence[float]) -> list[float]:
    """p values corrected for their number (Holm 1979): rejecting those up to alpha errs with chance alpha at most."""
    adjusted, highest = [1.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def together(findings: Sequence[Finding]) -> Fit:
    """One fit of several cells, which are independent: their statistics add up, and so do the degrees of freedom.

    Of a cell with several findings, which are not independent of each other, the first.
    """
    fits = [finding.fit for finding in {finding.cell: finding for finding in reversed(findings)}.values()]
    statistic, degrees = sum(fit.statistic for fit in fits), sum(fit.degrees for fit in fits)
    return Fit(statistic, degrees, survival(statistic, degrees) if all(fit.p for fit in fits) else 0.0)
