"""Cross-checks: our greedy output against Hugging Face `generate` and against width-1 decoding.

Those compute the same numbers in another order, so in bf16 or fp16 two tokens that are nearly level may change places.
A difference is judged at its first position, from both sides: how far is the other side's token behind one's own? At most
NEAR_TIE logits on both sides: a near-tie. More on either: a bug. After it the texts differ, so nothing more is compared.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from checkpoint import Checkpoint
from metrics import Statistics, common_prefix

NEAR_TIE = {torch.bfloat16: 0.25, torch.float16: 0.25, torch.float32: 1e-3}  # logits
TOP = 4  # tokens kept per position; a token that is not among them is at least as far behind as the last of them
TINY = 1e-38  # a probability below is taken for this one: a gap stays finite


@dataclass(frozen=True)
class Trace:
    """A greedy output and, per token, the likeliest tokens with their log-probabilities, best first."""

    tokens: list[int]
    top: list[list[tuple[int, float]]]

    def top2_gap(self, position: int) -> float | None:
        """Logits between the best token and the next."""
        best = self.top[position] if position < len(self.top) else []
        return best[0][1] - best[1][1] if len(best) > 1 else None

    def behind(self, position: int, token: int | None) -> float | None:
        """Logits by which a token lies behind the best one (at least this, if it is not among the top)."""
        best = self.top[position] if position < len(self.top) else []
        if not best or token is None:
            return None
        return best[0][1] - dict(best).get(token, best[-1][1] - TINY)

    def token(self, position: int) -> int | None:
        return self.tokens[position] if position < len(self.tokens) else None


@dataclass(frozen=True)
class CrossCheck:
    """One prompt compared; positions count output tokens from 0, gaps are in logits."""

    id: str
    against: str
    verdict: str  # 'equal', 'near-tie' or 'bug'
    tokens: int  # equal ones before the first difference
    position: int | None = None
    our_token: int | None = None
    their_token: int | None = None
    our_top2_gap: float | None = None
    their_top2_gap: float | None = None
    our_gap: float | None = None  # how far their token is behind in our logits
    their_gap: float | None = None

    def row(self) -> dict[str, Any]:
        return {"type": "cross-check", **asdict(self)}


def trace_of(statistics: Statistics) -> Trace:
    """The trace of a generation that was run with details."""
    details = [detail for r in statistics.rounds for detail in r.details]
    top = [[(token, math.log(max(prob, TINY))) for token, prob in detail["target_top"]] for detail in details]
    return Trace(statistics.tokens, top)


def cross_check(prompt_id: str, against: str, ours: Trace, theirs: Trace, dtype: torch.dtype) -> CrossCheck:
    """Judge the first difference between two greedy outputs of the same prompt."""
    position = common_prefix(ours.tokens, theirs.tokens)
    if len(ours.tokens) == len(theirs.tokens) == position:
        return CrossCheck(prompt_id, against, "equal", position)
    our_token, their_token = ours.token(position), theirs.token(position)
    gaps = ours.behind(position, their_token), theirs.behind(position, our_token)
    near = all(gap is not None and gap <= NEAR_TIE[dtype] for gap in gaps)  # None: one output ends without an end token
    return CrossCheck(prompt_id, against, "near-tie" if near else "bug", position, position, our_token, their_token,
                      ours.top2_gap(position), theirs.top2_gap(position), *gaps)


def hugging_face_traces(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, prompts: Sequence[Sequence[int]],
                        max_new_tokens: int) -> Iterator[Trace]:
    """What stock greedy `generate` gives for each prompt. Loads the model and frees it at the end."""
    model = checkpoint.hf_model(dtype).to(device)  # type: ignore[arg-type]
    try:
        for ids in tqdm(prompts, desc="Hugging Face generate", unit="prompt", leave=False):
            room = min(max_new_tokens, checkpoint.config.max_position_embeddings - len(ids))
            yield hugging_face_trace(model, list(ids), room)
    finally:
        del model
        gc.collect()


def hugging_face_trace(model: Any, ids: list[int], max_new_tokens: int) -> Trace:
    """One stock greedy generation, with the logits it chose from."""
    prompt = torch.tensor([ids], device=model.device)
    with torch.inference_mode():
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, repetition_penalty=1.0,
                                max_new_tokens=max_new_tokens, output_logits=True, return_dict_in_generate=True,
                                pad_token_id=model.generation_config.eos_token_id[0])
    return Trace(output.sequences[0, len(ids):].tolist(), [top_tokens(step[0]) for step in output.logits])


def top_tokens(logits: Tensor) -> list[tuple[int, float]]:
    """(V,) -> the likeliest tokens with their log-probabilities."""
    values, ids = logits.float().log_softmax(-1).topk(min(TOP, logits.shape[-1]))
    return list(zip(ids.tolist(), values.tolist(), strict=True))


def describe(check: CrossCheck) -> str:
    """One line for people."""
    if check.verdict == "equal":
        return f"{check.id}: equal to {check.against} ({check.tokens} tokens)"

    def number(value: float | None) -> str:
        return "n/a" if value is None else f"{value:.4f}"

    return (f"{check.id}: {check.verdict} against {check.against} at token {check.position}: ours {check.our_token}, "
            f"theirs {check.their_token}; top-2 gap {number(check.our_top2_gap)} / {number(check.their_top2_gap)}; the "
            f"other's token behind by {number(check.our_gap)} / {number(check.their_gap)} logits")
