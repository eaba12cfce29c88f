"""On real transformers (the tiny random pair): speculative output equals target-only output, to the bit of the logits."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from scripted import NARROW, VOCAB, ScriptedModel, decoder, drafter, engine, recite, run, tiny

from assemble import load_decoder
from drafters import ModelDrafter
from metrics import Statistics
from sampling import SamplingParams
from shapes import Widths
from spec_decode import GenerationConfig, SpeculativeDecoder
from text import TextStream
from transformer import Decoder, DecoderConfig

PROMPTS = [tiny().encode(text, raw=True) for text in (
    "Count from 1 to 60: 1, 2, 3,", "def add(a, b):\n    return a + b\n\ndef add(a, b):\n", "ha ha ha ha", "a", "Übersetze: ça va?",
    "The quick brown fox jumps over the lazy dog. The quick brown fox", " ", "\n", "x = [1, 2, 3]; x = [1, 2, 3]", "🙂🙂")]
GUMBEL = SamplingParams(temperature=0.8, seed=11)


def spec(kind: str = "model", target: str = "bf16", draft: str = "int4", backend: str = "auto",
         widths: Widths | None = None) -> SpeculativeDecoder:
    return engine(decoder("target", target, backend), drafter(kind, draft, backend), VOCAB, widths=widths)


def trail(statistics: Statistics) -> tuple[list[int], list[str]]:
    """Ids and the digests of the logits that each was chosen from."""
    return statistics.tokens, [digest for entry in statistics.rounds for digest in entry.digests]


# ---- greedy ----


@pytest.mark.parametrize("num", [1, 3, 4, 8])
def test_ids_and_logit_bits_equal_target_only_decoding(num: int) -> None:
    """Trial 1. Caught: a row whose bits depend on the rows beside it: bf16 outputs that drift from the plain ones."""
    for prompt in (*PROMPTS, *(PROMPTS[i] + PROMPTS[i - 1] for i in range(10))):
        expected = trail(run(spec("none"), prompt, 24, 0, digests=True))
        assert trail(run(spec("both"), prompt, 24, num, digests=True)) == expected
    assert trail(run(spec("none", "fp32"), prompt, 24, 0, digests=True))[1] != expected[1], "the control: digests tell apart"


def test_a_long_generation() -> None:
    """Trials 1, 6. Caught: a difference that only shows late; rounds that stop drafting although K is fixed."""
    expected = trail(run(spec("none"), PROMPTS[0], 150, 0, digests=True))
    statistics = run(spec("model"), PROMPTS[0], 150, 3, digests=True)
    assert trail(statistics) == expected
    assert all(entry.num_drafted for entry in statistics.rounds[1:-1])
    assert 0.2 < (statistics.acceptance_rate or 0) < 1, "some accepted, some not: the comparison says something"


@pytest.mark.parametrize("kind", ["model", "lookup", "both"])
@pytest.mark.parametrize("params", [SamplingParams(), GUMBEL, replace(GUMBEL, top_p=0.9, repetition_penalty=1.2)])
def test_every_k_drafter_width_and_sibling(kind: str, params: SamplingParams) -> None:
    """Caught: an output that depends on how it was sped up; padding rows or siblings that reach the chain's rows."""
    prompt = PROMPTS[1]
    expected = trail(run(spec("none"), prompt, 20, 0, sampling=params, digests=True))
    for widths in (None, NARROW):
        for num in (0, 1, 3, 7, None):
            for siblings in (True, False):
                statistics = run(spec(kind, widths=widths), prompt, 20, num, siblings=siblings, sampling=params, digests=True)
                assert trail(statistics) == expected, (widths, num, siblings)


@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8", "int4"])
def test_every_precision_of_target_and_draft(weights: str) -> None:
    """Trial 37. Caught: a quantised target whose rows share a scale; a draft precision that shows in the output."""
    expected = trail(run(spec("none", weights), PROMPTS[5], 24, 0, digests=True))
    for draft in ("fp32", "bf16", "int8", "int4"):
        assert trail(run(spec("model", weights, draft), PROMPTS[5], 24, 4, digests=True)) == expected


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_the_first_token_of_prompts_of_any_length(weights: str) -> None:
    """Trial 2. Caught: a prompt of one token, of one block, or one short of it, fed wrongly."""
    text = (PROMPTS[5] + PROMPTS[1])[:50]
    model = tiny().target.hf_model(torch.float32)
    with torch.no_grad():
        reference = model(torch.tensor([text])).logits[0, :, :VOCAB].argmax(-1).tolist()
    base, ours = spec("none", weights), spec("both", weights)
    for length in range(1, 51):
        first = run(ours, text[:length], 1, 4)
        assert first.tokens == run(base, text[:length], 1, 0).tokens
        assert weights == "bf16" or first.tokens == [reference[length - 1]]


def test_prompts_of_one_token() -> None:
    """Trial 3. Caught: nothing to prefill the draft with; a lookup in a text shorter than its n-grams."""
    for prompt in ([10], tiny().encode("a", raw=True)):
        for weights in ("fp32", "bf16"):
            expected = trail(run(spec("none", weights), prompt, 64, 0, digests=True))
            for kind in ("model", "both"):
                assert trail(run(spec(kind, weights), prompt, 64, 5, digests=True)) == expected


def test_one_engine_for_several_prompts() -> None:
    """Trial 9. Caught: stale slots of a longer prompt seen by a shorter one; statistics that add up over calls."""
    ours = spec("both")
    for prompt in (PROMPTS[5], PROMPTS[3], PROMPTS[5]):
        statistics = run(ours, prompt, 30, 4, digests=True)
        target, draft = load_decoder(tiny().target, "bf16"), load_decoder(tiny().draft, "int4")  # type: ignore[arg-type]
        fresh = run(engine(target, ModelDrafter(draft), VOCAB), prompt, 30, 4, digests=True)
        assert trail(statistics) == trail(fresh) and statistics.emitted == 30


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("length", [509, 511, 512, 513, 515])
def test_prompts_and_generations_across_the_block(length: int, backend: str) -> None:
    """Caught: logits that change when the visible part of the cache grows by a block in the middle of a round."""
    prompt = (PROMPTS[5] * 10)[:length]
    for start in (prompt, prompt[:length - 10]):  # at the block, and across it while generating
        widths = Widths.fixed(8) if backend == "torch" else None
        expected = run(spec("none", "fp32", backend=backend, widths=widths), start, 16, 0, digests=True)
        ours = run(spec("model", "fp32", "fp32", backend, widths), start, 16, 4, digests=True)
        assert ours.tokens == expected.tokens
        assert backend == "torch" or trail(ours) == trail(expected)


@pytest.mark.parametrize("num", [1, 3, 8])
def test_draft_equals_target(num: int) -> None:
    """Trial 43. Caught: K + 1 or K - 1 drafted; a perfect draft that is rejected now and then, or one pass too many."""
    for weights, backend in (("fp32", "native"), ("bf16", "native"), ("fp32", "torch")):
        model = decoder("target", weights, backend)
        twin = load_decoder(tiny().target, weights, backend=backend)
        statistics = run(engine(model, ModelDrafter(twin), VOCAB), PROMPTS[0], 40, num)
        assert statistics.acceptance_rate == 1 and statistics.target_passes == -(-39 // (num + 1))
        assert max(entry.num_drafted for entry in statistics.rounds) == num


def test_a_target_smaller_than_its_draft() -> None:
    """Trial 47. Caught: an output of the larger model, or a refusal: speed is lost, the output is not."""
    small, large = decoder("draft", "bf16"), decoder("target", "bf16")
    expected = run(engine(small, None, VOCAB), PROMPTS[0], 40, 0, digests=True)
    assert trail(run(engine(small, ModelDrafter(large), VOCAB), PROMPTS[0], 40, 4, digests=True)) == trail(expected)


# ---- logits of different widths ----


def padded(which: str, rows: int, value: float = 0.0) -> Decoder:
    """A decoder of the tiny pair whose logits are padded to `rows`, the padding always at `value` times a constant input."""
    checkpoint = tiny().target if which == "target" else tiny().draft
    assert checkpoint is not None
    tensors = dict(checkpoint.tensors())
    config = replace(DecoderConfig.from_hf(checkpoint.config), vocab_size=rows)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        padding = torch.zeros(rows - VOCAB, config.hidden_size)
        if value and name.startswith("lm_head"):  # a direction in which the normed hidden states are made to be large
            padding[:] = value * torch.randn(padding.shape, generator=torch.Generator().manual_seed(0))
        tensors[name] = torch.cat([tensors[name], padding])
    return Decoder(config, tensors, weights="fp32")


@pytest.mark.parametrize("rows", [(320, 384), (384, 320)])
def test_logits_of_different_widths(rows: tuple[int, int]) -> None:
    """Trials 27, 28. Caught: a shape error at temperature 1 only; a padding id emitted where its logit is the highest."""
    for value in (0.0, 30.0):
        target, draft = padded("target", rows[0]), padded("draft", rows[1], value)
        ours, base = engine(target, ModelDrafter(draft), VOCAB), engine(decoder("target", "fp32"), None, VOCAB)
        for params in (SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, coupling="rejection")):
            statistics = run(ours, PROMPTS[0], 32, 4, sampling=params, end_token_ids=[])
            assert max(statistics.tokens) < VOCAB
            if params.coupling == "gumbel":
                assert statistics.tokens == run(base, PROMPTS[0], 32, 0, sampling=params).tokens
        loud = padded("target", rows[0], 30.0)
        assert run(engine(loud, ModelDrafter(draft), VOCAB), PROMPTS[0], 32, 4).tokens == run(base, PROMPTS[0], 32, 0).tokens
    logits = padded("draft", 384, 30.0).prefill(torch.tensor(PROMPTS[0]))[-1]
    assert int(logits.argmax()) >= VOCAB, "the control: unmasked, padding would have been chosen"


# ---- seeds ----


def test_seeds() -> None:
    """Trial 34. Caught: a stream that differs from one shot, seeds that do nothing, or a state carried between calls."""
    couplings: tuple[Literal["gumbel", "rejection"], ...] = ("gumbel", "rejection")
    for coupling in couplings:
        settings = {seed: SamplingParams(temperature=1.0, seed=seed, coupling=coupling) for seed in range(42, 47)}
        outputs = {seed: run(spec(), PROMPTS[0], 24, 4, sampling=params).tokens for seed, params in settings.items()}
        assert len({tuple(ids) for ids in outputs.values()}) == 5
        ours = spec()
        assert run(ours, PROMPTS[0], 24, 4, sampling=settings[42]).tokens == outputs[42]
        streamed: list[int] = []
        for entry in ours.generate(PROMPTS[0], GenerationConfig(24, 4, settings[42])):
            torch.rand(3)
            streamed += entry.tokens
        assert streamed == outputs[42]


PROGRAM = """
import sys
sys.path[:0] = sys.argv[1:]
from test_exactness import *
print(seeded())
"""


def seeded() -> list[list[int]]:
    couplings: tuple[Literal["gumbel", "rejection"], ...] = ("gumbel", "rejection")
    return [run(spec(), PROMPTS[0], 24, 4, sampling=SamplingParams(temperature=1.0, seed=42, coupling=coupling)).tokens
            for coupling in couplings]


def test_the_same_seed_in_another_process() -> None:
    """Trial 34. Caught: noise from hash(), from the clock, or from a generator that lives as long as the process."""
    here = Path(__file__).parent
    found = subprocess.run([sys.executable, "-c", PROGRAM, str(here), str(here.parent)], capture_output=True, text=True)
    assert found.stdout.strip() == str(seeded()), found.stderr


def test_concurrent_engines_do_not_disturb_each_other() -> None:
    """Caught: kernels that share a working buffer, or noise kept in a module."""
    def work(seed: int) -> list[int]:
        target, draft = load_decoder(tiny().target, "bf16"), load_decoder(tiny().draft, "int4")  # type: ignore[arg-type]
        params = SamplingParams(temperature=1.0, seed=seed)
        return run(engine(target, ModelDrafter(draft), VOCAB), PROMPTS[seed], 40, 4, sampling=params).tokens

    alone = [work(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == alone


def test_a_repetition_penalty_on_a_text_that_repeats() -> None:
    """Trial 35. Caught: the penalty's history counting rejected tokens, or the same token twice."""
    prompt = tiny().encode("ha ha ha ha", raw=True)
    for temperature in (0.0, 0.9):
        params = SamplingParams(temperature=temperature, repetition_penalty=1.3)
        expected = run(spec("none", "fp32"), prompt, 48, 0, sampling=params).tokens
        for kind in ("model", "lookup", "both"):
            assert run(spec(kind, "fp32"), prompt, 48, 6, sampling=params).tokens == expected
        assert expected != run(spec("none", "fp32"), prompt, 48, 0, sampling=replace(params, repetition_penalty=1.0)).tokens


# ---- ends, precisions, devices ----


def test_no_marker_in_the_text() -> None:
    """Trials 11, 17. Caught: '<|im_end|>' at the end of an answer; an error for a prompt of one space."""
    ends = tiny().target.end_token_ids
    assert len(ends) == 2
    for end in ends:
        script = recite([*tiny().encode("So it ends.", raw=True), end, 65, 66], VOCAB)
        for num in (0, 5):
            statistics = run(engine(ScriptedModel(script), ScriptedModel(script), VOCAB), [9], 40, num, end_token_ids=ends)
            stream = TextStream(tiny().tokenizer)
            assert stream.push(statistics.tokens) + stream.finish() == "So it ends."
            assert statistics.finish_reason == "end"
    with pytest.raises(ValueError, match="the prompt is empty"):
        tiny().encode("", raw=True)
    assert all(run(spec(), tiny().encode(text, raw=True), 3).emitted == 3 for text in (" ", "\n"))


def test_half_precision_on_a_cpu() -> None:
    """Trial 36. Caught: float16 taken by kernels that do not know it: garbage, or a crash without a word."""
    half = spec("model", "fp16", "fp16", widths=Widths.fixed(8))
    assert half.target.backend == "torch"  # type: ignore[attr-defined]
    expected = run(spec("none", "fp16", widths=Widths.fixed(8)), PROMPTS[0], 16, 0).tokens
    assert run(half, PROMPTS[0], 16, 4).tokens == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device beside the CPU")
@pytest.mark.parametrize("params", [SamplingParams(), GUMBEL, SamplingParams(temperature=0.8, coupling="rejection")])
def test_target_and_draft_on_different_devices(params: SamplingParams) -> None:
    """Trial 38. Caught: noise, masks or distributions on the wrong device."""
    cpu, cuda = (load_decoder(tiny().target, "fp32", device) for device in ("cpu", "cuda"))
    assert tiny().draft
    for target, device in ((cuda, "cpu"), (cpu, "cuda")):
        draft = load_decoder(tiny().draft, "bf16", device)  # type: ignore[arg-type]
        widths = Widths.fixed(8)
        ours = run(engine(target, ModelDrafter(draft), VOCAB, widths=widths), PROMPTS[0], 24, 4, sampling=params)
        base = run(engine(target, None, VOCAB, widths=widths), PROMPTS[0], 24, 0, sampling=params)
        assert ours.tokens == base.tokens or params.coupling == "rejection"
