"""How a token is chosen from logits: one `warp`, one `draw`, one `residual`, for target and draft alike.

Two ways to sample, both of which keep the target's distribution whatever the draft proposes:

* rejection (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023): `probabilities` on both sides, keep a draft token
  with chance min(1, target_probs / draft_probs), otherwise `draw` the recovered token from `residual`;
* coupled (Daliri, Musco and Suresh 2024): the Gumbel noise of a position is a pure function of (seed, position), and
  the token is argmax(warped logits + noise) in draft and target: `choose`. Greedy decoding is the case without noise.

Every row of logits is processed on its own and ties are settled by token id, so that the result does not depend on
how rows are grouped into passes. Nothing here seeds a global generator, prints, or changes its arguments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GREEDY_TEMPERATURE = 1e-5  # up to here the temperature means greedy decoding
NUCLEUS_REACH = 10.0  # top-p first looks at scores within this distance of the largest (weights above e^-10 of it)


class LogitsError(ArithmeticError, ValueError):
    """The model returned logits from which no token can be chosen."""


@dataclass(frozen=True)
class SamplingParams:
    """The sampling settings of one generation, checked once.

    temperature: 0 to 1e-5 is greedy. top_k: 0 is off, as is anything from the vocabulary size up; 1 is greedy.
    top_p: in [0, 1]; 1 is off, 0 keeps exactly one token, the most likely (greedy). min_p: in [0, 1), relative to the
    most likely token; 0 is off. repetition_penalty: 1 is off. seed: 0 to 2^64 - 1.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    coupling: Literal["gumbel", "rejection"] = "gumbel"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature is {self.temperature}: use 0 for greedy decoding or a positive number")
        if self.top_k != int(self.top_k) or self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}: use a whole number of tokens to keep, or 0 to keep all")
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: use a probability mass between 0 and 1 (1 keeps all tokens)")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p is {self.min_p}: use a number from 0 (keep all) to below 1")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}: use a positive number (1 is off)")
        if self.seed != int(self.seed) or not 0 <= self.seed < 2**64:
            raise ValueError(f"seed is {self.seed}: use a whole number from 0 to 2^64 - 1")
        if self.coupling not in ("gumbel", "rejection"):
            raise ValueError(f"coupling is {self.coupling!r}: use 'gumbel' or 'rejection'")

    @property
    def greedy(self) -> bool:
        """Whether the token is the most likely one, with no randomness at all."""
        return self.temperature <= GREEDY_TEMPERATURE or self.top_k == 1 or self.top_p == 0


def warp(logits: Tensor, params: SamplingParams, history: Tensor | None = None) -> Tensor:
    """Return the logits after penalty, temperature, top-k, top-p and min-p, in fp32; dropped tokens are -inf.

    The order and the results are those of the Hugging Face processors, which cast to fp32 first too. Where several
    tokens tie at the border of the nucleus, the lowest ids stay (there, whichever the sort left last). At a greedy
    temperature only the penalty applies: take the argmax (`choose`), or `probabilities` for the one-hot distribution.

    logits: (..., V), left as they are; the result shares no memory with them.
    history: (T,) ids of prompt and output up to this row; needed, for a single row, with a repetition penalty.
    Raises LogitsError for NaN or infinite logits.
    """
    scores = _penalise(logits.detach().float().contiguous(), params.repetition_penalty, history)
    scores = scores / (params.temperature if params.temperature > GREEDY_TEMPERATURE else 1.0)  # (..., V), a new tensor
    peaks = scores.amax(dim=-1)  # (...): NaN wherever the row holds one
    if not math.isfinite(float(peaks.sum())):  # as one NaN or infinity makes it
        raise LogitsError(
            "the logits hold NaN or infinity, so no token can be chosen: "
            "run the model in bf16 or fp32 (float16 overflows), or check its weights"
        )
    if params.temperature > GREEDY_TEMPERATURE and (params.top_k or params.top_p < 1 or params.min_p):
        for row, peak in zip(scores.view(-1, scores.shape[-1]), peaks.view(-1), strict=True):
            _filter_row(row, peak, params)
    return scores


def probabilities(logits: Tensor, params: SamplingParams, history: Tensor | None = None) -> Tensor:
    """Return the distribution that a token is drawn from, in fp32: softmax of `warp`, one-hot where greedy. (..., V)"""
    scores = warp(logits, params, history)
    if not params.greedy:
        return scores.softmax(dim=-1)
    return torch.zeros_like(scores).scatter_(-1, scores.argmax(dim=-1, keepdim=True), 1.0)


def choose(
    logits: Tensor,  # (V,)
    params: SamplingParams,
    position: int,
    history: Tensor | None = None,
    noise: Tensor | None = None,
) -> int:
    """Return the token at a position by coupled sampling: argmax(warp(logits) + noise), ties to the lowest id.

    position: index of the chosen token in prompt + output, the same for draft and target. noise: `gumbel_noise` of
    that position if it is at hand already, at least V long (draft and target may pad their logits differently).
    """
    if logits.dim() != 1:
        raise ValueError(f"choose takes the logits of one position, (V,), not {tuple(logits.shape)}")
    scores = warp(logits, params, history)  # (V,)
    if not params.greedy:
        width = scores.shape[0]
        noise = gumbel_noise(params.seed, position, width) if noise is None else noise
        if noise.shape[0] < width:
            raise ValueError(f"the noise covers {noise.shape[0]} of {width} tokens: make it for the wider model")
        scores += noise[:width].to(scores.device)
    return int(scores.argmax())


def gumbel_noise(seed: int, position: int, vocab_size: int) -> Tensor:
    """Return standard Gumbel noise that depends on (seed, position, token id) and on nothing else. (V,) fp32, CPU

    Philox with the seed as key and the position in the upper words of the counter, so no two positions overlap, and
    the noise of a token does not depend on vocab_size. A token's 32 bits give u = (bits + 1/2) / 2^32, open at both
    ends, and the noise is -log(-log1p(-u)): large noise comes from small u, which fp32 keeps precisely, so it reaches
    22.9 (24-bit uniforms stop at 16.6). What that costs: a token less likely than about 2^-35 never wins, together
    under 5e-6 of the mass at V = 152k; below, the noise stops at -2.81, which a token that wins practically never has.
    """
    words = np.random.Philox(key=seed, counter=position << 64).random_raw((vocab_size + 1) // 2)
    bits = words.astype("<u8", copy=False).view("<u4")[:vocab_size]  # the same two tokens a word on any machine
    return _gumbel_from_bits(bits)


def generator_of(seed: int) -> torch.Generator:
    """Return the generator of a seed's draws. PyTorch's takes 32 bits, so all 64 are mixed into them."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))


def draw(probs: Tensor, generator: torch.Generator) -> int:
    """Draw a token from probs (V,) by inverting the cumulative sum at one fp64 uniform; probs need not sum to 1."""
    cumulative = probs.cumsum(0, dtype=torch.float64)  # (V,)
    total = float(cumulative[-1])
    if not (math.isfinite(total) and total > 0):
        raise LogitsError(f"the probabilities sum to {total}: run the model in bf16 or fp32")
    uniform = torch.rand((), generator=generator, dtype=torch.float64, device=generator.device)  # in [0, 1)
    point = float(uniform) * total  # below the total, for the uniform is at most 1 - 2^-53
    return int(torch.searchsorted(cumulative, point, right=True))  # right: never a token of probability 0


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Return the distribution of the recovered token, max(0, target - draft) normalised; the target's where equal.

    target_probs: (..., V). draft_probs: (..., V'); a draft padded to another width is cut or filled up to V.
    With it, min(target, draft) + (1 - sum of min(target, draft)) * residual = target: the output keeps the target's
    distribution (Leviathan et al. 2023, appendix A.1). No NaN: rows without any mass left are the target's.
    """
    width = target_probs.shape[-1]
    draft_probs = torch.nn.functional.pad(draft_probs, (0, width - draft_probs.shape[-1]))  # a negative pad cuts
    excess = (target_probs - draft_probs).clamp(min=0)  # (..., V)
    mass = excess.sum(dim=-1, keepdim=True)  # (..., 1)
    return torch.where(mass > 0, excess / mass, target_probs)


def _gumbel_from_bits(bits: NDArray[np.uint32]) -> Tensor:
    """Turn 32 random bits per token into Gumbel noise. (V,) -> (V,) fp32"""
    uniform = torch.from_numpy(bits.astype(np.float32)).add_(0.5).mul_(2.0**-32)
    uniform.clamp_(max=1 - 2.0**-24)  # bits near 2^32 round up to 1, which would give log(0)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _penalise(scores: Tensor, penalty: float, history: Tensor | None) -> Tensor:
    """Divide positive and multiply negative scores of tokens seen before by the penalty, once each. (..., V)"""
    if penalty == 1.0:
        return scores
    if history is None or history.dim() != 1:
        raise ValueError("a repetition penalty needs history, the 1-D ids of prompt and output so far")
    width = scores.shape[-1]
    if scores.numel() != width:
        raise ValueError("a repetition penalty takes one row at a time: each position has a history of its own")
    flat = scores.reshape(width)
    seen = history.to(scores.device)
    seen = seen[seen < width]  # ids beyond the logits cannot be generated
    values = flat.gather(0, seen)
    penalised = torch.where(values < 0, values * penalty, values / penalty)
    return flat.scatter(0, seen, penalised).view_as(scores)


def _filter_row(row: Tensor, peak: Tensor, params: SamplingParams) -> None:
    """Set to -inf, in place, what top-k, top-p and min-p drop from one row of scores. row: (V,); peak: its maximum"""
    scores, ids = row, None  # ids: of the tokens that are left, ascending, in the order of scores; None: all
    if 0 < params.top_k < row.shape[0]:
        border = row.topk(params.top_k, sorted=False).values.min()
        ids = _at_least(row, border)  # with all that tie with the last one, as in Hugging Face
        scores = row[ids]
    if params.top_p < 1:
        kept = _nucleus(scores, peak, params.top_p)
        scores, ids = scores[kept], kept if ids is None else ids[kept]
    if params.min_p > 0:
        kept = _at_least((scores - peak).exp_(), params.min_p)
        scores, ids = scores[kept], kept if ids is None else ids[kept]
    if ids is not None:
        row.fill_(-math.inf).index_copy_(0, ids, scores)


def _nucleus(scores: Tensor, peak: Tensor, top_p: float) -> Tensor:
    """Return where the smallest set of most likely tokens is whose mass reaches top_p, one at least. (n,) -> (m,)

    A token stays while the tokens ahead of it hold less than top_p. Only scores near the peak are sorted, unless the
    row is so flat that the nucleus reaches further. Equal scores at the border: the lowest ids stay.
    """
    goal = top_p * (scores - peak).exp_().sum(dtype=torch.float64)
    ordered, weights = _by_weight(scores[_at_least(scores, peak - NUCLEUS_REACH)], peak)  # (n',), (n',)
    if weights.sum() < goal:
        ordered, weights = _by_weight(scores, peak)
    size = max(1, int((weights.cumsum(0).sub_(weights) < goal).sum()))
    kept = _at_least(scores, ordered[size - 1])  # (m',): the nucleus and all that tie with its last token
    if kept.shape[0] > size:
        tied = scores[kept] == ordered[size - 1]
        num_tied = tied.sum() - (kept.shape[0] - size)  # of those that tie, as many as the nucleus has room for
        kept = kept[~tied | (tied.cumsum(0) <= num_tied)]
    return kept


def _at_least(values: Tensor, floor: Tensor | float) -> Tensor:
    """Return where the values reach the floor, ascending. (n,) -> (m,) long"""
    if values.device.type == "cpu":  # NumPy compares and finds several times faster than torch on a CPU
        return torch.from_numpy(np.flatnonzero(values.numpy() >= float(floor)))
    return (values >= floor).nonzero().squeeze(1)


def _by_weight(scores: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores in descending order and exp(score - peak) of each in fp64. (n,) -> (n,), (n,)"""
    if scores.device.type == "cpu":  # NumPy sorts with vector instructions, many times faster than torch
        ordered = torch.from_numpy(np.sort(scores.numpy())[::-1].copy())
    else:
        ordered = scores.sort(descending=True).values
    return ordered, ordered.double().sub_(peak).exp_()
