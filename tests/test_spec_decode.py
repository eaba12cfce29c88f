"""The loop on scripted models: what a round emits, that it is the target's own, and what siblings may and may not do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from scripted import (
    CHANCE,
    DRAFT,
    NARROW,
    PROMPT,
    TARGET,
    TEXT,
    Script,
    ScriptedModel,
    base,
    engine,
    peaks,
    proposers,
    recite,
    run,
)

import acceptance
from drafters import CombinedDrafter, LookupDrafter, ModelDrafter
from policy import FixedK
from sampling import SamplingParams
from shapes import Widths
from spec_decode import GenerationConfig

# ---- one round ----


@pytest.mark.parametrize("num", [1, 4])
def test_a_draft_that_is_always_wrong(num: int) -> None:
    """Trial 7. Caught: a wrong token accepted, or no token of the target's own in its place."""
    target = ScriptedModel(recite(TEXT, 11))
    wrong = engine(target, ScriptedModel(lambda so_far: peaks(11, 10)), 11)
    statistics = run(wrong, [0], 20, num, siblings=False)
    assert statistics.tokens == TEXT[:20] and statistics.acceptance_rate == 0 and statistics.tokens_per_round == 1
    assert run(wrong, [0], 20, num, siblings=True).tokens == TEXT[:20]


def test_right_wrong_right_right() -> None:
    """Trial 8. Caught: acceptance counted over all positions instead of up to the first wrong one."""
    draft = ScriptedModel(recite([0, 1, 0, 1, 5, 9, 2, 6], 11))  # after 3: right, wrong, right, right
    first = run(engine(ScriptedModel(recite(TEXT, 11)), draft, 11), [0], 6, 4, siblings=False)
    entry = first.rounds[1]
    assert (entry.draft_tokens, entry.tokens, entry.num_accepted) == ([1, 0, 1, 5], [1, 4], 1)
    assert entry.origins == ["accepted", "corrected"]
    assert first.rounds[2].draft_tokens == [1, 5] and first.rounds[2].num_accepted == 2
    assert first.acceptance_by_position() == [(2, 2), (1, 2)]


@pytest.mark.parametrize("num", [1, 2, 3, 7])
@pytest.mark.parametrize("max_new", [1, 2, 24, 25])
def test_a_perfect_draft_needs_the_fewest_passes(num: int, max_new: int) -> None:
    """Caught: full acceptance that lost the bonus token, or a pass too many to catch the caches up."""
    target, draft = ScriptedModel(TARGET), ScriptedModel(TARGET)
    statistics = run(engine(target, draft, 8), PROMPT, max_new, num)
    assert statistics.tokens == base(max_new)
    assert statistics.acceptance_rate in (1, None) and statistics.target_passes == -(-(max_new - 1) // (num + 1))


def test_a_round_without_a_draft_is_plain() -> None:
    """Trial 45. Caught: acceptance 0% instead of n/a where nothing was drafted; -1 taken for 'no limit'."""
    for drafter in (None, ModelDrafter(ScriptedModel(TARGET))):
        statistics = run(engine(ScriptedModel(TARGET), drafter, 8), PROMPT, 12, 0)
        assert statistics.acceptance_rate is None and statistics.tokens_per_round == 1
        assert [entry.origins for entry in statistics.rounds] == [["prefill"]] + [["plain"]] * 11
    for max_new, num in ((8, -1), (-1, 4)):
        with pytest.raises(ValueError, match="use 0"):
            GenerationConfig(max_new, num)


# ---- exactness: = base, for everything that may propose ----


@pytest.mark.parametrize("params", CHANCE, ids=["greedy", "gumbel", "penalty", "all"])
@pytest.mark.parametrize("kind", ["model", "lookup", "both"])
def test_output_equals_target_only_decoding(params: SamplingParams, kind: str) -> None:
    """Trials 34, 35. Caught: any use of the draft's opinion beyond proposing; history with rejected tokens in it."""
    expected = base(25, sampling=params)
    for widths in (None, NARROW, Widths.fixed(8)):
        decoder = engine(ScriptedModel(TARGET), dict(proposers())[kind], 8, widths=widths)
        for num in (0, 1, 2, 4, 7, None) if widths is not None else (1, 5, None):
            for siblings in (True, False):
                statistics = run(decoder, PROMPT, 25, num, siblings=siblings, sampling=params)
                assert statistics.tokens == expected, (widths, num, siblings)
    assert kind == "lookup" or statistics.accepted


def test_passes_have_proven_widths_only() -> None:
    """Caught: a pass of 3 or 5 rows where only 2, 4 and 8 are proven; padding that is longer than it needs to be."""
    for num, allowed in ((0, {2}), (1, {2, 4, 8}), (3, {4, 8}), (7, {8}), (2, {4, 8})):
        for siblings in (True, False):
            target = ScriptedModel(TARGET)
            run(engine(target, ScriptedModel(DRAFT), 8, widths=NARROW), PROMPT, 60, num, siblings=siblings)
            widths = {len(fed) for fed in target.passes[1:-1]}  # the last rounds draft less: the room ends
            assert widths <= allowed | {2, 4}, (num, siblings)
            assert siblings or widths <= {min(allowed)} | {w for w in (2, 4) if w <= num + 1}
    with pytest.raises(ValueError, match="the largest width in use is 8"):
        run(engine(ScriptedModel(TARGET), ScriptedModel(DRAFT), 8, widths=NARROW), PROMPT, 9, 8)


def test_the_control_sees_a_loop_that_accepts_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the comparison above fails for an engine that takes the draft's word for one token."""
    decoder, choose = engine(ScriptedModel(TARGET), ScriptedModel(DRAFT), 8), acceptance.choose
    monkeypatch.setattr(acceptance, "choose", lambda logits, tokens, drafted, chooser: (
        [drafted[0]] if drafted else choose(logits, tokens, drafted, chooser)))
    generation = decoder.generate(PROMPT, GenerationConfig(40, 3))
    assert generation.run() != base(40)


# ---- siblings ----


def second_best(script: Script) -> Script:
    """A draft whose first choice is never the target's and whose second always is."""
    return lambda so_far: peaks(8, (int(script(so_far).argmax()) + 1) % 8, int(script(so_far).argmax()))


def test_a_sibling_hit_becomes_the_next_first_draft_token() -> None:
    """Caught: the row of another sibling read, or its prediction taken for a token instead of a draft."""
    with_siblings = run(engine(ScriptedModel(TARGET), ScriptedModel(second_best(TARGET)), 8), PROMPT, 40, 1)
    assert with_siblings.tokens == base(40)
    assert all(entry.sibling_hit for entry in with_siblings.rounds[1::2]), "every first guess is wrong, its sibling right"
    assert all(entry.suggested and entry.num_accepted == 1 for entry in with_siblings.rounds[2:-1:2])
    figures = with_siblings.as_dict()
    assert figures["sibling_hits"] >= figures["suggestions"] == figures["suggestions_accepted"] >= 12
    without = run(engine(ScriptedModel(TARGET), ScriptedModel(second_best(TARGET)), 8), PROMPT, 40, 1, siblings=False)
    assert without.tokens == with_siblings.tokens and without.as_dict()["siblings"] == 0
    assert without.target_passes == 39 and with_siblings.target_passes < 30


@pytest.mark.parametrize("both", [False, True])
def test_a_suggestion_teaches_the_policy_nothing(monkeypatch: pytest.MonkeyPatch, both: bool) -> None:
    """Caught: the target's own predictions counted as the draft's: the calibration's top bin rose with each of them."""
    policy, seen = FixedK(2, Widths({1: 1.0, 64: 1.0})), list[tuple[int, list[float | None]]]()
    monkeypatch.setattr(policy, "observe", lambda drafted, drawn, *rest: seen.append((drafted, list(drawn))))
    model = ModelDrafter(ScriptedModel(second_best(TARGET)))
    drafter = CombinedDrafter(model, LookupDrafter()) if both else model
    statistics = run(engine(ScriptedModel(TARGET), drafter, 8, policy=policy), PROMPT, 60, 2)
    assert sum(entry.suggested for entry in statistics.rounds) > 5
    for entry, (drafted, drawn) in zip(statistics.rounds[1:], seen, strict=True):
        assert drafted == entry.num_drafted and len(drawn) == (drafted if entry.source == "model" else 0)
        assert [value is None for value in drawn] == [entry.suggested and not index for index in range(len(drawn))]


def test_siblings_see_the_prefix_their_ancestors_and_themselves() -> None:
    """Caught: a sibling that saw the draft token it competes with, or at that token's successor's position."""
    target = ScriptedModel(TARGET)
    shapes: list[tuple[list[int], list[list[int]]]] = []
    forward = target.forward

    def watch(token_ids: torch.Tensor, positions: torch.Tensor | None = None, visible: torch.Tensor | None = None,
              num_logits: int | None = None) -> torch.Tensor:
        if visible is not None and positions is not None:
            start = target.cache.length
            shapes.append(((positions - start).tolist(), [row.nonzero().flatten().tolist() for row in visible]))
        logits = forward(token_ids, positions, visible, num_logits)
        assert logits.isfinite().all(), "each row sees one text, position by position"
        return logits

    target.forward = watch  # type: ignore[method-assign]
    run(engine(target, ScriptedModel(DRAFT), 8), PROMPT, 40, 2)
    assert len(shapes) > 10
    for positions, seen in shapes:
        assert positions[:3] == [0, 1, 2] and seen[:3] == [[0], [0, 1], [0, 1, 2]]
        for row in range(3, len(positions)):
            depth = positions[row]
            assert depth in (1, 2) and seen[row] == [*range(depth), row]


def test_the_likeliest_siblings_get_the_rows() -> None:
    """Caught: siblings ranked by the draft's probability alone, though the chain may never get there; more rows than asked."""
    def draft(so_far: Sequence[int]) -> torch.Tensor:
        return torch.tensor([0.5, 0.35, 0.1, 0.05]).log() if len(so_far) == 2 else torch.tensor([0.4, 0.38, 0.12, 0.1]).log()

    target = ScriptedModel(lambda so_far: peaks(4, 3))
    run(engine(target, ScriptedModel(draft), 4, widths=Widths.fixed(4)), [1], 4, 2)
    assert target.passes[1][3:] == [1], "one row is free: .35 at depth 1 beats a half times .38"
    target = ScriptedModel(lambda so_far: peaks(4, 3))
    run(engine(target, ScriptedModel(draft), 4, widths=Widths.fixed(8)), [1], 4, 2)
    assert target.passes[1][3:6] in ([1, 1, 2], [1, 1, 2]) and len(target.passes[1]) == 8


# ---- what a trace shows ----


def test_details_show_the_targets_and_the_drafts_view() -> None:
    """Caught: a trace in which a token's probability belonged to its neighbour, or padding among the alternatives."""
    padded = lambda so_far: torch.cat([TARGET(so_far), torch.full((3,), 40.0)])
    statistics = run(engine(ScriptedModel(padded), ScriptedModel(DRAFT), 8), PROMPT, 30, 3, details=True)
    text = list(PROMPT)
    for entry in statistics.rounds:
        assert len(entry.details) == len(entry.tokens)
        for index, (token, detail) in enumerate(zip(entry.tokens, entry.details, strict=True)):
            probs = TARGET(text).softmax(-1)
            assert detail["target_prob"] == pytest.approx(float(probs[token]), rel=1e-5)
            assert detail["target_top"][0] == (token, pytest.approx(float(probs.max()), rel=1e-5))
            assert ("draft_token" in detail) == (index < entry.num_drafted)
            if index < entry.num_drafted:
                assert detail["draft_token"] == entry.draft_tokens[index]
            text.append(token)
