"""The loop on scripted models: what a round emits, when a call ends, and what siblings may and may not do."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from scripted import NARROW, ScriptedModel, blend, engine, peaks, random_script, recite, run

from drafters import CombinedDrafter, LookupDrafter, ModelDrafter
from policy import FixedK
from sampling import LogitsError, SamplingParams
from shapes import Widths
from spec_decode import GenerationConfig

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7]
TARGET = random_script(8, seed=1)
DRAFT = blend(TARGET, random_script(8, seed=2), 0.35)  # right about two times in three
PROMPT = [1, 2, 3, 1, 2]
CHANCE = [SamplingParams(), SamplingParams(temperature=0.8, seed=3), SamplingParams(repetition_penalty=1.3)]
CHANCE += [SamplingParams(temperature=1.1, top_p=0.9, top_k=5, repetition_penalty=1.3, seed=4)]


def base(max_new: int, script: Callable[[Sequence[int]], torch.Tensor] = TARGET, **kwargs: object) -> list[int]:
    """Target-only decoding of the prompt."""
    return run(engine(ScriptedModel(script), None, 8), PROMPT, max_new, 0, **kwargs).tokens


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


def proposers() -> Iterator[tuple[str, object]]:
    yield "model", ScriptedModel(DRAFT)
    yield "lookup", LookupDrafter()
    yield "both", CombinedDrafter(ModelDrafter(ScriptedModel(DRAFT)), LookupDrafter())


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
    decoder = engine(ScriptedModel(TARGET), ScriptedModel(DRAFT), 8)
    choose = decoder._choose
    monkeypatch.setattr(decoder, "_choose", lambda logits, tokens, drafted, chooser: (
        [drafted[0]] if drafted else choose(logits, tokens, drafted, chooser)))
    generation = decoder.generate(PROMPT, GenerationConfig(40, 3))
    assert generation.run() != base(40)


# ---- siblings ----


def second_best(script: Callable[[Sequence[int]], torch.Tensor]) -> Callable[[Sequence[int]], torch.Tensor]:
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


# ---- where a call ends ----


@pytest.mark.parametrize("num", [0, 5])
def test_both_end_tokens_end_the_call(num: int) -> None:
    """Trial 11. Caught: only the first of several end tokens known; tokens behind it in the same run emitted."""
    for end in (8, 9):
        script = recite([1, 2, 3, end, 4, 5, 6, 7], 10)
        statistics = run(engine(ScriptedModel(script), ScriptedModel(script)), [0], 30, num, end_token_ids=[8, 9])
        assert statistics.tokens == [1, 2, 3, end] and statistics.finish_reason == "end"
        assert statistics.accepted == (3 if num else 0)
    at_once = run(engine(ScriptedModel(recite([9], 10)), ScriptedModel(recite([9], 10))), [0], 30, num, end_token_ids=[9])
    assert at_once.tokens == [9] and at_once.target_passes == 0


def test_nothing_is_asked_for() -> None:
    """Trial 13. Caught: one token too many for 0, or a prefill for nothing."""
    for num in (0, 5, None):
        target = ScriptedModel(TARGET)
        generation = engine(target, ScriptedModel(DRAFT), 8).generate(PROMPT, GenerationConfig(0, num))
        assert list(generation) == [] and generation.statistics.tokens == [] and target.passes == []
        assert generation.statistics.as_dict()["finish_reason"] == "length"


@pytest.mark.parametrize("max_new", [1, 2, 5, 6, 7])
def test_exactly_as_many_tokens_as_asked_for(max_new: int) -> None:
    """Trial 14. Caught: a run that overshoots the limit, or tokens drafted that could never be emitted."""
    for script in (TARGET, DRAFT):
        draft = ScriptedModel(script)
        statistics = run(engine(ScriptedModel(TARGET), draft, 8), PROMPT, max_new, 5)
        assert statistics.tokens == base(max_new) and statistics.emitted == max_new
        assert statistics.finish_reason == "length"
        assert max_new > 1 or draft.passes == []


def stop_after(pair: tuple[int, int]) -> Callable[[Sequence[int]], int | None]:
    """A stop 'string' of two tokens that may span rounds."""
    seen: list[int] = []

    def check(new: Sequence[int]) -> int | None:
        for index, token in enumerate(new):
            seen.append(token)
            if tuple(seen[-2:]) == pair:
                return index + 1
        return None

    return check


def test_end_stop_and_limit_in_one_run_come_out_as_in_base() -> None:
    """Caught: whichever of end token, stop and length is looked at first wins, instead of whichever comes first."""
    rng, reasons = random.Random(5), set()
    for _ in range(150):
        ends, pair, max_new = [rng.randrange(8)], (rng.randrange(8), rng.randrange(8)), rng.randrange(1, 14)
        results = []
        for num in (0, 1, 5):
            decoder = engine(ScriptedModel(TARGET), ScriptedModel(DRAFT), 8)
            statistics = run(decoder, PROMPT, max_new, num, end_token_ids=ends, stop=stop_after(pair), digests=True)
            digests = [digest for entry in statistics.rounds for digest in entry.digests]
            assert len(digests) == statistics.emitted
            results.append((statistics.tokens, statistics.finish_reason, digests))
        assert results[0] == results[1] == results[2]
        reasons.add(results[0][1])
    assert reasons == {"end", "stop", "length"}


def test_a_stop_may_take_back_the_whole_round() -> None:
    """Caught: a round of which nothing is kept counted as prefill or as a pass with a token."""
    for num in (0, 3):
        decoder = engine(ScriptedModel(TARGET), ScriptedModel(TARGET), 8)
        statistics = run(decoder, PROMPT, 20, num, stop=lambda new: 0)
        assert statistics.tokens == [] and statistics.finish_reason == "stop" and statistics.target_passes == 0


def test_the_drafts_context_ends_before_the_targets() -> None:
    """Trial 16. Caught: an index error at the draft's last position, a silent stop, or a switch nobody is told about."""
    target, draft = ScriptedModel(TARGET, max_length=128), ScriptedModel(DRAFT, max_length=32)
    prompt = PROMPT * 4
    expected = run(engine(ScriptedModel(TARGET), None, 8), prompt, 60, 0).tokens
    statistics = run(engine(target, draft, 8), prompt, 60, 5)
    assert statistics.tokens == expected and statistics.drafted > 0
    assert statistics.notes == ["the draft's context ends at 32 tokens: from there on the target decodes alone"]
    assert all(not entry.num_drafted for entry in statistics.rounds[-20:])
    long = run(engine(target, draft, 8), prompt * 2, 60, 5)
    assert long.drafted == 0 and len(long.notes) == 1, "a prompt that is too long for the draft alone"


def test_the_targets_context_ends() -> None:
    """Caught: a rotary table or a cache read past its end; a limit reported as reached that was not."""
    target, draft = ScriptedModel(TARGET, max_length=20), ScriptedModel(DRAFT, max_length=20)
    statistics = run(engine(target, draft, 8), PROMPT, 60, 5)
    assert statistics.tokens == base(15) and statistics.finish_reason == "context"
    with pytest.raises(ValueError, match="the prompt has 20 tokens and the target's context ends at 20; shorten it"):
        engine(target, draft, 8).generate(PROMPT * 4)


@pytest.mark.parametrize("prompt", [[], torch.tensor([], dtype=torch.int64)])
def test_an_empty_prompt_is_refused_at_once(prompt: Sequence[int]) -> None:
    """Trial 17. Caught: an error from deep inside the first pass, or only when the stream is read."""
    with pytest.raises(ValueError, match="the prompt is empty; give at least one token"):
        engine(ScriptedModel(TARGET), None, 8).generate(prompt)


@pytest.mark.parametrize("prompt", [[[1, 2], [3, 4, 5]], torch.tensor([[1, 2], [3, 4]]), ["a"], [1.5]])
def test_one_prompt_at_a_time(prompt: Sequence[int]) -> None:
    """Trial 18. Caught: 'expected sequence of length 2 at dim 1', or a batch of which only the first row was right."""
    with pytest.raises(ValueError, match="one prompt at a time"):
        engine(ScriptedModel(TARGET), None, 8).generate(prompt)


def test_prompts_of_other_integer_types() -> None:
    """Caught: the tokenizer's tensors or arrays refused, or truth tested as one number."""
    for prompt in (torch.tensor(PROMPT), np.array(PROMPT), tuple(PROMPT)):
        assert run(engine(ScriptedModel(TARGET), ScriptedModel(DRAFT), 8), prompt, 10).tokens == base(10)  # type: ignore[arg-type]


# ---- the engine and its callers ----


def test_one_engine_answers_like_a_fresh_one() -> None:
    """Trial 9. Caught: caches, noise, index or statistics of the prompt before shining through."""
    for kind, proposer in proposers():
        decoder = engine(ScriptedModel(TARGET), proposer, 8)
        for prompt in (PROMPT, [5], PROMPT):
            statistics = run(decoder, prompt, 30, 3)
            fresh = run(engine(ScriptedModel(TARGET), dict(proposers())[kind], 8), prompt, 30, 3)
            assert statistics.tokens == fresh.tokens
            assert [entry.draft_tokens for entry in statistics.rounds] == [entry.draft_tokens for entry in fresh.rounds]


def test_a_new_generation_ends_the_one_before() -> None:
    """Caught: two generations on one cache, of which both came out wrong without a word."""
    decoder = engine(ScriptedModel(TARGET), ScriptedModel(DRAFT), 8)
    older = decoder.generate(PROMPT, GenerationConfig(20, 3))
    next(older)
    newer = decoder.generate([5], GenerationConfig(20, 3))
    next(older)  # not started yet: the older one is undisturbed
    next(newer)
    with pytest.raises(RuntimeError, match="another generation was started on this engine"):
        next(older)
    assert newer.run() == run(engine(ScriptedModel(TARGET), None, 8), [5], 20, 0).tokens


def test_closing_a_generation_stops_the_passes() -> None:
    """Trial 25. Caught: a background loop that went on, or a half-fed cache that spoiled the next call."""
    target, draft = ScriptedModel(TARGET), ScriptedModel(DRAFT)
    decoder = engine(target, draft, 8)
    generation = decoder.generate(PROMPT, GenerationConfig(50, 3))
    for _ in range(3):
        next(generation)
    passes = len(target.passes) + len(draft.passes)
    generation.close()
    assert list(generation) == [] and len(target.passes) + len(draft.passes) == passes
    assert generation.statistics.target_passes == 2 and generation.statistics.tokens == base(50)[:generation.statistics.emitted]
    assert run(decoder, PROMPT, 30, 3).tokens == base(30)


def test_an_error_in_the_draft_reaches_the_consumer() -> None:
    """Trial 24. Caught: an exception swallowed by a thread, after which the stream hung or ended as if complete."""
    draft = ScriptedModel(DRAFT)

    def failing(so_far: Sequence[int]) -> torch.Tensor:
        if len(draft.passes) == 3:
            raise RuntimeError("the third forward")
        return DRAFT(so_far)

    draft.script = failing
    decoder = engine(ScriptedModel(TARGET), draft, 8)
    generation = decoder.generate(PROMPT, GenerationConfig(30, 3))
    with pytest.raises(RuntimeError, match="the third forward"):
        generation.run()
    draft.script = DRAFT
    assert run(decoder, PROMPT, 30, 3).tokens == base(30), "the engine is as good as new"


@pytest.mark.parametrize("params", CHANCE[:2])
def test_nan_from_the_target_is_an_error(params: SamplingParams) -> None:
    """Trial 36. Caught: the argmax of NaN is a token like any other: '!!!!'."""
    def overflowing(so_far: Sequence[int]) -> torch.Tensor:
        return TARGET(so_far) if len(so_far) < 9 else torch.full((8,), torch.nan)

    generation = engine(ScriptedModel(overflowing), ScriptedModel(DRAFT), 8).generate(PROMPT, GenerationConfig(9, 2, params))
    with pytest.raises(LogitsError, match="bf16 or fp32"):
        generation.run()
    assert generation.statistics.tokens == base(9, sampling=params)[:generation.statistics.emitted]


@pytest.mark.parametrize("params", CHANCE[:2])
def test_nan_behind_a_wrong_draft_token_is_nobodys_business(params: SamplingParams) -> None:
    """Caught: an error about a row that target-only decoding would never have computed."""
    script = blend(TARGET, lambda so_far: torch.full((8,), torch.nan if 7 in so_far else 0.0), 1e-9)
    never = lambda so_far: torch.where(torch.arange(8) == 7, -50.0, script(so_far))
    draft = ScriptedModel(lambda so_far: peaks(8, 7))
    ours = run(engine(ScriptedModel(never), draft, 8), PROMPT, 20, 3, sampling=params, siblings=False)
    assert ours.tokens == run(engine(ScriptedModel(never), None, 8), PROMPT, 20, 0, sampling=params).tokens


def test_the_callers_state_is_left_alone() -> None:
    """Caught: gradients off or inference mode on between two rounds, a seeded global generator, a changed dtype."""
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    states = random.getstate(), np.random.rand(3).tolist(), torch.get_rng_state()
    np.random.seed(1)
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    for params in (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, coupling="rejection")):
        for _ in engine(ScriptedModel(TARGET), ScriptedModel(DRAFT), 8).generate(PROMPT, GenerationConfig(20, 3, params)):
            assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
            weight = torch.ones(1, requires_grad=True)
            (weight * 2).sum().backward()
    assert (random.getstate(), np.random.rand(3).tolist()) == states[:2]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert (torch.get_default_dtype(), torch.get_num_threads()) == (dtype, threads)
    with torch.no_grad():
        run(engine(ScriptedModel(TARGET), ScriptedModel(DRAFT), 8), PROMPT)
        assert not torch.is_grad_enabled()


def test_the_policy_does_not_see_the_drafts_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: seconds of reading a long prompt in the first round's rate, which then drafted too much for 20 rounds."""
    drafter, policy, seen = ModelDrafter(ScriptedModel(DRAFT)), FixedK(3, Widths.fixed(4)), list[float]()

    def slowly(prompt: Sequence[int], slots: int) -> None:
        time.sleep(0.5)
        ModelDrafter.begin(drafter, prompt, slots)

    monkeypatch.setattr(drafter, "begin", slowly)
    monkeypatch.setattr(policy, "observe", lambda *args: seen.append(args[-1]))
    statistics = run(engine(ScriptedModel(TARGET), drafter, 8, widths=policy.widths, policy=policy), PROMPT, 12, 3)
    assert statistics.draft_seconds >= 0.5 and statistics.rounds[1].seconds - seen[0] >= 0.5


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
