"""From flags to an engine: the decoders of a pair, the drafter, and the widths that may be used on this machine."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import native
from cache import cache_folder
from cli import DTYPES, non_negative_int
from drafters import CombinedDrafter, Drafter, LookupDrafter, ModelDrafter
from models import Checkpoint, Pair
from policy import Policy
from sampling import SamplingParams
from shapes import Widths, measure_seconds
from spec_decode import GenerationConfig, SpeculativeDecoder
from transformer import Decoder, DecoderConfig

DRAFTERS = ("both", "model", "lookup", "self", "none")
TIMED_WIDTHS = (1, 2, 4, 6, 8, 12, 16)
BUSY = 0.7  # a pass that takes less of its time on file shows that it was measured on a busy machine
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def add_engine_arguments(parser: argparse.ArgumentParser, drafting: bool = True) -> None:
    """--drafter, --draft-weights (not for a script that only decodes with the target), --target-weights, --backend."""
    group = parser.add_argument_group("engine")
    if drafting:
        group.add_argument("--drafter", choices=DRAFTERS, default="both",
                           help="who proposes: the draft model, prompt lookup, both, the target's own int4 copy, or nobody "
                           "(default: %(default)s)")
        group.add_argument("--draft-weights", choices=("bf16", "int8", "int4"), default="int4",
                           help="precision of the draft's weights (default: %(default)s)")
    else:
        parser.set_defaults(drafter="none", draft_weights=None)
    group.add_argument("--target-weights", choices=("int8", "int4"),
                       help="quantise the target too: less memory, but another model (default: as --dtype)")
    group.add_argument("--backend", choices=("auto", "native", "torch"), default="auto",
                       help="native: own CPU kernels; torch: PyTorch's operators (default: native on a CPU, else torch)")


def add_generation_arguments(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """--max-new-tokens, --num-speculative-tokens, --no-siblings."""
    group = parser.add_argument_group("generation")
    group.add_argument("--max-new-tokens", type=non_negative_int, default=max_new_tokens, metavar="N",
                       help="tokens per prompt (default: %(default)s)")
    group.add_argument("--num-speculative-tokens", "-K", type=non_negative_int, metavar="K",
                       help="draft tokens per round; 0: plain decoding (default: adapted to time and acceptance)")
    group.add_argument("--no-siblings", action="store_true", help="leave spare rows of a pass empty")


def add_sampling_arguments(parser: argparse.ArgumentParser, temperature: float) -> None:
    """--temperature, --top-k, --top-p, --min-p, --repetition-penalty, --seed, --coupling."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=temperature, metavar="T",
                       help="0: greedy (default: %(default)s)")
    group.add_argument("--top-k", type=non_negative_int, default=0, metavar="N", help="keep the N likeliest tokens; 0: all")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="keep this probability mass (default: 1, all)")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="drop tokens below P times the likeliest's")
    group.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="above 1: discourage repetition")
    group.add_argument("--seed", type=non_negative_int, default=0, metavar="N", help="of the sampling (default: 0)")
    group.add_argument("--coupling", choices=("gumbel", "rejection"), default="gumbel",
                       help="gumbel: output identical to target-only sampling with the seed; rejection: the same distribution, "
                       "and the same output again only with -K and --drafter model, as the default asks the clock")


def sampling_from(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(args.temperature, args.top_k, args.top_p, args.min_p, args.repetition_penalty, args.seed,
                          args.coupling)


@dataclass(frozen=True)
class Assembled:
    """An engine with its parts; notes are worth a line each to the user."""

    engine: SpeculativeDecoder
    target: Decoder
    draft: Decoder | None
    target_name: str
    notes: tuple[str, ...]

    @property
    def tensor_bytes(self) -> dict[str, int]:
        """Bytes held in tensors, by part."""
        parts = {"target weights": self.target.weight_bytes, "target KV cache": self.target.cache.nbytes}
        if self.draft is not None:
            parts |= {"draft weights": self.draft.weight_bytes, "draft KV cache": self.draft.cache.nbytes}
        return parts


def load_decoder(checkpoint: Checkpoint, weights: str, device: torch.device | str = "cpu", backend: str = "auto") -> Decoder:
    return Decoder(DecoderConfig.from_hf(checkpoint.config), checkpoint.tensors(), weights=weights, device=device,
                   backend=backend)


def load_draft(pair: Pair, drafter: str, weights: str, args: argparse.Namespace) -> Decoder:
    """The decoder that drafts. Raises ValueError where there is no model for it."""
    source = pair.target if drafter == "self" else pair.draft
    if source is None:
        raise ValueError(f"the drafter '{drafter}' needs a draft model; give --draft, or draft by lookup or self")
    if weights == "bf16" and args.dtype == torch.float16:
        weights = "fp16"
    return load_decoder(source, weights, args.device, args.backend)


def assemble(pair: Pair, args: argparse.Namespace, policy: Policy | None = None) -> Assembled:
    """Load what the flags ask for."""
    target_weights = args.target_weights or DTYPE_NAMES[args.dtype]
    target = load_decoder(pair.target, target_weights, args.device, args.backend)
    draft = None
    if args.drafter in ("both", "model", "self"):
        draft = load_draft(pair, args.drafter, args.draft_weights, args)
    widths = usable_widths(target, pair.target.digest)
    engine = SpeculativeDecoder(target, make_drafter(args.drafter, draft), vocab_size=shared_vocabulary(pair, target, draft),
                                widths=widths, policy=policy)
    notes = []
    if target.backend_note:
        notes.append(f"PyTorch's operators instead of the native kernels: {target.backend_note}")
    if not widths.any_width and len(widths.seconds) == 1:
        notes.append(f"every pass has {widths.largest} rows; verify.py --shapes measures which widths may be used here")
    if args.target_weights:
        notes.append(f"the target is quantised to {args.target_weights}: its output is that of another model")
    name = pair.target.name + (f" ({args.target_weights})" if args.target_weights else "")
    return Assembled(engine, target, draft, name, tuple(notes))


def make_drafter(kind: str, draft: Decoder | None) -> Drafter | None:
    if kind == "lookup":
        return LookupDrafter()
    if draft is None:
        return None
    model = ModelDrafter(draft)
    return CombinedDrafter(model, LookupDrafter()) if kind == "both" else model


def shared_vocabulary(pair: Pair, *decoders: Decoder | None) -> int:
    """Ids that every model scores and the tokenizer knows, special tokens included; logits beyond are padding."""
    known = max(len(pair.tokenizer), *(token + 1 for token in (-1, *pair.tokenizer.added_tokens_decoder)))
    return min(known, *(decoder.config.vocab_size for decoder in decoders if decoder is not None))


def generation_config(args: argparse.Namespace, pair: Pair, **overrides: Any) -> GenerationConfig:
    settings = {"max_new_tokens": args.max_new_tokens, "num_speculative_tokens": args.num_speculative_tokens,
                "siblings": not args.no_siblings, "end_token_ids": pair.target.end_token_ids}
    return GenerationConfig(**(settings | overrides))


# ---- widths, measured once per machine and model ----


def shapes_file(target: Decoder, digest: str) -> Path:
    """Where measured widths of this model, with these kernels, on this machine are kept."""
    operators = native.identity() if target.backend == "native" else torch.__version__
    key = f"{digest}-{target.weights}-{target.backend}-{target.device.type}-{torch.get_num_threads()}t-{operators}"
    return cache_folder() / "shapes" / f"{key}.json"


def usable_widths(target: Decoder, digest: str) -> Widths:
    """The widths on file; else, with native kernels, all of them with seconds measured now (up to 10 s), else a fixed one.

    Native seconds on file are replaced when a pass now is much faster: the machine was busy then, so they do not compare.
    """
    file = shapes_file(target, digest)
    try:
        stored = json.loads(file.read_text())
        widths = Widths({int(width): seconds for width, seconds in stored["seconds"].items()}, stored["any_width"])
        if target.backend != "native" or not widths.any_width or not measured_busy(target, widths):
            return widths
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    if target.backend != "native":
        return Widths.fixed()
    widths = Widths(measure_seconds(target, TIMED_WIDTHS))
    store_widths(file, widths)
    return widths


def measured_busy(target: Decoder, widths: Widths) -> bool:
    """Whether the narrowest pass is now much faster than when it was measured."""
    narrowest = min(widths.seconds)
    return measure_seconds(target, (narrowest,), context=narrowest, rounds=2)[narrowest] < BUSY * widths.seconds[narrowest]


def store_widths(file: Path, widths: Widths) -> None:
    """Write atomically; a cache that cannot be written is no reason to fail."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as temporary:
            json.dump({"seconds": widths.seconds, "any_width": widths.any_width}, temporary)
        os.replace(temporary.name, file)
    except OSError:
        return
