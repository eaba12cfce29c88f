"""Is the output of speculative decoding exactly the target's own? Compared with plain decoding, to the bit.

    python verify.py                     prompts x K: token ids and logit digests; then Hugging Face `generate`
    python verify.py --temperature 0.8   the same for coupled sampling: the very samples of the target alone
    python verify.py --shapes            which widths of a pass give the same bits on this machine; kept for the engine
    python verify.py --negative-control  widths that are not proven: differences must be found, or the check is blind

Exit code 1: a difference, a "bug" in a cross-check, or a negative control that found nothing.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

import assemble
import cli
import proven_widths
import results
from assemble import Assembled
from comparison import Outcome, Reference, drafter_list, drafter_name, first_difference, with_drafters
from crosscheck import CrossCheck, Trace, cross_check, describe, hugging_face_traces, trace_of
from metrics import Statistics
from models import Pair
from sampling import SamplingParams
from shapes import Widths
from spec_decode import GenerationConfig

DRAFT_COUNTS: tuple[int | None, ...] = (1, 3, 5, 7, 15, None)  # None: adapted
UNPROVEN = Widths({1: 1.0, 64: 1.0})  # whatever holds the rows: width 1 when plain, K + 1 when speculative
OUTPUTS = {"verify": "verify.jsonl", "sampling": "verify-sampling.jsonl", "shapes": "shapes.jsonl",
           "negative control": "verify-negative-control.jsonl"}


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_model_arguments(parser)
    cli.add_runtime_arguments(parser)
    assemble.add_engine_arguments(parser)
    assemble.add_sampling_arguments(parser, temperature=0.0)
    cli.add_prompts_argument(parser)
    parser.add_argument("--limit", type=cli.positive_int, metavar="N", help="only the first N prompts (default: all)")
    parser.add_argument("--num-speculative-tokens", "-K", type=draft_counts, metavar="K,K,...",
                        help="draft tokens per round, a list; dynamic: adapted (default: 1,3,5,7,15,dynamic)")
    parser.add_argument("--max-new-tokens", type=cli.non_negative_int, default=96, metavar="N",
                        help="tokens per prompt (default: %(default)s)")
    parser.add_argument("--seeds", type=seed_list, metavar="N,N,...", help="several seeds in place of --seed")
    parser.add_argument("--drafters", type=drafter_list, metavar="A,B,...",
                        help="several in place of --drafter, each with the weights of its model if it has one: "
                        "model:int4,model:bf16,lookup; all are compared with the same plain decoding")
    parser.add_argument("--no-cross-checks", action="store_true",
                        help="leave out Hugging Face generate and width-1 decoding")
    parser.add_argument("--cross-check-prompts", type=cli.positive_int, default=4, metavar="N",
                        help="prompts of the cross-checks (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcome as one JSON object")
    parser.add_argument("--output", type=Path, metavar="FILE",
                        help="results file (default: by mode, and by whether it samples, in results/)")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--shapes", dest="mode", action="store_const", const="shapes", default="verify",
                      help="measure which widths of a pass give the same bits on this machine; kept for the engine")
    mode.add_argument("--negative-control", dest="mode", action="store_const", const="negative control",
                      help="allow widths that are not proven and insist that differences are found")
    args = parser.parse_args(arguments)
    if args.drafters:
        if (args.drafter, args.draft_weights) != (parser.get_default("drafter"), parser.get_default("draft_weights")):
            parser.error("--drafters stands in place of --drafter and --draft-weights; give one of them")
        args.drafter, args.draft_weights = args.drafters[0]
    else:
        args.drafters = [(args.drafter, args.draft_weights)]
    return args


def draft_counts(text: str) -> list[int | None]:
    """Parse '1,3,dynamic'; None stands for dynamic."""
    return [None if part.strip() == "dynamic" else cli.non_negative_int(part.strip()) for part in text.split(",")]


def seed_list(text: str) -> list[int]:
    return [cli.non_negative_int(part.strip()) for part in text.split(",")]


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


# ---- speculative against plain ----


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    """The sampling settings; refused where there is no exact output to compare with."""
    params = assemble.sampling_from(args)
    if params.coupling == "rejection" and not params.greedy:
        raise ValueError("--coupling rejection keeps the distribution, not the samples, so there is nothing to compare to "
                         "the bit; use run_sampling.py --check, or --coupling gumbel")
    if args.seeds and params.greedy:
        raise ValueError("--seeds repeats the same greedy decoding; give a --temperature above 0 with it")
    if any(kind == "none" for kind, _ in args.drafters):
        raise ValueError("--drafter none never speculates, so there is nothing to verify; choose another drafter")
    return params


def run_one(assembled: Assembled, pair: Pair, args: argparse.Namespace, ids: Sequence[int], params: SamplingParams,
            count: int | None, details: bool = False) -> Statistics:
    """One generation with digests; count 0 is plain decoding."""
    config = GenerationConfig(args.max_new_tokens, count, params, end_token_ids=pair.target.end_token_ids, digests=True,
                              details=details)
    generation = assembled.engine.generate(ids, config)
    generation.run()
    return generation.statistics


def usable_counts(widths: Widths, asked: list[int | None] | None) -> list[int | None]:
    """The K to run: those asked for; by default those that the widths in use can hold."""
    counts = list(DRAFT_COUNTS) if asked is None else asked
    if widths.any_width:
        return counts
    too_large = [count for count in counts if count is not None and count >= widths.largest]
    if too_large:
        text = f"K = {', '.join(map(str, too_large))} needs wider passes than the widest in use here, {widths.largest} rows"
        if asked is not None:
            raise ValueError(f"{text}; use a smaller --num-speculative-tokens, or measure widths with --shapes")
        note(f"{text}: left out")
    return [count for count in counts if count not in too_large]


def compare_all(assembled: Assembled, pair: Pair, args: argparse.Namespace, writer: results.Writer, *,
                details: int = 0, stop_at_difference: bool = False) -> Outcome:
    """Every prompt x seed x K against its reference, a row each. details: references that keep what cross-checks need."""
    params, outcome = sampling_of(args), Outcome()
    prompts = cli.load_prompts(args.prompts)[:args.limit]
    cases = [(prompt, seed) for prompt in prompts for seed in args.seeds or [args.seed]]
    counts = usable_counts(assembled.engine.widths, args.num_speculative_tokens)
    contenders = with_drafters(assembled, pair, args)
    runs = len(cases) * (1 + len(contenders) * len(counts))
    with tqdm(total=runs, desc="generations", unit="run", mininterval=1, leave=False) as bar:
        for prompt, seed in cases:
            ids, seeded = pair.encode(prompt.prompt, args.raw), replace(params, seed=seed)
            plain = run_one(assembled, pair, args, ids, seeded, 0, details=len(outcome.references) < details)
            outcome.references.append(Reference(prompt, ids, seed, plain))
            bar.update()
            for (drafter, contender), count in itertools.product(contenders.items(), counts):
                other = run_one(contender, pair, args, ids, seeded, count)
                difference = first_difference(plain, other)
                row = {"type": "comparison", "id": prompt.id, "category": prompt.category, "seed": seed, "drafter": drafter,
                       "num_speculative_tokens": "dynamic" if count is None else str(count),
                       "equal": difference is None, "difference": difference, "prompt_tokens": len(ids),
                       "tokens": plain.emitted, "drafted": other.drafted, "accepted": other.accepted,
                       "plain_seconds": plain.seconds, "seconds": other.seconds}
                outcome.rows.append(row)
                writer.write(row)
                bar.update()
            if stop_at_difference and outcome.differences:
                break
    return outcome


def verify(pair: Pair, args: argparse.Namespace, writer: results.Writer) -> Outcome:
    """The comparisons, then the cross-checks, each with its own models in memory."""
    wanted = 0 if args.no_cross_checks else cross_checkable(args)
    assembled = load(pair, args)
    outcome = compare_all(assembled, pair, args, writer, details=wanted)
    checked = outcome.references[:wanted]
    if checked:
        outcome.checks += width_one_checks(assembled, pair, args, checked)
        del assembled  # two copies of the weights need not be in memory at once
        gc.collect()
        outcome.checks += hugging_face_checks(pair, args, checked)
    for check in outcome.checks:
        writer.write(check.row())
    return outcome


def load(pair: Pair, args: argparse.Namespace) -> Assembled:
    assembled = assemble.assemble(pair, args)
    for text in assembled.notes:
        note(text)
    return assembled


def cross_checkable(args: argparse.Namespace) -> int:
    """How many prompts to cross-check; none where the stock library computes something else."""
    params = assemble.sampling_from(args)
    if not params.greedy or params.repetition_penalty != 1.0:
        note("no cross-checks: they compare plain greedy decoding")
    elif args.target_weights:
        note("no cross-checks: the stock library does not run this quantised target")
    elif args.max_new_tokens:
        return args.cross_check_prompts
    return 0


def width_one_checks(assembled: Assembled, pair: Pair, args: argparse.Namespace,
                     checked: list[Reference]) -> list[CrossCheck]:
    """Our own decoding in passes of one row, where plain decoding is something else."""
    if assembled.engine.widths.fit(1) == 1:
        note("plain decoding runs passes of one row here, so width-1 decoding needs no check of its own")
        return []
    assembled.engine.widths = UNPROVEN
    traces = [trace_of(run_one(assembled, pair, args, case.ids, SamplingParams(), 0, details=True)) for case in checked]
    return checks("width-1 decoding", checked, traces, args)


def hugging_face_checks(pair: Pair, args: argparse.Namespace, checked: list[Reference]) -> list[CrossCheck]:
    prompts = [case.ids for case in checked]
    traces = list(hugging_face_traces(pair.target, args.dtype, args.device, prompts, args.max_new_tokens))
    return checks("Hugging Face generate", checked, traces, args)


def checks(against: str, checked: list[Reference], traces: list[Trace], args: argparse.Namespace) -> list[CrossCheck]:
    return [cross_check(case.prompt.id, against, trace_of(case.output), theirs, args.dtype)
            for case, theirs in zip(checked, traces, strict=True)]


# ---- reports ----


def print_table(outcome: Outcome) -> None:
    print(f"{'drafter':12} {'K':>8} {'comparisons':>12} {'differences':>12} {'tokens':>8} {'drafted':>8} {'accepted':>9}")
    for row in outcome.by_count():
        print(f"{row['drafter']:12} {row['num_speculative_tokens']:>8} {row['comparisons']:>12} {row['differences']:>12} "
              f"{row['tokens']:>8} {row['drafted']:>8} {row['accepted']:>9}")
    for row in outcome.differences[:10]:
        where = row["difference"]
        print(f"difference: {row['id']}, seed {row['seed']}, {row['drafter']}, K = {row['num_speculative_tokens']}, at token "
              f"{where['position']}: {where['kind']} (plain / speculative: {where.get('tokens')}, {where.get('digests')})")
    for check in outcome.checks:
        print(describe(check))


def judge(outcome: Outcome, args: argparse.Namespace) -> tuple[str, int]:
    """The verdict in words, and the exit code."""
    differences, comparisons = len(outcome.differences), len(outcome.rows)
    if args.mode == "negative control":
        if differences:
            return f"the check works: {differences} of {comparisons} comparisons with unproven widths differ", 0
        return ("the negative control found no difference: either all widths agree on this machine (see --shapes --backend "
                "torch), or more prompts and tokens are needed, or the check is blind"), 1
    text = f"{comparisons} comparisons of token ids and logit bits with plain decoding, {differences} differences"
    if outcome.checks:
        near = sum(check.verdict == "near-tie" for check in outcome.checks)
        text += f"; {len(outcome.checks)} cross-checks, {near} near-ties, {len(outcome.bugs)} bugs"
    if comparisons and not any(row["drafted"] for row in outcome.rows):
        text += "; but nothing was drafted, so this says little"
    failed = bool(differences or outcome.bugs)
    return ("FAILED: " if failed else "exact: ") + text, int(failed)


def write_json(args: argparse.Namespace, content: dict[str, Any]) -> None:
    if args.json:
        args.json.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    sampled = not sampling_of(args).greedy
    cli.load_prompts(args.prompts)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text("")  # an interrupted run must not leave the outcome of an older one
    if args.mode == "negative control" and args.backend != "torch":
        note("the native kernels give the same bits at every width; the negative control runs on --backend torch")
        args.backend = "torch"
    pair = cli.pair_from(args)
    output = args.output or results.FOLDER / OUTPUTS["sampling" if sampled and args.mode == "verify" else args.mode]
    if args.mode == "shapes":
        content = proven_widths.run(args, pair, output)
        write_json(args, content)
        return int(content["exit_code"])
    header = results.header(args, pair, mode=args.mode, backend=args.backend, drafter=args.drafter,
                            drafters=[drafter_name(*each) for each in args.drafters], temperature=args.temperature,
                            max_new_tokens=args.max_new_tokens)
    with results.Writer(output, header) as writer:
        if args.mode == "negative control":
            assembled = load(pair, args)
            assembled.engine.widths = UNPROVEN
            outcome = compare_all(assembled, pair, args, writer, stop_at_difference=True)
        else:
            outcome = verify(pair, args, writer)
        verdict, code = judge(outcome, args)
        print_table(outcome)
        print(f"verdict: {verdict}")
        write_json(args, outcome.as_dict() | {"verdict": verdict, "exit_code": code})
    return code


if __name__ == "__main__":
    cli.run(main)
