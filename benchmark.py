"""Measure ours beside Hugging Face's stock generation: same prompts, same run, variants interleaved per prompt.

Every variant runs every prompt, in an order that rotates from prompt to prompt, so that a slow moment of the machine does
not fall on one of them. Ratios are taken per prompt from whole generations (prefill included) and averaged
geometrically. Rows are written as they finish: an interrupted run loses nothing and goes on with --resume.
The last line of stdout is one JSON object; the table goes to stderr.

With a --temperature above 0 all variants sample, Hugging Face's too: "dynamic" and the other variants of ours by coupled
sampling, "rejection" by rejection sampling. The file is then results/benchmark-sampling.jsonl.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import card
import cli
import memory
import replay
import results
from assemble import add_sampling_arguments, sampling_from
from findings import ABLATIONS
from models import Pair
from summary import summarize, table
from variants import VARIANTS, HuggingFace, Ours, Outcome, Runner, Variant

QUICK = ("plain", "hf-greedy", "hf-assisted", "dynamic")
DEFAULT = ("plain", "hf-greedy", "hf-assisted", "k2", "k4", "k7", "k11", "dynamic")
ABLATED = ("plain", "dynamic", *ABLATIONS)
SUBSET = 8  # prompts of --ablations and --policies, one per category
WARM_UP_TOKENS = 8
REFERENCES = {"plain": "plain", "ours": "plain", "hf": "hf-greedy"}  # whose output a family's is compared with
DEFINITIONS = {
    "tokens_per_second": "emitted tokens, by id / seconds of the whole generation, prefill included",
    "decode_tokens_per_second": "the same after the first token (Hugging Face assisted: after the first pass)",
    "first_token_seconds": "from the call to the first token: prefill (Hugging Face assisted: and its first drafts)",
    "acceptance_rate": "accepted / drafted tokens", "tokens_per_round": "emitted / target passes, without prefill",
    "same_ids": "ids as those of the family's reference: our plain decoding; Hugging Face greedy",
    "same_bits": "the logits of every token too, bit for bit (a digest of each is taken while being timed)",
    "ratios": "per prompt, of tokens_per_second; geometric mean, 95% bootstrap interval over prompts",
}
SETTINGS = ("commit", "cpu", "device", "threads", "dtype", "target_digest", "draft_digest", "prompt_set", "max_new_tokens",
            "variants", "repeats", "sampling", "digests")  # a run may only be resumed under the same


@dataclass(frozen=True)
class Task:
    """A prompt as ids."""

    id: str
    category: str
    ids: tuple[int, ...]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_model_arguments(parser)
    cli.add_runtime_arguments(parser)
    add_sampling_arguments(parser, temperature=0.0)
    cli.add_prompts_argument(parser)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="4 prompts x 48 tokens, four variants: minutes on two cores")
    size.add_argument("--full", action="store_true", help="every variant and every prompt")
    size.add_argument("--ablations", action="store_true", help="8 prompts, dynamic K with pieces taken away or exchanged")
    parser.add_argument("--limit", type=cli.positive_int, metavar="N",
                        help=f"prompts (default: 24, or all of --prompts; {SUBSET} with --ablations and --policies)")
    parser.add_argument("--max-new-tokens", type=cli.positive_int, metavar="N", help="tokens per prompt (default: 96)")
    parser.add_argument("--variants", type=variant_names, metavar="A,B,...", help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--repeats", type=cli.positive_int, default=1, metavar="N", help="runs per prompt (default: 1)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="results file (default: in results/)")
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted --output")
    parser.add_argument("--no-digests", action="store_true", help="compare ids only, not the bits of the logits")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--card", action="store_true", help="instead: step times, bandwidth and predicted speed-up")
    mode.add_argument("--policies", action="store_true", help="instead: replay policies for K on recorded traces")
    mode.add_argument("--memory", action="store_true", help="instead: each variant's peak memory, in a process of its own")
    parser.set_defaults(backend="auto")  # native on a CPU: what is compared is the product as it is
    return parser.parse_args(argv)


def variant_names(text: str) -> tuple[str, ...]:
    """Parse --variants."""
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in VARIANTS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(VARIANTS)}")
    return names


def complete(args: argparse.Namespace) -> argparse.Namespace:
    """Fill in what --quick, --full and the default leave open."""
    sampled = not sampling_from(args).greedy
    if args.variants is None:
        names = QUICK if args.quick or args.memory else ABLATED if args.ablations else tuple(VARIANTS) if args.full else DEFAULT
        names = tuple(name for name in names if name != "rejection")
        args.variants = (*names, "rejection") if sampled else names
    elif "rejection" in args.variants and not sampled:
        raise ValueError("the variant rejection samples; give a --temperature above 0 with it, or leave it out")
    if sampled and (args.ablations or args.card or args.policies):
        raise ValueError("--ablations, --card and --policies are of greedy decoding; leave --temperature out")
    args.max_new_tokens = args.max_new_tokens or (48 if args.quick else 96)
    if args.limit is None and not args.full:
        own = args.prompts != cli.DEFAULT_PROMPTS
        args.limit = 4 if args.quick else SUBSET if args.ablations or args.policies else None if own else 24
    name = ("card" if args.card else "policies" if args.policies else "memory" if args.memory else
            "benchmark-sampling" if sampled else "benchmark-ablations" if args.ablations else "benchmark")
    args.output = args.output or results.FOLDER / f"{name}.jsonl"
    return args


def load_tasks(args: argparse.Namespace, pair: Pair) -> list[Task]:
    prompts = cli.load_prompts(args.prompts)[:args.limit]
    return [Task(prompt.id, prompt.category, tuple(pair.encode(prompt.prompt, args.raw))) for prompt in prompts]


def order(names: Sequence[str], turn: int) -> list[str]:
    """The variants of one prompt: rotated by its turn, but a family's reference before the rest of the family."""
    shift = turn % len(names)
    rotated = [*names[shift:], *names[:shift]]
    for reference in ("plain", "hf-greedy"):
        if reference in rotated:
            rotated.remove(reference)
            first = next((i for i, name in enumerate(rotated) if REFERENCES[VARIANTS[name].family] == reference), None)
            rotated.insert(shift if first is None else first, reference)
    return rotated


def digest(values: Sequence[Any]) -> str:
    """Equal digests: equal sequences."""
    return hashlib.blake2b(json.dumps(list(values)).encode(), digest_size=8).hexdigest()


@dataclass
class Session:
    """One run over tasks x variants x repeats; `rows` holds what is finished, from an earlier run too."""

    tasks: Sequence[Task]
    runners: Mapping[str, Runner]
    reference: Runner  # our plain decoding
    max_new_tokens: int
    repeats: int = 1
    sampled: bool = False
    rows: list[dict[str, Any]] = field(default_factory=list)
    _outputs: dict[tuple[str, str], tuple[str, str | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for row in self.rows:
            self._remember(row)

    def _remember(self, row: dict[str, Any]) -> None:
        if row["variant"] in REFERENCES.values():
            self._outputs.setdefault((row["variant"], row["prompt_id"]), (row["ids_digest"], row["bits_digest"]))

    def remaining(self) -> Iterator[tuple[Task, int, str]]:
        """What is still to run, in order."""
        done = {(row["variant"], row["prompt_id"], row["repeat"]) for row in self.rows}
        names = list(self.runners)
        for repeat in range(self.repeats):
            for turn, task in enumerate(self.tasks, start=repeat):
                for name in order(names, turn):
                    if (name, task.id, repeat) not in done:
                        yield task, repeat, name

    def warm_up(self) -> None:
        """A short generation of each variant, not counted."""
        for runner in tqdm(self.runners.values(), desc="warm-up", disable=None):
            runner(self.tasks[0].ids, min(WARM_UP_TOKENS, self.max_new_tokens))

    def run(self) -> Iterator[dict[str, Any]]:
        """Measure what remains; each row as it finishes."""
        for task, repeat, name in tqdm(list(self.remaining()), desc="benchmark", disable=None):
            variant = VARIANTS[name]
            row = self._row(task, repeat, variant, self.runners[name](task.ids, self.max_new_tokens))
            self.rows.append(row)
            yield row

    def _row(self, task: Task, repeat: int, variant: Variant, outcome: Outcome) -> dict[str, Any]:
        row = {"type": "run"} | variant.row(self.sampled)
        row |= {"prompt_id": task.id, "category": task.category, "repeat": repeat, "prompt_tokens": len(task.ids)}
        row |= outcome.row() | {"ids_digest": digest(outcome.tokens),
                                "bits_digest": digest(outcome.digests) if outcome.digests else None}
        self._remember(row)
        return row | self._compare(row, task)

    def _compare(self, row: dict[str, Any], task: Task) -> dict[str, bool | None]:
        """Whether ids and bits are the reference's; None where the question has no meaning or no answer."""
        key = (REFERENCES[row["family"]], task.id)
        if row["variant"] == "rejection" or (row["family"] == "hf" and (self.sampled or key not in self._outputs)):
            return {"same_ids": None, "same_bits": None}
        if key not in self._outputs:  # plain is not among the variants: decode it once, outside the clock
            outcome = self.reference(task.ids, self.max_new_tokens)
            self._outputs[key] = digest(outcome.tokens), digest(outcome.digests) if outcome.digests else None
        ids, bits = self._outputs[key]
        unknown = bits is None or row["bits_digest"] is None
        return {"same_ids": row["ids_digest"] == ids, "same_bits": None if unknown else row["bits_digest"] == bits}


def settings(args: argparse.Namespace, pair: Pair, tasks: Sequence[Task]) -> dict[str, Any]:
    """The header row."""
    sampling = asdict(sampling_from(args))
    del sampling["coupling"]  # that is a matter of the variant
    unused = {} if any(VARIANTS[name].needs_draft for name in args.variants) else {"draft": None, "draft_digest": None}
    return results.header(
        args, pair, **unused, prompts=len(tasks), prompt_set=digest([(task.id, task.ids) for task in tasks]),
        max_new_tokens=args.max_new_tokens, variants=list(args.variants), repeats=args.repeats, sampling=sampling,
        digests=not args.no_digests, definitions=DEFINITIONS)


def earlier(path: Path, header: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows to go on from. Raises ValueError where they were measured under other settings."""
    if not path.exists():
        return []
    old, rows = results.read(path)
    for name in SETTINGS:
        if old.get(name) != header[name]:
            raise ValueError(f"{path} cannot be resumed: its {name} is {old.get(name)!r}, now it is {header[name]!r}; "
                             "run without --resume (the old file is kept) or with another --output")
    rows = [row for row in rows if row["type"] != "summary"]  # a new one will follow
    mended = path.with_suffix(".part")  # without half a row at its end either
    mended.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in [old, *rows]), "utf-8")
    os.replace(mended, path)
    return rows


def make_runners(args: argparse.Namespace, pair: Pair) -> tuple[dict[str, Runner], Runner]:
    """What runs each variant, models loaded; and our plain decoding."""
    ours = Ours(pair, args, digests=not args.no_digests)
    families: dict[str, Ours | HuggingFace] = {"plain": ours, "ours": ours}
    if any(VARIANTS[name].family == "hf" for name in args.variants):
        families["hf"] = HuggingFace(pair, args)
    runners = {name: families[VARIANTS[name].family].runner(VARIANTS[name]) for name in args.variants}
    return runners, runners.get("plain") or ours.runner(VARIANTS["plain"])


def compare(args: argparse.Namespace, pair: Pair) -> int:
    """The benchmark itself."""
    tasks = load_tasks(args, pair)
    header = settings(args, pair, tasks)
    rows = earlier(args.output, header) if args.resume else []
    with results.Writer(args.output, header, append=args.resume) as writer:
        session = Session(tasks, *make_runners(args, pair), args.max_new_tokens, args.repeats,
                          not sampling_from(args).greedy, [row for row in rows if row["type"] == "run"])
        try:
            session.warm_up()
            for row in session.run():
                writer.write(row)
        except KeyboardInterrupt:
            print(f"{table(session.rows, args.variants)}\ninterrupted; go on with --resume", file=sys.stderr)
            raise
        summary = summarize(session.rows)
        writer.write({"type": "summary"} | summary)
    print(table(session.rows, args.variants), file=sys.stderr)
    print(json.dumps(summary))
    return 0


def main() -> int:
    args = complete(parse_args())
    pair = cli.pair_from(args)
    if args.card:
        return card.run(args, pair)
    if args.policies:
        return replay.run(args, pair, load_tasks(args, pair))
    if args.memory:
        return memory.run(args, pair, load_tasks(args, pair)[0].ids)
    return compare(args, pair)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    cli.run(main)
