"""Who proposes: what is proposed, what it costs, and that the draft's cache follows what was emitted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from scripted import ScriptedModel, blend, engine, peaks, random_script, recite, run

from drafters import Chooser, CombinedDrafter, LookupDrafter, ModelDrafter, Proposal, Suggestion
from policy import DynamicK, FixedK, Policy
from sampling import LogitsError, SamplingParams
from shapes import Widths
from spec_decode import GenerationConfig

WIDTHS = Widths({1: 1.0, 64: 1.0})
GREEDY = Chooser(SamplingParams(), 10)


def fixed(num: int) -> Policy:
    return FixedK(num, WIDTHS)


def begun(model: ScriptedModel, prompt: Sequence[int], slots: int = 100) -> ModelDrafter:
    drafter = ModelDrafter(model)
    drafter.begin(prompt, slots)
    return drafter


# ---- the choice of a token ----


def test_noise_is_made_once_per_position_and_forgotten() -> None:
    """Caught: 152,000 random numbers made again by the target for each draft token, or kept for the whole text."""
    chooser = Chooser(SamplingParams(temperature=1.0), 10)
    first = chooser.noise(100)
    assert chooser.noise(100) is first and chooser.noise(90) is not first
    for position in range(101, 400):
        chooser.noise(position)
    assert len(chooser._noise) < 100 and torch.equal(chooser.noise(100), first)


def test_padding_of_the_logits_is_never_chosen() -> None:
    """Caught: a draft token that the tokenizer does not know, from logits padded to a round width (trial 28)."""
    logits = torch.cat([torch.zeros(10), torch.full((6,), 50.0)])
    for params in (SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(repetition_penalty=1.2)):
        chooser = Chooser(params, 10)
        assert int(chooser.scores(logits, [1, 2]).argmax()) < 10
        assert chooser.probabilities(logits, [1, 2]).shape == (10,)


# ---- the draft model ----


def test_the_draft_reads_each_token_once() -> None:
    """Caught: the prompt read again in each round, or the token before the draft's first never fed."""
    model = ScriptedModel(recite([5, 6, 7, 8, 9], 10, prompt_length=3))
    drafter = begun(model, [1, 2, 3])
    proposal = drafter.propose([1, 2, 3], 4, fixed(4), GREEDY)
    assert proposal.tokens == [5, 6, 7, 8] and proposal.stopped == "limit"
    assert model.passes == [[1, 2], [3], [5], [6], [7]]
    tokens = [1, 2, 3, 5, 6, 0]  # the third was wrong
    drafter.settle(proposal, 2, tokens)
    assert [token for _, token in model.cache.slots] == tokens[:-1]
    drafter.propose(tokens, 1, fixed(1), GREEDY)
    assert model.passes[5:] == [[0]]
    drafter.settle(Proposal(), 0, [*tokens, 1, 1, 1])
    drafter.propose([*tokens, 1, 1, 1], 1, fixed(1), GREEDY)
    assert model.passes[6:] == [[1, 1, 1]], "what it missed is read in one pass"


def test_a_prompt_of_one_token() -> None:
    """Caught: an empty pass over the prompt without its last token (trial 3)."""
    model = ScriptedModel(recite([5, 6], 10))
    assert begun(model, [1]).propose([1], 2, fixed(2), GREEDY).tokens == [5, 6]
    assert model.passes == [[1], [5]]


def test_confidence_alternatives_and_the_recorded_distribution() -> None:
    """Caught: the chosen token among its own alternatives, or a distribution recorded before the warp (rejection)."""
    model = ScriptedModel(lambda so_far: torch.tensor([0.4, 0.3, 0.2, 0.1]).log())
    proposal = begun(model, [1]).propose([1], 1, fixed(1), Chooser(SamplingParams(), 4))
    assert proposal.tokens == [0] and proposal.confidences == [pytest.approx(0.4)] and proposal.draft_probs == [None]
    assert [token for token, _ in proposal.alternatives[0]] == [1, 2, 3]
    assert [chance for _, chance in proposal.alternatives[0]] == pytest.approx([0.3, 0.2, 0.1])
    for seed in range(20):
        chooser = Chooser(SamplingParams(temperature=0.5, top_k=3, seed=seed, coupling="rejection"), 4)
        proposal = begun(model, [1]).propose([1], 1, fixed(1), chooser)
        probs = proposal.draft_probs[0]
        assert probs is not None
        assert probs.tolist() == pytest.approx([16 / 29, 9 / 29, 4 / 29, 0])
        assert proposal.confidences[0] == float(probs[proposal.tokens[0]])
        assert proposal.tokens[0] not in [token for token, _ in proposal.alternatives[0]]


def test_a_suggestion_is_the_first_draft_token() -> None:
    """Caught: a suggestion that replaced the draft's token in the proposal, but not in what the draft had read."""
    model = ScriptedModel(lambda so_far: peaks(10, (so_far[-1] + 1) % 10))
    drafter, probs = begun(model, [1]), torch.full((10,), 0.1)
    proposal = drafter.propose([1], 3, fixed(3), GREEDY, Suggestion(7, probs))
    assert proposal.tokens == [7, 8, 9] and proposal.suggested and proposal.draft_probs[0] is probs
    assert proposal.alternatives[0] == [] and model.passes == [[1, 7], [8]]
    assert drafter.propose([1], 0, fixed(3), GREEDY, Suggestion(7)).tokens == []


def test_the_end_of_the_drafts_context() -> None:
    """Caught: a draft that runs past its positions, or a prompt longer than them that stops the whole call (trial 16)."""
    model = ScriptedModel(lambda so_far: peaks(10, 1), max_length=8)
    proposal = begun(model, [1] * 5).propose([1] * 5, 6, fixed(6), GREEDY)
    assert len(proposal.tokens) == 3 and proposal.stopped == "context"
    proposal = begun(model, [1] * 30).propose([1] * 31, 6, fixed(6), GREEDY)
    assert (proposal.tokens, proposal.source, proposal.stopped) == ([], "none", "context")
    assert model.capacity == 8


def test_ties_in_the_draft_are_settled_as_in_the_target() -> None:
    """Caught: topk takes any of several equal logits, the target's argmax the lowest id: a perfect draft was rejected."""
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    logits[torch.arange(17, 5000, 600)] = 9.0
    model = ScriptedModel(lambda so_far: logits.roll(7 * so_far[-1] % 5000))
    statistics = run(engine(ScriptedModel(model.script), model, 5000), [3], 60, 4)
    assert statistics.acceptance_rate == 1


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0)])
def test_nan_from_the_draft_is_an_error_that_names_it(params: SamplingParams) -> None:
    """Caught: 'cannot convert float NaN to integer' from deep inside a fp16 draft that overflowed (trial 36)."""
    model = ScriptedModel(lambda so_far: torch.full((10,), torch.nan))
    with pytest.raises(LogitsError, match="bf16 or fp32"):
        begun(model, [1]).propose([1], 2, DynamicK(WIDTHS), Chooser(params, 10))


# ---- lookup ----


def looked_up(tokens: Sequence[int], limit: int = 4, num: int = 10) -> list[int]:
    return LookupDrafter().propose(tokens, limit, fixed(num), GREEDY).tokens


def test_the_longest_match_wins_and_among_equals_the_last() -> None:
    """Caught: the shortest or the first match, or the end of the text matched with itself."""
    assert looked_up([1, 2, 3, 4, 9, 9, 2, 3, 5, 9, 9, 1, 2, 3]) == [4, 9, 9, 2], "1 2 3 beats the later 2 3"
    assert looked_up([2, 3, 4, 2, 3, 5, 2, 3]) == [5, 2, 3]
    assert looked_up([1, 2, 3, 4, 5, 6]) == [] and looked_up([1]) == [] and looked_up([1, 1]) == []
    assert looked_up([1, 1, 1]) == [1], "what follows may be the end itself"
    assert looked_up([1, 2, 3, 1, 2], limit=2) == [3, 1] and looked_up([1, 2, 3, 1, 2], limit=0) == []
    assert looked_up([1, 2, 3, 1, 2], num=1) == [3]


def test_lookup_learns_how_good_its_matches_are() -> None:
    """Caught: one chance for all lengths, unjudged tokens counted as wrong, or lessons kept for the next call."""
    drafter, text = LookupDrafter(), [1, 2, 3, 4, 5, 6, 7, 1, 2]
    before = drafter.find(text, 4)[1]
    for _ in range(30):
        drafter.settle(drafter.propose(text, 4, fixed(4), GREEDY), 1, [*text, 3, 9])  # one right, one wrong, two unjudged
    assert drafter.find(text, 4)[1] == pytest.approx((2 * before + 30) / 62)
    assert drafter.find([*text, 3], 4)[1] == LookupDrafter().find([*text, 3], 4)[1], "three ids match: nothing known"
    drafter.begin([], 0)
    assert drafter.find(text, 4)[1] == before


def test_lookup_goes_on_from_a_suggestion() -> None:
    """Caught: the match looked for before the suggestion, whose tokens then came one place too late."""
    drafter, text = LookupDrafter(), [4, 5, 6, 7, 8, 0, 4]
    proposal = drafter.propose(text, 3, fixed(9), GREEDY, Suggestion(5))
    assert proposal.tokens == [5, 6, 7] and proposal.suggested and proposal.source == "lookup"
    judged = dict(drafter.judged)
    drafter.settle(proposal, 0, [*text, 9])
    assert drafter.judged == judged, "the suggestion was judged, not the match"
    assert drafter.propose([*text, 9], 3, fixed(9), GREEDY).tokens == [], "a rejected suggestion is not in the index"
    assert drafter.propose([*text, 9, 0, 4], 3, fixed(9), GREEDY).tokens == [9, 0, 4]


class CountingDict(dict):
    """Counts reads and writes."""

    operations = 0

    def __setitem__(self, key: object, value: object) -> None:
        self.operations += 1
        super().__setitem__(key, value)

    def get(self, key: object, default: object = None) -> object:
        self.operations += 1
        return super().get(key, default)


def test_lookup_does_the_same_work_at_any_length() -> None:
    """Caught: a search through the whole text in each round: milliseconds at 5,000 tokens."""
    work = {}
    for length in (50, 5000):
        drafter, text = LookupDrafter(), [i * i % 997 for i in range(length)]
        drafter._last = index = CountingDict()
        drafter.propose(text, 8, fixed(8), GREEDY)
        index.operations = 0
        for step in range(10):
            text += [step, step + 1, step + 2]
            drafter.propose(text, 8, fixed(8), GREEDY)
        work[length] = index.operations
    assert work[5000] <= work[50] <= 10 * (3 + 1) * len(LookupDrafter.LENGTHS)


# ---- both ----


def test_both_take_the_lookup_where_it_pays_and_the_model_else() -> None:
    """Caught: the draft model run in rounds where the looked-up tokens are used, or its cache out of step afterwards."""
    model = ScriptedModel(lambda so_far: peaks(10, 9))
    drafter = CombinedDrafter(ModelDrafter(model), LookupDrafter())
    text = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6]
    drafter.begin(text, 100)
    policy = DynamicK(Widths({1: 0.10, 16: 0.12}))
    proposal = drafter.propose(text, 5, policy, GREEDY)
    assert (proposal.source, proposal.tokens[:2], len(model.passes)) == ("lookup", [7, 8], 1)
    text += [7, 0]
    drafter.settle(proposal, 1, text)
    assert drafter.propose(text, 1, fixed(1), GREEDY).source == "model"
    assert model.passes[1:] == [[6, 7, 0]], "the draft reads what the lookup rounds emitted"
    for _ in range(60):
        drafter.lookup.settle(Proposal(tokens=[1], source="lookup"), 0, text)
    text += [1, 2, 3, 4, 5, 6]
    assert drafter.propose(text, 5, fixed(5), GREEDY).source == "model", "its matches have been wrong"


@pytest.mark.parametrize("kind", ["model", "both"])
def test_the_drafts_cache_is_a_prefix_of_the_text_after_every_round(kind: str) -> None:
    """Caught: a draft that went on from rejected tokens: acceptance fell quietly, outputs stayed right."""
    target = random_script(8, seed=1)
    model = ScriptedModel(blend(target, random_script(8, seed=2), 0.4))
    drafter = ModelDrafter(model)
    whole = drafter if kind == "model" else CombinedDrafter(drafter, LookupDrafter())
    decoder, text = engine(ScriptedModel(target), whole, 8), [1, 2, 3]
    for entry in decoder.generate(text, GenerationConfig(num_speculative_tokens=4)):
        text = text + entry.tokens
        fed = [token for _, token in model.cache.slots]
        assert fed == text[:len(fed)] and len(fed) < len(text)
    assert len(model.passes) > (20 if kind == "model" else 1), "how often lookup pays depends on the clock"
