"""How a call begins, ends and fails: prompts, limits, end tokens, stops, errors, and the state that it leaves behind."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from itertools import count
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scripted import CHANCE, DRAFT, PROMPT, TARGET, ScriptedModel, base, blend, engine, peaks, proposers, recite, run

from assemble import shared_vocabulary
from drafters import ModelDrafter
from metrics import Statistics
from policy import DynamicK, FixedK, Heuristic
from sampling import LogitsError, SamplingParams
from shapes import Widths
from spec_decode import GenerationConfig, SpeculativeDecoder

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


@pytest.mark.parametrize("unknown", [-1, 8, 10, 1 << 40])
def test_ids_that_no_token_has_are_refused_at_once(unknown: int) -> None:
    """Caught: -1 taken for the last id without a word, padding of the logits as a prompt, an IndexError beyond it."""
    padded = ScriptedModel(lambda so_far: torch.cat([TARGET(so_far), torch.zeros(3)]))
    with pytest.raises(ValueError, match=f"the prompt has the token id {unknown}, outside 0 to 7; encode it with"):
        engine(padded, None, 8).generate([1, unknown, 2])
    assert engine(padded, None, 8).generate([0, 7], GenerationConfig(1, 0)).run()


def test_special_tokens_beyond_a_gap_are_known() -> None:
    """Caught: a tokenizer of 10 tokens whose last has id 11: that token could not be in a prompt, nor be chosen."""
    class Tokenizer(list):
        added_tokens_decoder = MappingProxyType({11: "<|end|>"})

    def decoder(size: int) -> Any:
        return SimpleNamespace(config=SimpleNamespace(vocab_size=size))

    pair: Any = SimpleNamespace(tokenizer=Tokenizer(range(10)))
    assert shared_vocabulary(pair, decoder(16), None) == 12 and shared_vocabulary(pair, decoder(16), decoder(10)) == 10
    pair.tokenizer.added_tokens_decoder = {}
    assert shared_vocabulary(pair, decoder(16)) == 10


# ---- policies of the caller's own ----


@pytest.mark.parametrize("policy", [FixedK(8, Widths({1: 1.0, 64: 1.0})), DynamicK(Widths({1: 1.0, 64: 1.0}))])
def test_a_policy_that_no_width_holds_is_refused_at_once(policy: FixedK | DynamicK) -> None:
    """Caught: a pass of 9 rows where the widest proven one has 8: an error in the middle of a text."""
    with pytest.raises(ValueError, match=r"drafts up to \d+ tokens, but the widest pass in use has 8 rows; use a limit of 7"):
        engine(ScriptedModel(TARGET), ScriptedModel(DRAFT), 8, widths=Widths.fixed(8), policy=policy)
    engine(ScriptedModel(TARGET), ScriptedModel(DRAFT), 8, policy=policy)
    with pytest.raises(ValueError, match="8 speculative tokens need a pass of 9 rows"):
        engine(ScriptedModel(TARGET), None, 8, widths=Widths.fixed(8)).generate(PROMPT, GenerationConfig(9, 8))


def test_a_policy_whose_limit_grows_stays_within_the_widths() -> None:
    """Caught: the same error in mid-text from a policy that starts low and was made for other widths."""
    policy = Heuristic(Widths({1: 1.0, 64: 1.0}), 5)
    perfect = engine(ScriptedModel(TARGET), ScriptedModel(TARGET), 8, widths=Widths.fixed(8), policy=policy)
    for _ in range(2):
        assert max(entry.num_drafted for entry in run(perfect, PROMPT, 60, None).rounds) == 7 < policy.limit()


def test_the_policy_is_told_what_a_round_and_its_pass_took() -> None:
    """Caught: an engine that times nothing, so that seconds measured on a busy machine stay in force."""
    told: list[tuple[float, float | None]] = []

    class Noting(FixedK):
        def observe(self, drafted: int, confidences: Sequence[float | None], num_accepted: int, emitted: int, seconds: float,
                    pass_seconds: float | None = None) -> None:
            told.append((seconds, pass_seconds))

    policy = Noting(3, Widths({1: 1.0, 64: 1.0}))
    run(engine(ScriptedModel(TARGET), ScriptedModel(DRAFT), 8, policy=policy), PROMPT, 20, None)
    assert told and all(part is not None and 0 < part <= whole for whole, part in told)


# ---- the engine and its callers ----


def test_one_engine_answers_like_a_fresh_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trial 9. Caught: caches, noise, index or statistics of the prompt before shining through."""
    def run_by_a_clock(decoder: SpeculativeDecoder, prompt: list[int]) -> Statistics:
        clock = count(1)  # seconds decide between lookup and model: here all alike
        monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
        return run(decoder, prompt, 30, 3)

    for kind, proposer in proposers():
        decoder = engine(ScriptedModel(TARGET), proposer, 8)
        for prompt in (PROMPT, [5], PROMPT):
            statistics = run_by_a_clock(decoder, prompt)
            fresh = run_by_a_clock(engine(ScriptedModel(TARGET), dict(proposers())[kind], 8), prompt)
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
