"""What the benchmark compares: our decoder in its settings, and the stock generation of Hugging Face transformers.

Both sides get the same prompt ids, end tokens and length limit, count tokens by id, and are timed by the same clock
around the whole call. Ours share one target among all variants; Hugging Face's models are loaded once and kept.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import transformers
from torch import Tensor

from assemble import DTYPE_NAMES, load_decoder, load_draft, make_drafter, sampling_from, shared_vocabulary, usable_widths
from metrics import Statistics
from models import Pair
from policy import ConfidenceStop, FixedK
from sampling import SamplingParams
from spec_decode import GenerationConfig, SpeculativeDecoder
from transformer import Decoder


@dataclass(frozen=True)
class Variant:
    """One column of the comparison."""

    name: str
    label: str
    family: str  # 'plain', 'ours' or 'hf'
    k: int | str | None  # draft tokens per round; ours: 'dynamic' or 'stop' (at a confidence below 0.4); Hugging Face: 'auto'
    drafter: str = "both"  # 'both', 'model', 'lookup', 'self' or 'none'
    draft_weights: str | None = "int4"
    siblings: bool | None = True

    @property
    def needs_draft(self) -> bool:
        return self.drafter in ("both", "model")

    def row(self, sampled: bool = False) -> dict[str, Any]:
        """The columns of a results row that say what this is; at a temperature above 0 by another label."""
        columns = {"variant" if key == "name" else key: value for key, value in asdict(self).items()}
        return columns | {"label": SAMPLED_LABELS.get(self.name, self.label) if sampled else self.label, "sampled": sampled}


def _ours(name: str, label: str, k: int | str = "dynamic", **changes: Any) -> Variant:
    return replace(Variant(name, label, "ours", k), **changes)


def _hf(name: str, label: str, k: int | str | None, drafter: str) -> Variant:
    return Variant(name, label, "hf", k, drafter, "as target" if drafter == "model" else None, None)


VARIANTS = {variant.name: variant for variant in (
    Variant("plain", "plain decoding", "plain", 0, "none", None, None),
    _hf("hf-greedy", "Hugging Face greedy", 0, "none"),
    _hf("hf-assisted", "Hugging Face assisted", "auto", "model"),
    _hf("hf-assisted-k4", "Hugging Face assisted, K = 4", 4, "model"),
    _hf("hf-lookup", "Hugging Face prompt lookup", 10, "lookup"),
    *(_ours(f"k{k}", f"K = {k}", k) for k in (2, 4, 7, 11)),
    _ours("dynamic", "dynamic K"),
    _ours("dynamic-no-siblings", "dynamic K, no siblings", siblings=False),
    _ours("dynamic-model", "dynamic K, draft model only", drafter="model"),
    _ours("dynamic-lookup", "dynamic K, prompt lookup only", drafter="lookup", draft_weights=None),
    _ours("dynamic-bf16", "dynamic K, bf16 draft", draft_weights="bf16"),
    _ours("dynamic-int8", "dynamic K, int8 draft", draft_weights="int8"),
    _ours("dynamic-self", "dynamic K, the target's int4 copy drafts", drafter="self"),
    _ours("k4-bf16", "K = 4, bf16 draft alone", 4, drafter="model", draft_weights="bf16", siblings=False),
    _ours("stop-bf16", "confidence stop, bf16 draft alone", "stop", drafter="model", draft_weights="bf16", siblings=False),
    _ours("stop-int4", "confidence stop, int4 draft alone", "stop", drafter="model", siblings=False),
    _ours("rejection", "dynamic K, rejection sampling"),
)}


SAMPLED_LABELS = {"plain": "plain sampling", "hf-greedy": "Hugging Face sampling",
                  "dynamic": "dynamic K, coupled sampling"}  # where the temperature is above 0


@dataclass
class Outcome:
    """One generation as the benchmark sees it: ids, a digest of the logits per id (ours), seconds, further figures."""

    tokens: list[int]
    seconds: float
    first_token_seconds: float
    first_tokens: int = 1  # how many came with the first
    digests: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """The measured columns of a results row; see metrics.py for their definitions."""
        rest, spent = len(self.tokens) - self.first_tokens, self.seconds - self.first_token_seconds
        return {"new_tokens": len(self.tokens), "seconds": self.seconds, "first_token_seconds": self.first_token_seconds,
                "tokens_per_second": len(self.tokens) / self.seconds,
                "decode_tokens_per_second": rest / spent if rest > 0 and spent > 0 else None} | self.figures


Runner = Callable[[Sequence[int], int], Outcome]  # (prompt ids, max_new_tokens)
OUR_FIGURES = ("acceptance_rate", "tokens_per_round", "draft_seconds", "verify_seconds", "rest_seconds", "target_passes",
               "acceptance_by_position", "sibling_hits", "siblings_used", "suggestions", "suggestions_accepted")


class Ours:
    """Our engines around one target; draft weights are loaded when a chosen variant needs them."""

    def __init__(self, pair: Pair, args: argparse.Namespace, digests: bool = True) -> None:
        self.pair, self.args, self.digests = pair, args, digests
        self.sampling = sampling_from(args)
        self.target = load_decoder(pair.target, DTYPE_NAMES[args.dtype], args.device)
        self.widths = usable_widths(self.target, pair.target.digest)
        self._drafts: dict[tuple[str, str], Decoder] = {}

    def draft(self, drafter: str, weights: str) -> Decoder:
        """The draft decoder of these weights, loaded once."""
        source = "self" if drafter == "self" else "draft"
        if (source, weights) not in self._drafts:
            self._drafts[source, weights] = load_draft(self.pair, drafter, weights, self.args)
        return self._drafts[source, weights]

    def engine(self, variant: Variant) -> SpeculativeDecoder:
        """A decoder as the variant says, around the shared target."""
        draft = self.draft(variant.drafter, variant.draft_weights) if variant.draft_weights else None
        drafter = make_drafter(variant.drafter, draft)
        policy = ConfidenceStop(self.widths) if variant.k == "stop" else None
        return SpeculativeDecoder(self.target, drafter, vocab_size=shared_vocabulary(self.pair, self.target, draft),
                                  widths=self.widths, policy=policy)

    def runner(self, variant: Variant) -> Runner:
        """Load what the variant needs and return what runs it. Raises ValueError for a K that no width holds."""
        if isinstance(variant.k, int):
            FixedK(variant.k, self.widths)
        engine = self.engine(variant)
        sampling = replace(self.sampling, coupling="rejection" if variant.name == "rejection" else "gumbel")

        def run(prompt: Sequence[int], max_new_tokens: int) -> Outcome:
            config = GenerationConfig(
                max_new_tokens, variant.k if isinstance(variant.k, int) else None,
                sampling, bool(variant.siblings), self.pair.target.end_token_ids, digests=self.digests)
            return timed_generation(engine, prompt, config)

        return run


def timed_generation(engine: SpeculativeDecoder, prompt: Sequence[int], config: GenerationConfig) -> Outcome:
    """Run one of our generations, timed from outside."""
    start = time.perf_counter()
    generation = engine.generate(prompt, config)
    first = 0.0
    for _ in generation:
        first = first or time.perf_counter() - start
    seconds = time.perf_counter() - start
    statistics = generation.statistics
    digests = [digest for each in statistics.rounds for digest in each.digests]
    return Outcome(statistics.tokens, seconds, first, digests=digests, figures=our_figures(statistics))


def our_figures(statistics: Statistics) -> dict[str, Any]:
    """What only our side can report."""
    figures = statistics.as_dict()
    figures["siblings_used"] = figures["siblings"]
    return {name: figures[name] for name in OUR_FIGURES}


class Clock:
    """A streamer that notes when the first tokens came and how many passes yielded tokens; the first put is the prompt."""

    def __init__(self) -> None:
        self.start, self.puts, self.first_seconds, self.first_tokens = time.perf_counter(), 0, 0.0, 0

    def put(self, value: Tensor) -> None:
        self.puts += 1
        if self.puts == 2:
            self.first_seconds, self.first_tokens = time.perf_counter() - self.start, value.numel()

    def end(self) -> None:
        """Nothing to flush."""


class HuggingFace:
    """Stock `generate`: nothing is changed but what a variant's name says."""

    def __init__(self, pair: Pair, args: argparse.Namespace) -> None:
        self.pair, self.args, self.sampling = pair, args, sampling_from(args)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.target = self._load(pair.target)
        self._assistant: Any = None

    def _load(self, checkpoint: Any) -> Any:
        return checkpoint.hf_model(self.args.dtype).to(self.args.device)

    def assistant(self) -> Any:
        """The stock draft model at the target's precision, loaded once."""
        if self.pair.draft is None:
            raise ValueError("this variant needs a draft model; give --draft, or leave the variant out of --variants")
        if self._assistant is None:
            self._assistant = self._load(self.pair.draft)
        return self._assistant

    def runner(self, variant: Variant) -> Runner:
        """Load what the variant needs and return what runs it."""
        extra: dict[str, Any] = {}
        if variant.drafter == "lookup":
            extra["prompt_lookup_num_tokens"] = variant.k
        elif variant.drafter == "model":
            extra["assistant_model"] = assistant = self.assistant()
            stock = copy.deepcopy(assistant.generation_config)
            if isinstance(variant.k, int):  # generate() takes these from the assistant's configuration only
                stock.num_assistant_tokens, stock.num_assistant_tokens_schedule = variant.k, "constant"
                stock.assistant_confidence_threshold = 0.0

        def run(prompt: Sequence[int], max_new_tokens: int) -> Outcome:
            if "assistant_model" in extra:
                extra["assistant_model"].generation_config = copy.deepcopy(stock)  # each call starts afresh, as ours do
            return self._timed(prompt, max_new_tokens, extra)

        return run

    def _timed(self, prompt: Sequence[int], max_new_tokens: int, extra: dict[str, Any]) -> Outcome:
        ids = torch.tensor([list(prompt)], device=self.args.device)
        config = generate_config(self.sampling, max_new_tokens, self.pair.target.end_token_ids)
        with torch.random.fork_rng():
            torch.manual_seed(self.sampling.seed)
            clock = Clock()
            output = self.target.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config,
                                          streamer=clock, **extra)
            tokens = output[0, len(prompt):].tolist()
            seconds = time.perf_counter() - clock.start
        passes = clock.puts - 2  # without the prompt's
        rate = (len(tokens) - clock.first_tokens) / passes if passes > 0 else None
        return Outcome(tokens, seconds, clock.first_seconds, clock.first_tokens,
                       figures=dict.fromkeys(OUR_FIGURES) | {"target_passes": passes, "tokens_per_round": rate})


def generate_config(sampling: SamplingParams, max_new_tokens: int, ends: Sequence[int]) -> transformers.GenerationConfig:
    """Our settings as Hugging Face's; everything else at its default."""
    settings: dict[str, Any] = {
        "max_new_tokens": max_new_tokens, "eos_token_id": list(ends) or None, "pad_token_id": ends[-1] if ends else 0,
        "do_sample": not sampling.greedy, "repetition_penalty": sampling.repetition_penalty}
    if not sampling.greedy:
        settings |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p,
                     "min_p": sampling.min_p or None}
    return transformers.GenerationConfig(**settings)
