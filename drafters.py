"""Who proposes tokens: a draft model, prompt lookup (n-grams of what was read so far), or both.

Whatever they propose, the target decides; a drafter only has to be cheap and often right.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from metrics import common_prefix
from policy import Policy
from sampling import LogitsError, SamplingParams, draw, generator_of, gumbel_noise, probabilities, warp

NUM_ALTERNATIVES = 3  # next-best tokens kept per draft position, from which siblings are taken
SUGGESTION_CONFIDENCE = 0.97  # of a token that the target itself predicted


class Model(Protocol):
    """What the loop needs of a model: a forward pass, and a cache that can be cropped."""

    cache: Any  # with `length` and `crop(length)`
    max_length: int

    def reserve(self, slots: int) -> None: ...
    def prefill(self, token_ids: Tensor, num_logits: int = 1) -> Tensor: ...
    def forward(self, token_ids: Tensor, positions: Tensor | None = None, visible: Tensor | None = None,
                num_logits: int | None = None) -> Tensor: ...


class Chooser:
    """Chooses tokens from logits, for draft and target alike, with the noise or the generator of one call.

    Coupled (greedy is the case without noise): the largest of warped logits + noise(seed, position). Rejection: a draw.
    """

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        self.params, self.vocab_size = params, vocab_size
        self.rejection = params.coupling == "rejection" and not params.greedy
        self.plain = params.greedy and params.repetition_penalty == 1.0  # the argmax of the logits as they are
        self.generator = generator_of(params.seed)
        self._noise: dict[int, Tensor] = {}

    def history(self, tokens: Sequence[int]) -> Tensor | None:
        """The ids that a repetition penalty looks at."""
        return torch.tensor(tokens) if self.params.repetition_penalty != 1.0 else None

    def noise(self, position: int) -> Tensor:
        """(V,): made once per position, since draft and target both need it."""
        if position not in self._noise:
            self._noise = {p: n for p, n in self._noise.items() if p >= position - 64}
            self._noise[position] = gumbel_noise(self.params.seed, position, self.vocab_size)
        return self._noise[position]

    def scores(self, logits: Tensor, tokens: Sequence[int]) -> Tensor:
        """Logits (V,) of the token after `tokens` -> what its choice is the argmax of (coupled)."""
        logits = logits[:self.vocab_size]
        if self.plain:
            return logits
        scores = warp(logits, self.params, self.history(tokens))
        return scores if self.params.greedy else scores + self.noise(len(tokens)).to(scores.device)

    def probabilities(self, logits: Tensor, tokens: Sequence[int]) -> Tensor:
        """Logits (V,) of the token after `tokens` -> its distribution (V,), on the CPU."""
        return probabilities(logits[:self.vocab_size], self.params, self.history(tokens)).cpu()

    def draw(self, probs: Tensor) -> int:
        return draw(probs, self.generator)


@dataclass
class Suggestion:
    """A first draft token for the next round, predicted by the target itself on a sibling."""

    token: int
    probs: Tensor | None = None  # (V,) the distribution it was drawn from (rejection)


@dataclass
class Proposal:
    """Draft tokens with, per token: the draft's confidence, the chance of acceptance that follows, the distribution it was
    drawn from (rejection; None is one-hot), and next-best tokens with their probabilities."""

    tokens: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    draft_probs: list[Tensor | None] = field(default_factory=list)
    alternatives: list[list[tuple[int, float]]] = field(default_factory=list)
    source: str = "none"
    stopped: str = "off"
    suggested: bool = False

    def add(self, token: int, confidence: float, chance: float, probs: Tensor | None = None,
            alternatives: Sequence[tuple[int, float]] = ()) -> None:
        self.tokens.append(token)
        self.confidences.append(confidence)
        self.chances.append(chance)
        self.draft_probs.append(probs)
        self.alternatives.append(list(alternatives))

    @property
    def drawn(self) -> list[float | None]:
        """Confidences by position of the tokens that the draft model drew: None for a suggestion, no looked-up ones."""
        if self.source != "model":
            return []
        return [None, *self.confidences[1:]] if self.suggested else [*self.confidences]

    def start_with(self, suggestion: Suggestion) -> None:
        """Take the target's own prediction as the first draft token."""
        self.add(suggestion.token, SUGGESTION_CONFIDENCE, SUGGESTION_CONFIDENCE, suggestion.probs)
        self.suggested = True


class Drafter(Protocol):
    """Proposes tokens. `max_length` is the longest sequence it can follow."""

    max_length: int

    def begin(self, prompt: Sequence[int], slots: int) -> None: ...
    def propose(self, tokens: Sequence[int], limit: int, policy: Policy, chooser: Chooser,
                suggestion: Suggestion | None = None) -> Proposal: ...
    def settle(self, proposal: Proposal, num_accepted: int, tokens: Sequence[int]) -> None: ...


class ModelDrafter:
    """A draft model that proposes one token after another."""

    def __init__(self, model: Model) -> None:
        self.model, self.max_length = model, model.max_length
        self.step_seconds = 0.0  # running mean of a one-token step
        self._fed: list[int] = []  # the ids in the model's cache

    def begin(self, prompt: Sequence[int], slots: int) -> None:
        """Read the prompt, all but its last token, which the first proposal feeds."""
        self.model.reserve(min(slots, self.max_length))
        self._fed = list(prompt[:min(len(prompt), self.max_length) - 1])
        if self._fed:
            self.model.prefill(torch.tensor(self._fed), num_logits=0)

    @torch.inference_mode()
    def propose(self, tokens: Sequence[int], limit: int, policy: Policy, chooser: Chooser,
                suggestion: Suggestion | None = None) -> Proposal:
        """Up to `limit` tokens, as long as the policy goes on; a suggestion is the first of them."""
        proposal = Proposal(source="model", stopped="limit")
        if suggestion is not None and limit:
            proposal.start_with(suggestion)
        while len(proposal.tokens) < limit:
            if len(tokens) + len(proposal.tokens) >= self.max_length:
                proposal.stopped = "context"
                break
            if not policy.goes_on(proposal.chances, self.step_seconds, limit - len(proposal.tokens)):
                proposal.stopped = "rate"
                break
            token, confidence, probs, others = self._next([*tokens, *proposal.tokens], chooser)
            proposal.add(token, confidence, policy.chance(confidence), probs, others)
        if not proposal.tokens:
            proposal.source = "none"
        return proposal

    def _next(self, sequence: list[int], chooser: Chooser) -> tuple[int, float, Tensor | None, list[tuple[int, float]]]:
        """Feed what the model has not seen of the sequence; the next token, confidence, distribution, alternatives."""
        start = time.perf_counter()
        pending = sequence[len(self._fed):]
        logits = self.model.prefill(torch.tensor(pending), num_logits=1)[-1]
        self._fed = sequence
        if chooser.rejection:
            probs = chooser.probabilities(logits, sequence)
            token, (values, ids) = chooser.draw(probs), probs.topk(min(NUM_ALTERNATIVES + 1, len(probs)))
            chances, confidence, kept = values.tolist(), float(probs[token]), probs
        else:
            scores = chooser.scores(logits, sequence)
            values, ids = scores.topk(min(NUM_ALTERNATIVES + 1, len(scores)))
            chances = (values - scores.logsumexp(-1)).exp().tolist()
            tied = chances[:1] == chances[1:2]  # topk takes any of equals, the target's argmax the lowest id
            token, confidence, kept = int(scores.argmax() if tied else ids[0]), chances[0], None
        if not math.isfinite(confidence):
            raise LogitsError("the draft's logits hold NaN or infinity: run it in bf16 or fp32, or check its weights")
        others = [(t, chance) for t, chance in zip(ids.tolist(), chances, strict=True) if t != token]
        if len(pending) == 1:
            spent = time.perf_counter() - start
            self.step_seconds = 0.9 * self.step_seconds + 0.1 * spent if self.step_seconds else spent
        return token, confidence, kept, others[:NUM_ALTERNATIVES]

    def settle(self, proposal: Proposal, num_accepted: int, tokens: Sequence[int]) -> None:
        """Keep of the cache what agrees with the tokens emitted."""
        kept = common_prefix(self._fed, tokens)
        kept = min(kept, len(tokens) - 1)
        self.model.cache.crop(kept)
        self._fed = self._fed[:kept]


class LookupDrafter:
    """Prompt lookup: what followed the last occurrence of the longest n-gram that ends the text so far.

    The chance that a looked-up token is accepted is learned per length of match, anew in each call.
    """

    LENGTHS = (6, 5, 4, 3, 2)
    PRIOR = (0.9, 0.85, 0.75, 0.6, 0.4)  # acceptance before anything was seen, counting for two tokens

    def __init__(self) -> None:
        self.max_length = 1 << 62
        self.begin([], 0)

    def begin(self, prompt: Sequence[int], slots: int) -> None:
        self._last: dict[tuple[int, ...], int] = {}  # n-gram -> index after its last occurrence
        self._indexed = 0
        self._match = 0
        self.judged = dict.fromkeys(self.LENGTHS, 2.0)
        self.accepted = {n: 2.0 * prior for n, prior in zip(self.LENGTHS, self.PRIOR, strict=True)}

    def _index(self, tokens: Sequence[int]) -> None:
        """Take in the n-grams that end before the last token, each once."""
        for end in range(self._indexed + 1, len(tokens)):
            for n in self.LENGTHS:
                if n <= end:
                    self._last[tuple(tokens[end - n:end])] = end
        self._indexed = max(self._indexed, len(tokens) - 1)

    def find(self, tokens: Sequence[int], limit: int) -> tuple[list[int], float]:
        """The tokens that followed, up to `limit`, and the chance that each is accepted."""
        self._index(tokens)
        for n in self.LENGTHS:
            start = self._last.get(tuple(tokens[-n:])) if n <= len(tokens) else None
            if start is not None:
                self._match = n
                return list(tokens[start:start + limit]), self.accepted[n] / self.judged[n]
        return [], 0.0

    def propose(self, tokens: Sequence[int], limit: int, policy: Policy, chooser: Chooser,
                suggestion: Suggestion | None = None) -> Proposal:
        """The looked-up tokens, cut where the policy stops; a suggestion comes first, and they are what follows it."""
        proposal = Proposal(source="lookup", stopped="limit")
        if suggestion is not None and limit:
            proposal.start_with(suggestion)
        found, chance = self.find([*tokens, *proposal.tokens], limit - len(proposal.tokens))
        if not found:
            proposal.stopped = "exhausted"
        for taken, token in enumerate(found):
            if not policy.goes_on(proposal.chances, 0.0, len(found) - taken, chance):
                proposal.stopped = "rate"
                break
            proposal.add(token, chance, chance)
        if not proposal.tokens:
            proposal.source = "none"
        return proposal

    def settle(self, proposal: Proposal, num_accepted: int, tokens: Sequence[int]) -> None:
        """Learn from the looked-up tokens that were judged."""
        first = int(proposal.suggested)
        judged = min(num_accepted + 1, len(proposal.tokens)) - first
        if proposal.source == "lookup" and judged > 0:
            self.judged[self._match] += judged
            self.accepted[self._match] += max(0, num_accepted - first)


class CombinedDrafter:
    """Lookup where its match promises more tokens per second than the call's rate so far, else the draft model."""

    def __init__(self, model: ModelDrafter, lookup: LookupDrafter) -> None:
        self.model, self.lookup, self.max_length = model, lookup, model.max_length

    def begin(self, prompt: Sequence[int], slots: int) -> None:
        self.model.begin(prompt, slots)
        self.lookup.begin(prompt, slots)

    def propose(self, tokens: Sequence[int], limit: int, policy: Policy, chooser: Chooser,
                suggestion: Suggestion | None = None) -> Proposal:
        sequence = [*tokens, suggestion.token] if suggestion is not None else list(tokens)
        found, chance = self.lookup.find(sequence, limit)
        if policy.lookup_pays(chance, len(found)):
            return self.lookup.propose(tokens, limit, policy, chooser, suggestion)
        return self.model.propose(tokens, limit, policy, chooser, suggestion)

    def settle(self, proposal: Proposal, num_accepted: int, tokens: Sequence[int]) -> None:
        self.model.settle(proposal, num_accepted, tokens)
        self.lookup.settle(proposal, num_accepted, tokens)
