"""Sampling keeps the target's distribution, and coupled sampling its very tokens."""

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor
from transformers.generation import logits_process as hf

import sampling
from sampling import LogitsError, SamplingParams, choose, draw, generator_of, gumbel_noise, probabilities, residual, warp

FOUR = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()


def random_logits(*shape: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


def kept_ids(logits: Tensor, **kwargs: Any) -> list[int]:
    return warp(logits, SamplingParams(temperature=1.0, **kwargs)).isfinite().nonzero().flatten().tolist()


def hugging_face(logits: Tensor, params: SamplingParams, history: Tensor | None = None) -> Tensor:
    """What `generate` computes for rows (n, V) of one history: each processor that is on, in its order."""
    scores: Any = logits.float()
    ids: Any = (torch.tensor([0]) if history is None else history).expand(len(scores), -1)
    for is_on, step in (
        (params.repetition_penalty != 1, lambda: hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)),
        (params.temperature != 1, lambda: hf.TemperatureLogitsWarper(params.temperature)),
        (params.top_k > 0, lambda: hf.TopKLogitsWarper(params.top_k)),
        (params.top_p < 1, lambda: hf.TopPLogitsWarper(params.top_p)),
        (params.min_p > 0, lambda: hf.MinPLogitsWarper(params.min_p)),
    ):
        scores = step()(ids, scores) if is_on else scores
    return scores


@pytest.mark.parametrize("temperature", [0, 1e-8, 1e-5, 1e-45, 5e-324])
def test_temperatures_up_to_1e_5_are_greedy(temperature: float) -> None:
    """Caught: dividing by 1e-45, which is 0 in fp32, gave inf - inf = NaN probabilities."""
    assert choose(torch.tensor([1.0, 3.0, 2.0]), SamplingParams(temperature=temperature), position=0) == 1
    assert SamplingParams(temperature=temperature).greedy
    assert not SamplingParams(temperature=2e-5).greedy


def test_wrong_settings_are_refused_by_name() -> None:
    """Caught: NaN passes `temperature < 0`, and a negative top_k reached torch.topk in the middle of a generation."""
    nan, inf = math.nan, math.inf
    wrong: dict[str, tuple] = {"temperature": (-1.0, -1e-9, nan, inf), "top_k": (-1, 2.5), "top_p": (-0.1, 1.01, nan)}
    wrong |= {"min_p": (-0.1, 1.0, nan), "repetition_penalty": (0.0, -1.0, nan, inf)}
    wrong |= {"seed": (-1, 2**64, 0.5), "coupling": ("maximal",)}
    for name, value in ((name, value) for name, values in wrong.items() for value in values):
        with pytest.raises(ValueError, match=f"^{name} is .*use"):
            SamplingParams(**{name: value})


def test_nucleus_sizes_that_can_be_counted_by_hand() -> None:
    """Caught: a nucleus cut before the token that crosses top_p (two ids at 0.8), or none left at a tiny top_p."""
    for top_p, count in ((1, 4), (0.95, 4), (0.8, 3), (0.65, 2), (1e-9, 1), (0, 1)):
        assert kept_ids(FOUR, top_p=top_p) == list(range(count)), top_p
    assert kept_ids(FOUR.flip(0), top_p=0.8) == [1, 2, 3]
    assert kept_ids(FOUR, min_p=0.6) == [0, 1]
    assert kept_ids(FOUR, top_k=10**6) == [0, 1, 2, 3]
    assert kept_ids(FOUR, top_k=3, top_p=0.75) == [0, 1]  # of the three, renormalised: .44 .33 .22


def test_ties_at_the_border_are_settled_by_id() -> None:
    """Caught: bf16 logits tie often, and which of them an unstable sort keeps may change with the shape of the pass."""
    assert kept_ids(torch.zeros(8), top_p=0.5) == [0, 1, 2, 3]
    assert kept_ids(torch.zeros(8), top_k=2) == list(range(8))  # as in Hugging Face
    level = torch.tensor([0.0, 5.0, 5.0, 5.0])
    assert kept_ids(level, top_p=1e-9) == [1]
    for greedy in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}):
        params = SamplingParams(**{"temperature": 1.0, **greedy})  # type: ignore[arg-type]
        assert choose(level, params, position=3) == 1
        assert probabilities(level, params).tolist() == [0, 1, 0, 0]
    logits, params = random_logits(20, 2000, seed=3).bfloat16(), SamplingParams(temperature=1.0, top_p=0.7)
    assert torch.equal(warp(logits, params).sort().values, hugging_face(logits, params).sort().values)


GRID: list[dict[str, Any]] = [
    {"temperature": t, "top_k": k, "top_p": p, "min_p": m, "repetition_penalty": r}
    for t, k, p, m, r in itertools.product((0.3, 1.0), (0, 1, 20, 999), (0.05, 0.9, 0.999, 1), (0, 0.02), (1.0, 1.3))
]


def test_equal_to_the_hugging_face_processors() -> None:
    """Caught: top-p before temperature, a penalty applied once per occurrence, min-p relative to all instead of max."""
    history = torch.tensor([3, 7, 7, 299, 3, 310])  # one id beyond the logits: no token, ignored there too
    for spread in (0.5, 3.0, 8.0):  # from rows so flat that the nucleus is not near the peak to one-token rows
        for index, kwargs in enumerate(GRID):
            row = random_logits(1, 300, seed=index, spread=spread)
            params = SamplingParams(**kwargs)
            assert torch.equal(warp(row, params, history), hugging_face(row, params, history)), (spread, kwargs)
    wrong_order = hugging_face(FOUR[None], SamplingParams(temperature=1.0, top_p=0.65)) / 3.0
    assert not torch.equal(wrong_order[0], warp(FOUR, SamplingParams(temperature=3.0, top_p=0.65)))


@pytest.mark.parametrize(
    "kwargs", [{"top_p": 0.9}, {"top_k": 50}, {"top_k": 9, "top_p": 0.8}, {"min_p": 0.05}], ids=str
)
def test_equal_to_the_hugging_face_processors_at_full_vocabulary(kwargs: dict) -> None:
    """Caught: the shortcut that sorts only scores near the peak, wrong once the nucleus reaches further."""
    logits = random_logits(2, 151_936, seed=5, spread=2.5)
    logits[0, 1000:1020] += torch.linspace(8, 14, 20)  # the other row is flat, with thousands of tokens in the nucleus
    params = SamplingParams(temperature=0.8, **kwargs)
    assert torch.equal(warp(logits, params), hugging_face(logits, params))


def test_a_nucleus_beyond_the_reach_of_the_shortcut() -> None:
    """Caught: one peak and a plain of 150,000 unlikely tokens that hold most of the mass together."""
    logits = torch.full((151_936,), -11.0) - torch.arange(151_936) * 1e-6
    logits[777] = 0.0
    assert logits[777] - logits[0] > sampling.NUCLEUS_REACH
    kept = kept_ids(logits, top_p=0.5 + 0.5 * float(logits.softmax(0)[777]))  # the peak and half of the plain
    assert 70_000 < len(kept) < 80_000 and kept == list(range(len(kept)))


def test_rows_do_not_depend_on_their_neighbours() -> None:
    """Caught: one filter for all rows, so outputs changed with K; logits overwritten; a crash outside no_grad."""
    with torch.inference_mode():
        frozen = random_logits(6, 1000, seed=1)
    logits, before = frozen.clone().requires_grad_(), frozen.clone()
    for kwargs in [{"temperature": 0.0}, *GRID[::2]]:
        params = SamplingParams(**kwargs)
        together = warp(logits, params)
        assert all(torch.equal(together[i], warp(frozen[i], params)) for i in range(6))
        together.zero_()
        warp(frozen, params).zero_()
        assert torch.equal(logits, before) and torch.equal(frozen, before)  # neither changed nor shared


def test_penalty_needs_the_history_of_its_row() -> None:
    """Caught: one history for all rows of a verification pass, although each row has seen one draft token more."""
    params = SamplingParams(repetition_penalty=1.3)
    logits = torch.tensor([2.0, 1.9, -1.0])
    assert choose(logits, params, 0, history=torch.tensor([0])) == 1
    assert torch.equal(warp(logits, params, torch.tensor([2, 2])), torch.tensor([2.0, 1.9, -1.3]))
    with pytest.raises(ValueError, match="needs history"):
        warp(logits, params)
    with pytest.raises(ValueError, match="one row at a time"):
        warp(logits.expand(2, 3), params, torch.tensor([0]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_logits_are_an_error_that_suggests_a_precision(bad: float) -> None:
    """Caught: argmax of a NaN row is a token like any other, and the output was '!!!!'."""
    logits = torch.tensor([1.0, bad, 0.0, 2.0, 1.5])
    for params in (SamplingParams(), SamplingParams(temperature=0.8), SamplingParams(temperature=1.0, top_p=0.9)):
        for call in (warp, probabilities, lambda row, params: choose(row, params, 0)):
            with pytest.raises(LogitsError, match="bf16 or fp32"):
                call(logits, params)
            with pytest.raises(LogitsError):
                call(torch.full((3,), -math.inf), params)
        assert choose(torch.tensor([1.0, -math.inf]), params, 0) == 0  # -inf just rules a token out
    with pytest.raises(LogitsError, match="bf16 or fp32"):
        draw(torch.tensor([0.5, math.nan]), torch.Generator())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [2e-5, 1e-3, 1.0])
def test_equal_models_accept_everything_without_nan(dtype: torch.dtype, temperature: float) -> None:
    """Caught: softmax in bf16 at T = 1e-3 overflowed, and 0/0 in the residual of two equal distributions."""
    for logits in random_logits(50, 200, seed=2, spread=20.0).to(dtype):
        probs = probabilities(logits, SamplingParams(temperature=temperature))
        assert probs.dtype == torch.float32
        assert float(probs.sum()) == pytest.approx(1, abs=1e-5)
        assert torch.equal(residual(probs, probs.clone()), probs)
        assert probs[draw(probs, torch.Generator().manual_seed(1))] > 0


WEIGHT = st.one_of(st.just(0.0), st.floats(1e-3, 1.0), st.floats(1e-300, 1e-12), st.floats(1e6, 1e12))
DISTRIBUTION = (
    st.lists(WEIGHT, min_size=6, max_size=6).filter(any).map(lambda w: torch.tensor(w, dtype=torch.float64) / sum(w))
)


def mixture(target: Tensor, draft: Tensor, recovered: Tensor) -> Tensor:
    """The distribution of the token that one accept-or-recover step emits."""
    accepted = torch.minimum(target, draft)
    return accepted + (1 - accepted.sum()) * recovered


@settings(derandomize=True, max_examples=400, deadline=None, database=None)
@given(DISTRIBUTION, DISTRIBUTION, st.sampled_from(["any", "equal", "close", "disjoint", "one-hot", "nearly", "nearly both"]))
def test_accepted_and_recovered_mass_add_up_to_the_target(target: Tensor, other: Tensor, relation: str) -> None:
    """Caught: a residual not normalised, or NaN where there is none (Leviathan et al. 2023, appendix A.1)."""
    one_hot = (torch.arange(6) == int(other.argmax())).double()
    nearly = one_hot * (1 - 1e-9) + other * 1e-9
    draft = {"equal": target.clone(), "close": target * (1 + 1e-15 * other), "one-hot": one_hot, "nearly": nearly,
             "nearly both": nearly}.get(relation, other)
    if relation == "nearly both":
        target = one_hot * (1 - 3e-10) + target * 3e-10
    if relation == "disjoint":
        target, draft = torch.cat([target, 0 * target]), torch.cat([0 * draft, draft])
    recovered = residual(target, draft)
    assert recovered.isfinite().all()
    assert float(recovered.sum()) == pytest.approx(1, abs=1e-12)
    assert float((mixture(target, draft, recovered) - target).abs().max()) <= 1e-12
    single = residual(target.float(), draft.float())  # the precision of the engine
    assert single.isfinite().all() and float(single.sum()) == pytest.approx(1, abs=1e-5)
    assert float(target[draw(single, torch.Generator().manual_seed(0))]) > 0, "never a token that the target rules out"


def test_the_identity_rejects_a_wrong_residual() -> None:
    """Negative control: recovering from the target itself, the commonest mistake, is seen by the identity above."""
    target, draft = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]], dtype=torch.float64)
    assert float((mixture(target, draft, target) - target).abs().max()) > 0.01
    assert float((mixture(target, draft, residual(target, draft)) - target).abs().max()) < 1e-12


def test_residual_of_drafts_padded_to_another_width() -> None:
    """Caught: Qwen2.5 pairs pad their logits differently, and the subtraction raised at temperature 1 only."""
    target = FOUR.exp()
    assert torch.allclose(residual(target, torch.tensor([0.5, 0.5])), torch.tensor([0, 0, 2 / 3, 1 / 3]))
    assert torch.allclose(residual(target, torch.tensor([0.4, 0.1, 0, 0, 0.5])), torch.tensor([0, 0.4, 0.4, 0.2]))


def test_draw_follows_the_probabilities() -> None:
    """Caught: a token of probability 0 drawn at the end of the table, and draws that moved the global generator."""
    probs = torch.tensor([0.0, 0.1, 0.0, 0.2, 0.7, 0.0])
    state, generator = torch.get_rng_state(), torch.Generator().manual_seed(3)
    counts = np.bincount([draw(probs, generator) for _ in range(10_000)], minlength=6)
    assert torch.equal(torch.get_rng_state(), state)
    assert counts[[0, 2, 5]].sum() == 0
    assert stats.chisquare(counts[[1, 3, 4]], 10_000 * np.array([0.1, 0.2, 0.7])).pvalue > 0.001


def test_seeds_that_differ_in_any_bit_draw_differently() -> None:
    """Caught: PyTorch's generator ignores all but the low 32 bits, so seeds 5 and 5 + 2^32 gave the same samples."""
    seeds = [0, 1, 5, 5 + 2**32, 5 + 2**63, 2**64 - 1, 2**32 - 1]
    assert len({tuple(torch.rand(3, generator=generator_of(seed)).tolist()) for seed in seeds}) == len(seeds)
    assert torch.equal(torch.rand(3, generator=generator_of(5)), torch.rand(3, generator=generator_of(5)))


def test_draw_at_both_ends_of_the_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: u * total rounds up to the total, and the draw gave a token beyond the vocabulary, once in 2^25."""
    for uniform, token in ((0.0, 1), (1 - 2.0**-53, 2)):
        monkeypatch.setattr(torch, "rand", lambda *_, u=uniform, **__: torch.tensor(u, dtype=torch.float64))
        for probs in ([0.0, 0.25, 0.75, 0.0], [0.0, 1e-30, 1e-30, 0.0], [0.0, 0.1, 0.9 / 7, 0.0]):
            assert draw(torch.tensor(probs), torch.Generator()) == token


def test_noise_depends_on_seed_position_and_token_only() -> None:
    """Caught: noise that changed with the width of the logits, the number of threads, the process, or other calls."""
    assert gumbel_noise(42, 7, 4).tolist() == pytest.approx([-0.278183, 0.513627, -0.069967, 1.007147], abs=1e-5)
    wide, num_threads = gumbel_noise(42, 17, 152_064), torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for width in (*range(1, 70), 2047, 2049, 32_769, 98_303, 151_665, 151_936):
                assert torch.equal(gumbel_noise(42, 17, width), wide[:width]), (threads, width)
    finally:
        torch.set_num_threads(num_threads)
    with ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(lambda position: gumbel_noise(42, position % 20, 8), range(200)))
    assert all(torch.equal(row, gumbel_noise(42, index % 20, 8)) for index, row in enumerate(rows))
    assert len({gumbel_noise(seed, at, 8).sum().item() for seed in (0, 1, 2**64 - 1) for at in range(50)}) == 150


def test_noise_is_finite_at_the_extremes_and_fine_in_the_upper_tail() -> None:
    """Caught: u = 1 gave infinite noise once in 2^25 draws, and 24-bit uniforms never exceed 16.6."""
    noise = sampling._gumbel_from_bits(np.array([0, 1, 2**31, 2**32 - 1], dtype=np.uint32))
    exact = [33 * math.log(2), 32 * math.log(2) - math.log(1.5), -math.log(math.log(2)), -math.log(24 * math.log(2))]
    assert noise.tolist() == pytest.approx(exact, abs=1e-5)
    assert stats.kstest(gumbel_noise(1, 2, 200_000).numpy(), stats.gumbel_r.cdf).pvalue > 0.001


def joint_pvalue(tokens: NDArray[np.int64], probs: Tensor) -> float:
    """Chi-square of consecutive pairs of tokens against independent draws from probs."""
    pairs = tokens[0::2] * len(probs) + tokens[1::2]
    expected = torch.outer(probs, probs).flatten().double().numpy()
    counts = np.bincount(pairs, minlength=len(expected))
    return float(stats.chisquare(counts, expected / expected.sum() * len(pairs)).pvalue)


def test_coupled_sampling_has_the_distribution_of_the_target() -> None:
    """Caught: noise of two positions that overlap or correlate, and uniform instead of Gumbel noise."""
    logits, params = torch.tensor([2.0, 1.0, 0.0, 1.5, -2.0]), SamplingParams(temperature=0.8, top_k=4, seed=9)
    scores, probs = warp(logits, params), probabilities(logits, params)[:4]
    noise = torch.stack([gumbel_noise(9, position, 5) for position in range(40_000)])
    tokens = (scores + noise).argmax(-1).numpy()
    assert tokens[:100].tolist() == [choose(logits, params, position) for position in range(100)]
    assert joint_pvalue(tokens, probs) > 0.001
    over_seeds = torch.stack([gumbel_noise(seed, 3, 5) for seed in range(10_000)])
    assert joint_pvalue((scores + over_seeds).argmax(-1).numpy(), probs) > 0.001
    uniform = torch.exp(-torch.exp(-noise))  # the control: what is left out if the two logarithms are forgotten
    assert joint_pvalue((scores + uniform).argmax(-1).numpy(), probs) < 1e-6


def test_draft_and_target_agree_when_their_logits_do() -> None:
    """Caught: a draft padded to another width that drew other noise, so that nothing was accepted."""
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=1)
    logits = random_logits(40, 320, seed=8, spread=1.0)
    padded = torch.nn.functional.pad(logits, (0, 64), value=-100.0)
    noise = [gumbel_noise(1, position, 384) for position in range(40)]
    tokens = [choose(row, params, at) for at, row in enumerate(logits)]
    assert tokens == [choose(row, params, at) for at, row in enumerate(padded)]
    assert tokens == [choose(row, params, at, noise=noise[at]) for at, row in enumerate(logits)]
    assert len(set(tokens)) > 20
    with pytest.raises(ValueError, match="wider"):
        choose(padded[0], params, 0, noise=noise[0][:320])
    with pytest.raises(ValueError, match="one position"):
        choose(padded, params, 0)
