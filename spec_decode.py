"""The loop: draft -> verify -> accept, for greedy decoding and for sampling, with plain decoding as the case K = 0.

One round proposes up to K tokens, runs the target once over [last token, draft tokens, siblings, padding], keeps the
longest valid prefix of the draft and adds one token of the target's own: the correction where the draft was wrong, a
bonus where it was right throughout. Invariant: after each round both caches hold a proper prefix of `tokens`; the next
forward feeds the rest, so full acceptance needs no special case.

Siblings (spare rows): a pass costs one read of the weights, so a few more rows are nearly free. They carry the draft's
next-best tokens where the chain may break; each sees the prefix, its ancestors in the chain and itself. When the
target's correction is one of them, that row holds the target's prediction of the token *after* the correction: it
becomes the next round's first draft token. It stays a draft, so exactness is untouched.
"""

from __future__ import annotations

import hashlib
import math
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from acceptance import emit, suggest
from drafters import Chooser, Drafter, Model, Proposal, Suggestion
from metrics import Round, Statistics
from policy import DynamicK, FixedK, Policy
from sampling import SamplingParams
from shapes import Widths

MAX_SIBLINGS = 8
StopCheck = Callable[[Sequence[int]], int | None]  # new tokens -> how many of them to keep if the output ends there


@dataclass(frozen=True)
class GenerationConfig:
    """What one call is to do, checked once. num_speculative_tokens: None adapts K, 0 is plain decoding."""

    max_new_tokens: int = 128
    num_speculative_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    siblings: bool = True
    end_token_ids: Sequence[int] = ()
    stop: StopCheck | None = None
    digests: bool = False  # record a digest of the target's logits per token
    details: bool = False  # record probabilities and alternatives per token

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; use 0 or more")
        if self.num_speculative_tokens is not None and self.num_speculative_tokens < 0:
            raise ValueError(f"num_speculative_tokens is {self.num_speculative_tokens}; use 0 for plain decoding, or more")


class Generation(Iterator[Round]):
    """One call: iterate over its rounds; `statistics` can be read at any time."""

    def __init__(self, rounds: Iterator[Round], statistics: Statistics) -> None:
        self._rounds, self.statistics = rounds, statistics

    def __next__(self) -> Round:
        return next(self._rounds)

    def close(self) -> None:
        """Stop here; no further pass runs."""
        self._rounds.close()  # type: ignore[attr-defined]

    def run(self) -> list[int]:
        """Go on to the end; all emitted ids."""
        for _ in self:
            pass
        return self.statistics.tokens


@dataclass
class Pass:
    """One target pass: its rows and what the target said."""

    logits: Tensor  # (rows, V)
    siblings: list[tuple[int, int]]  # (depth, token) of the rows after the chain; depth 1 competes with the first draft
    width: int


class SpeculativeDecoder:
    """A target with its drafter. Runs one generation at a time; a new one ends the one before.

    vocab_size: ids from here on are padding of the logits and never chosen. widths: see shapes.py; by default every
    width is used and costs the same. policy: replaces the choice of K by the configuration (for comparisons). Raises
    ValueError for a policy that wants to draft more tokens than the widest pass holds.
    """

    def __init__(self, target: Model, drafter: Drafter | None = None, *, vocab_size: int, widths: Widths | None = None,
                 policy: Policy | None = None) -> None:
        self.target, self.drafter, self.vocab_size = target, drafter, vocab_size
        self.widths = widths or Widths({1: 1.0, 64: 1.0})
        self.policy = policy
        self._calls = 0
        if policy is not None and policy.limit() >= self.widths.most_rows:
            raise ValueError(f"the policy drafts up to {policy.limit()} tokens, but the widest pass in use has "
                             f"{self.widths.largest} rows; use a limit of {self.widths.largest - 1} or less")

    def generate(self, prompt: Sequence[int], config: GenerationConfig | None = None) -> Generation:
        """Start a generation.

        Raises ValueError for an empty prompt, several, ids that no token has, a prompt that leaves the target no room, and
        more draft tokens than the widest pass in use holds.
        """
        config = config or GenerationConfig()
        try:
            tokens = [operator.index(token) for token in prompt]
        except TypeError:
            raise ValueError("the prompt is not a sequence of token ids; give one prompt at a time") from None
        if not tokens:
            raise ValueError("the prompt is empty; give at least one token")
        if len(tokens) >= self.target.max_length and config.max_new_tokens:
            raise ValueError(f"the prompt has {len(tokens)} tokens and the target's context ends at "
                             f"{self.target.max_length}; shorten it")
        unknown = next((token for token in tokens if not 0 <= token < self.vocab_size), None)
        if unknown is not None:
            raise ValueError(f"the prompt has the token id {unknown}, outside 0 to {self.vocab_size - 1}; encode it with the "
                             "tokenizer of this model")
        statistics = Statistics()
        return Generation(self._rounds(tokens, config, self._policy(config), statistics), statistics)

    def _policy(self, config: GenerationConfig) -> Policy:
        if self.policy is not None:
            return self.policy
        if config.num_speculative_tokens is None:
            return DynamicK(self.widths)
        return FixedK(config.num_speculative_tokens, self.widths)

    def _rounds(self, tokens: list[int], config: GenerationConfig, policy: Policy,
                statistics: Statistics) -> Iterator[Round]:
        """The rounds of one generation; `tokens` grows from the prompt."""
        if not config.max_new_tokens:
            return
        self._calls += 1
        call, end = self._calls, min(len(tokens) + config.max_new_tokens, self.target.max_length)
        limit_reason = "length" if end == len(tokens) + config.max_new_tokens else "context"
        chooser = Chooser(config.sampling, self.vocab_size)
        policy.begin()
        drafter = self.drafter if policy.limit() and config.num_speculative_tokens != 0 else None
        prompt, suggestion = list(tokens), None
        this_round = self._first_round(tokens, end, config, chooser)
        while True:
            self._finish(this_round, config)
            if not this_round.finish_reason and len(tokens) >= end:
                this_round.finish_reason = limit_reason
            statistics.rounds.append(this_round)
            yield this_round
            if this_round.finish_reason:
                return
            if call != self._calls:
                raise RuntimeError("another generation was started on this engine; finish or close one before the next")
            start = time.perf_counter()
            if drafter is not None and len(statistics.rounds) == 1:
                drafter.begin(prompt, end + self.widths.fit(1) + MAX_SIBLINGS)
            begun = time.perf_counter()  # the draft's prefill is no part of what a round costs
            proposal = Proposal()
            if drafter is not None:
                limit = min(policy.limit(), self.widths.most_rows - 1, end - len(tokens) - 1)
                proposal = drafter.propose(tokens, limit, policy, chooser, suggestion)
                self._note_context(proposal, drafter, statistics)
            drafted = time.perf_counter()
            this_round, suggestion = self._verify(tokens, proposal, config, chooser, policy)
            this_round.draft_seconds, this_round.verify_seconds = drafted - start, time.perf_counter() - drafted
            if drafter is not None:
                drafter.settle(proposal, this_round.num_accepted, tokens)
            this_round.seconds = time.perf_counter() - start
            policy.observe(len(proposal.tokens), proposal.drawn, this_round.num_accepted, len(this_round.tokens),
                           this_round.seconds - (begun - start), this_round.verify_seconds)

    @staticmethod
    def _note_context(proposal: Proposal, drafter: Drafter, statistics: Statistics) -> None:
        note = f"the draft's context ends at {drafter.max_length} tokens: from there on the target decodes alone"
        if proposal.stopped == "context" and note not in statistics.notes:
            statistics.notes.append(note)

    @torch.inference_mode()
    def _first_round(self, tokens: list[int], end: int, config: GenerationConfig, chooser: Chooser) -> Round:
        """Prefill the target; its last logits give the first token."""
        start = time.perf_counter()
        self.target.reserve(end + self.widths.largest + MAX_SIBLINGS + 32)
        logits = self.target.prefill(torch.tensor(tokens))
        token = emit(logits[-1:], tokens, Proposal(), chooser)[0]
        result = Round([token], ["prefill"], width=len(tokens), digests=_digests(logits[-1:], config))
        if config.details:
            result.details = [_detail(token, logits[-1], chooser, None)]
        tokens.append(token)
        result.verify_seconds = result.seconds = time.perf_counter() - start
        return result

    @torch.inference_mode()
    def _verify(self, tokens: list[int], proposal: Proposal, config: GenerationConfig, chooser: Chooser,
                policy: Policy) -> tuple[Round, Suggestion | None]:
        """One target pass over the proposal; extends `tokens` and crops the target's cache to a proper prefix of them."""
        drafted = proposal.tokens
        done = self._target_pass(tokens, proposal, policy if config.siblings and drafted else None)
        chain = done.logits[:len(drafted) + 1]  # (K+1, V)
        emitted = emit(chain, tokens, proposal, chooser)
        num_accepted = len(emitted) - 1
        last = "plain" if not drafted else "bonus" if num_accepted == len(drafted) else "corrected"
        result = Round(emitted, ["accepted"] * num_accepted + [last], proposal.source, list(drafted), num_accepted,
                       proposal.suggested, len(done.siblings), width=done.width, stopped=proposal.stopped,
                       digests=_digests(chain[:len(emitted)], config))
        if config.details:
            sources = [proposal] * len(drafted) + [None]
            result.details = [_detail(token, chain[i], chooser, sources[i], i) for i, token in enumerate(emitted)]
        suggestion = None
        hits = [i for i, sibling in enumerate(done.siblings) if sibling == (num_accepted + 1, emitted[-1])]
        tokens.extend(emitted)
        if hits:
            result.sibling_hit = True
            suggestion = suggest(done.logits[len(drafted) + 1 + hits[0]], tokens, chooser)
        self.target.cache.crop(len(tokens) - 1)
        return result, suggestion

    def _target_pass(self, tokens: list[int], proposal: Proposal, policy: Policy | None) -> Pass:
        """Run the target over [last token, draft tokens, siblings, padding]."""
        assert self.target.cache.length == len(tokens) - 1, "the target's cache holds all tokens but the last"
        chain = [tokens[-1], *proposal.tokens]
        siblings = self._siblings(proposal, policy) if policy is not None else []
        rows, base = len(chain) + len(siblings), len(tokens) - 1
        width = self.widths.fit(rows)
        padding = width - rows
        ids = torch.tensor(chain + [token for _, token in siblings] + chain[-1:] * padding)
        if not siblings:
            return Pass(self.target.forward(ids), [], width)
        positions = np.arange(base, base + width, dtype=np.int64)
        visible = np.tri(width, dtype=bool)  # a chain; padding sees all before it, harmlessly
        for row, (depth, _) in enumerate(siblings, start=len(chain)):
            positions[row] = base + depth
            visible[row, depth:row] = False
        logits = self.target.forward(ids, torch.from_numpy(positions), torch.from_numpy(visible))
        return Pass(logits, siblings, width)

    def _siblings(self, proposal: Proposal, policy: Policy) -> list[tuple[int, int]]:
        """The leaves worth a row: likeliest first, in rows that are padding anyway or while one more pays."""
        leaves = []
        for index, alternatives in enumerate(proposal.alternatives):
            reach = math.prod(proposal.chances[:index])
            leaves += [(reach * chance, index + 1, token) for token, chance in alternatives]
        leaves.sort(reverse=True)
        rows = len(proposal.tokens) + 1
        free = self.widths.fit(rows)
        chosen: list[tuple[int, int]] = []
        for chance, depth, token in leaves[:min(MAX_SIBLINGS, self.widths.most_rows - rows)]:
            if rows >= free and not policy.sibling_pays(chance, rows):
                break
            chosen.append((depth, token))
            rows += 1
        return chosen

    @staticmethod
    def _finish(this_round: Round, config: GenerationConfig) -> None:
        """Cut the round at an end token or a stop, whichever target-only decoding would meet first."""
        emitted = this_round.tokens
        ends = [i + 1 for i, token in enumerate(emitted) if token in config.end_token_ids]
        keep, reason = (ends[0], "end") if ends else (len(emitted), "")
        stopped = config.stop(emitted[:keep]) if config.stop is not None else None
        if stopped is not None:
            keep, reason = stopped, "stop"
        for column in (emitted, this_round.origins, this_round.digests, this_round.details):
            del column[keep:]
        this_round.num_accepted = min(this_round.num_accepted, keep)
        this_round.finish_reason = reason


def _digests(logits: Tensor, config: GenerationConfig) -> list[str]:
    """One digest per row of logits: equal digests mean equal bits."""
    if not config.digests:
        return []
    return [hashlib.sha1(row.cpu().numpy(), usedforsecurity=False).hexdigest()[:16] for row in logits.contiguous()]


def _detail(token: int, logits: Tensor, chooser: Chooser, proposal: Proposal | None, index: int = 0) -> dict[str, Any]:
    """What a trace shows of one token: the target's and the draft's probability and the target's top alternatives."""
    probs = logits[:chooser.vocab_size].float().softmax(-1)
    values, ids = probs.topk(min(4, len(probs)))
    detail: dict[str, Any] = {"target_prob": float(probs[token]),
                              "target_top": list(zip(ids.tolist(), values.tolist(), strict=True))}
    if proposal is not None:
        detail |= {"draft_token": proposal.tokens[index], "draft_confidence": proposal.confidences[index],
                   "draft_top": proposal.alternatives[index]}
    return detail
