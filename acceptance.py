"""Which draft tokens the target accepts, and the token of its own that it adds.

Greedy decoding and coupled sampling keep a draft token that is the target's own choice; rejection sampling keeps it with the
chance that makes the output the target's in distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafters import Chooser, Proposal, Suggestion
from sampling import LogitsError, residual


def emit(logits: Tensor, tokens: Sequence[int], proposal: Proposal, chooser: Chooser) -> list[int]:
    """The accepted draft tokens and one token of the target's own, from the logits of the chain (K+1, V)."""
    if chooser.rejection:
        return reject(logits, tokens, proposal, chooser)
    return choose(logits, tokens, proposal.tokens, chooser)


def choose(logits: Tensor, tokens: Sequence[int], drafted: Sequence[int], chooser: Chooser) -> list[int]:
    """Coupled acceptance: the target's own choices (K+1, V) -> as long as the draft made the same, and one more."""
    if chooser.plain:
        peaks, choices = logits[:, :chooser.vocab_size].max(dim=-1)
        own = choices.tolist()
        num_accepted = next((i for i, token in enumerate(drafted) if own[i] != token), len(drafted))
        if not bool(peaks[:num_accepted + 1].isfinite().all()):  # what follows a wrong token is nobody's business
            raise LogitsError("the logits hold NaN or infinity, so no token can be chosen: run the model in bf16 or "
                              "fp32 (float16 overflows), or check its weights")
        return own[:num_accepted + 1]
    emitted: list[int] = []
    for row in range(len(drafted) + 1):
        emitted.append(int(chooser.scores(logits[row], [*tokens, *emitted]).argmax()))
        if row == len(drafted) or emitted[-1] != drafted[row]:
            break
    return emitted


def reject(logits: Tensor, tokens: Sequence[int], proposal: Proposal, chooser: Chooser) -> list[int]:
    """Rejection sampling (Leviathan et al. 2023, Alg. 1): accept with chance min(1, target / draft), else recover."""
    emitted: list[int] = []
    for row, token in enumerate(proposal.tokens):
        target_probs = chooser.probabilities(logits[row], [*tokens, *emitted])  # (V,)
        draft_probs = proposal.draft_probs[row]
        if draft_probs is None:  # looked up: all the mass is on the token
            draft_probs = torch.zeros_like(target_probs)
            draft_probs[token] = 1.0
        uniform = float(torch.rand((), generator=chooser.generator, dtype=torch.float64))
        if uniform * float(draft_probs[token]) >= float(target_probs[token]):
            return [*emitted, chooser.draw(residual(target_probs, draft_probs))]
        emitted.append(token)
    return [*emitted, chooser.draw(chooser.probabilities(logits[len(emitted)], [*tokens, *emitted]))]


def suggest(logits: Tensor, tokens: Sequence[int], chooser: Chooser) -> Suggestion:
    """The target's prediction on a sibling that was hit, as a proposal with the distribution it was drawn from."""
    if chooser.rejection:
        probs = chooser.probabilities(logits, tokens)
        return Suggestion(chooser.draw(probs), probs)
    return Suggestion(int(chooser.scores(logits, tokens).argmax()))
