"""Models for the engine's tests: a scripted one, whose logits are any function of the ids so far, and the tiny pair."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from assemble import load_decoder
from checkpoint import Pair
from drafters import CombinedDrafter, Drafter, LookupDrafter, Model, ModelDrafter
from metrics import Statistics
from models import load_pair
from sampling import SamplingParams
from shapes import Widths
from spec_decode import GenerationConfig, SpeculativeDecoder
from transformer import Decoder

Script = Callable[[Sequence[int]], Tensor]  # ids so far -> logits of the next (V,)
NARROW = Widths({2: 1.0, 4: 1.0, 8: 1.0}, any_width=False)


class ScriptedCache:
    """(position, id) per slot."""

    def __init__(self) -> None:
        self.slots: list[tuple[int, int]] = []

    @property
    def length(self) -> int:
        return len(self.slots)

    def crop(self, length: int) -> None:
        assert 0 <= length <= len(self.slots), "a crop only shortens"
        del self.slots[length:]


class ScriptedModel:
    """Computes logits from what each row may see. A row that does not see one text, position by position, gets NaN."""

    def __init__(self, script: Script, max_length: int = 4096) -> None:
        self.script, self.max_length, self.cache, self.capacity = script, max_length, ScriptedCache(), 0
        self.passes: list[list[int]] = []  # the ids fed, pass by pass

    def reserve(self, slots: int) -> None:
        self.cache.crop(0)
        self.capacity = slots

    def prefill(self, token_ids: Tensor, num_logits: int = 1) -> Tensor:
        return self.forward(token_ids, num_logits=num_logits)

    def forward(self, token_ids: Tensor, positions: Tensor | None = None, visible: Tensor | None = None,
                num_logits: int | None = None) -> Tensor:
        rows, start = len(token_ids), self.cache.length
        assert token_ids.dtype == torch.int64 and rows and start + rows <= self.capacity, "no more than was reserved"
        places = range(start, start + rows) if positions is None else positions.tolist()
        fed = list(zip(places, token_ids.tolist(), strict=True))
        wanted = range(rows - (rows if num_logits is None else num_logits), rows)
        logits = [self._row(fed, row, None if visible is None else visible[row]) for row in wanted]
        self.cache.slots += fed
        self.passes.append(token_ids.tolist())
        return torch.stack(logits) if logits else torch.empty(0)

    def _row(self, fed: list[tuple[int, int]], row: int, visible: Tensor | None) -> Tensor:
        seen = fed[:row + 1] if visible is None else [fed[i] for i in range(len(fed)) if visible[i]]
        text = sorted(self.cache.slots + seen)
        is_text = text[-1] == fed[row] and all(place == i for i, (place, _) in enumerate(text))
        logits = self.script([token for _, token in text])
        return logits if is_text else torch.full_like(logits, torch.nan)


# ---- scripts ----


def peaks(vocab_size: int, *tokens: int) -> Tensor:
    """Logits with these tokens on top, the first the likeliest."""
    logits = torch.zeros(vocab_size)
    for rank, token in enumerate(tokens):
        logits[token] = 12.0 - 2 * rank
    return logits


def recite(ids: Sequence[int], vocab_size: int, prompt_length: int = 1) -> Script:
    """Emits `ids` after the prompt, whatever was said, and its last id for ever."""
    return lambda so_far: peaks(vocab_size, ids[min(len(so_far) - prompt_length, len(ids) - 1)])


def random_script(vocab_size: int, seed: int = 0, spread: float = 2.0) -> Script:
    """Logits that depend on the last two ids and on the position modulo 3, otherwise at random."""
    table = torch.randn(3, vocab_size, vocab_size, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread

    def script(so_far: Sequence[int]) -> Tensor:
        before = so_far[-2] if len(so_far) > 1 else 0
        return table[len(so_far) % 3, before % vocab_size, so_far[-1] % vocab_size]

    return script


def blend(first: Script, second: Script, share: float) -> Script:
    """A script that agrees with `first` the more, the smaller the share of `second`."""
    return lambda so_far: torch.lerp(first(so_far), second(so_far), share)


def as_bf16(script: Script) -> Script:
    return lambda so_far: script(so_far).bfloat16()


# ---- engines ----


def engine(target: Model, draft: Any = None, vocab_size: int = 10, **kwargs: Any) -> SpeculativeDecoder:
    """An engine; draft: a drafter, a model that becomes one, or None."""
    drafter = ModelDrafter(draft) if hasattr(draft, "cache") else draft
    return SpeculativeDecoder(target, drafter, vocab_size=vocab_size, **kwargs)


def run(engine: SpeculativeDecoder, prompt: Sequence[int], max_new: int = 20, num: int | None = 4, **kwargs: Any) -> Statistics:
    """Run a generation to its end and check what every generation must satisfy."""
    generation = engine.generate(prompt, GenerationConfig(max_new, num, **kwargs))
    ids = generation.run()
    check(generation.statistics, ids, max_new, num)
    return generation.statistics


def check(statistics: Statistics, ids: Sequence[int], max_new: int, num: int | None) -> None:
    """Invariants of the record of any generation."""
    left = max_new
    assert statistics.emitted == len(ids) <= max_new and 0 <= statistics.accepted <= statistics.drafted
    for index, entry in enumerate(statistics.rounds):
        is_last = index == len(statistics.rounds) - 1
        assert len(entry.tokens) == len(entry.origins) and (entry.tokens or is_last)
        assert bool(entry.finish_reason) == is_last
        assert entry.tokens[:entry.num_accepted] == entry.draft_tokens[:entry.num_accepted]
        assert entry.origins[:entry.num_accepted] == ["accepted"] * entry.num_accepted
        assert len(entry.tokens) <= entry.num_accepted + 1 and entry.num_drafted <= max(left - 1, 0)
        assert num is None or entry.num_drafted <= num
        assert entry.seconds >= entry.draft_seconds + entry.verify_seconds - 1e-9
        left -= len(entry.tokens)


# ---- a small world: a target, a draft that is often right, and prompts ----

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7]
TARGET = random_script(8, seed=1)
DRAFT = blend(TARGET, random_script(8, seed=2), 0.35)  # right about two times in three
PROMPT = [1, 2, 3, 1, 2]
CHANCE = [SamplingParams(), SamplingParams(temperature=0.8, seed=3), SamplingParams(repetition_penalty=1.3)]
CHANCE += [SamplingParams(temperature=1.1, top_p=0.9, top_k=5, repetition_penalty=1.3, seed=4)]


def base(max_new: int, script: Script = TARGET, **kwargs: Any) -> list[int]:
    """Target-only decoding of the prompt."""
    return run(engine(ScriptedModel(script), None, 8), PROMPT, max_new, 0, **kwargs).tokens


def proposers() -> Iterator[tuple[str, Any]]:
    """A drafter of each kind, new."""
    yield "model", ScriptedModel(DRAFT)
    yield "lookup", LookupDrafter()
    yield "both", CombinedDrafter(ModelDrafter(ScriptedModel(DRAFT)), LookupDrafter())


# ---- the tiny pair ----


@functools.cache
def tiny() -> Pair:
    return load_pair("tiny")


VOCAB = 259  # of the tiny pair


@functools.cache
def decoder(which: str = "target", weights: str = "fp32", backend: str = "auto") -> Decoder:
    """A decoder of the tiny pair, shared by all tests of a run."""
    checkpoint = tiny().target if which == "target" else tiny().draft
    assert checkpoint is not None
    return load_decoder(checkpoint, weights, backend=backend)


def drafter(kind: str, weights: str = "int4", backend: str = "auto") -> Drafter | None:
    """A drafter of the tiny pair: 'model', 'lookup', 'both' or 'none'."""
    if kind == "none":
        return None
    if kind == "lookup":
        return LookupDrafter()
    model = ModelDrafter(decoder("draft", weights, backend))
    return CombinedDrafter(model, LookupDrafter()) if kind == "both" else model
