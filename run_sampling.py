"""Sample from the pair under both couplings, and test that sampling keeps the target's distribution.

    python run_sampling.py               acceptance and speed of both couplings beside plain sampling, on a few prompts
    python run_sampling.py --check       the loop on small tables against exact probabilities: chi-square tests, a control
    python run_sampling.py --two-sample  on the pair: is the second token of a prompt distributed as in plain sampling?

Exit code 1: a coupled output that is not plain sampling's, a distribution that is off, or a control that went unnoticed.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import cli
import results
from assemble import (
    Assembled,
    add_engine_arguments,
    add_generation_arguments,
    add_sampling_arguments,
    assemble,
    generation_config,
    sampling_from,
)
from distribution import CELLS, CONTROL, LENGTH, Cell, Finding, Fit, Tally, count, holm, judge, together, two_sample
from metrics import Statistics
from models import Pair
from sampling import SamplingParams
from spec_decode import GenerationConfig

COUPLINGS = ("gumbel", "rejection")
DEFINITIONS = """acceptance: accepted / drafted tokens; tokens/round: emitted / target passes, without prefill (plain: 1);
tokens/s: emitted / seconds of the whole generation, prefill included"""
ALPHA = 1e-3  # a distribution is off when its p, corrected for the number of tests, is not above
ALPHA_CONTROL = 1e-6  # the control has to be below
CONTROL_DRAWS = 2500
CHECK_DRAWS = 50_000  # of LENGTH tokens: half for each coupling, shared by its cells; more take over two minutes
CHUNK = 1000  # draws of a cell that one process makes at a time
PAIR_DRAWS = 200
PAIR_DRAFT_TOKENS = 3  # K in --two-sample, unless given: adapted K might not draft at once
SECOND_TOKEN_LIMIT = 16  # of new tokens: far enough off for the first round to draft as in mid-text
PAIR_PROMPT = "Once upon a time there was a"  # two tokens on, much is possible
OUTPUTS = {"compare": "sampling.jsonl", "check": "sampling-check.jsonl", "two-sample": "sampling-two-sample.jsonl"}


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", dest="mode", action="store_const", const="check", default="compare",
                      help="test the loop on scripted tables, with settings of its own; loads no models")
    mode.add_argument("--two-sample", dest="mode", action="store_const", const="two-sample",
                      help="test the pair itself against plain sampling")
    parser.add_argument("--draws", type=cli.positive_int, metavar="N",
                        help=f"generations per cell of --check (default: {CHECK_DRAWS} in all, half for each coupling) "
                        f"or per variant of --two-sample (default: {PAIR_DRAWS})")
    parser.add_argument("--prompt", metavar="TEXT", help="this prompt in place of a file's")
    parser.add_argument("--limit", type=cli.positive_int, default=4, metavar="N", help="prompts (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="results file (default: by mode, in results/)")
    cli.add_prompts_argument(parser)
    cli.add_model_arguments(parser)
    cli.add_runtime_arguments(parser)
    add_engine_arguments(parser)
    add_generation_arguments(parser, max_new_tokens=96)
    add_sampling_arguments(parser, temperature=0.8)
    parser.set_defaults(coupling=None)  # both
    args = parser.parse_args(arguments)
    args.variants = COUPLINGS if args.coupling is None else (args.coupling,)
    args.coupling = args.coupling or COUPLINGS[0]
    return args


def number(value: float | None, digits: int = 2) -> str:
    return "n/a" if value is None else f"{value:.{digits}f}"


# ---- both couplings beside plain sampling ----


@dataclass
class Total:
    """Sums over prompts, from which the overall figures follow as those of one generation do."""

    parts: list[Statistics] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)

    def line(self, name: str) -> str:
        whole = Statistics([r for part in self.parts for r in part.rounds])
        return report_line(name, whole, f"{sum(self.same)}/{len(self.same)}" if self.same else "")


def report_line(name: str, statistics: Statistics, same: str) -> str:
    return (f"  {name:10}{number(statistics.acceptance_rate, 3):>11}{number(statistics.tokens_per_round):>13}"
            f"{number(statistics.tokens_per_second):>10}{statistics.emitted:>8}  {same}").rstrip()


def load(args: argparse.Namespace, pair: Pair) -> Assembled:
    assembled = assemble(pair, args)
    for note in assembled.notes:
        print(f"note: {note}", file=sys.stderr)
    return assembled


def prompts_of(args: argparse.Namespace) -> list[cli.Prompt]:
    if args.prompt is not None:
        return [cli.Prompt("given", "given", args.prompt)]
    return cli.load_prompts(args.prompts)[:args.limit]


def variant_config(args: argparse.Namespace, pair: Pair, sampling: SamplingParams, name: str, **settings: Any,
                   ) -> GenerationConfig:
    """The configuration of a coupling, or of plain sampling."""
    if name == "plain":
        settings["num_speculative_tokens"] = 0
    coupled = replace(sampling, coupling="rejection" if name == "rejection" else "gumbel")
    return generation_config(args, pair, sampling=coupled, **settings)


def compare(args: argparse.Namespace) -> int:
    """Every prompt by plain sampling and both couplings with one seed, in turns; a row each."""
    sampling, prompts = sampling_from(args), prompts_of(args)
    pair = cli.pair_from(args)
    totals = {name: Total() for name in ("plain", *args.variants)}
    header = results.header(args, pair, max_new_tokens=args.max_new_tokens, drafter=args.drafter,
                            num_speculative_tokens=args.num_speculative_tokens, temperature=args.temperature)
    with (results.Writer(args.output or results.FOLDER / OUTPUTS[args.mode], header) as writer,
          tqdm(total=len(prompts) * len(totals), desc="generations", leave=False) as bar):
        engine = load(args, pair).engine
        bar.write(f"  {'':10}{'acceptance':>11}{'tokens/round':>13}{'tokens/s':>10}{'tokens':>8}  same as plain sampling")
        for prompt in prompts:
            ids = pair.encode(prompt.prompt, args.raw)
            bar.write(f"{prompt.id} ({prompt.category})")
            for name, total in totals.items():
                generation = engine.generate(ids, variant_config(args, pair, sampling, name))
                tokens, done = generation.run(), generation.statistics
                same = tokens == totals["plain"].parts[-1].tokens if name == "gumbel" else None
                total.parts.append(done)
                total.same += [] if same is None else [same]
                writer.write({"type": "run", "variant": name, "prompt_id": prompt.id, "category": prompt.category,
                              "seed": args.seed, "prompt_tokens": len(ids), **done.as_dict(), "same_as_plain": same})
                bar.write(report_line(name, done, "" if same is None else "yes" if same else "NO"))
                bar.update()
    print("\n".join(["all prompts", *(total.line(name) for name, total in totals.items()), DEFINITIONS]))
    return int(not all(same for total in totals.values() for same in total.same))


# ---- scripted tables against exact probabilities ----


def default_draws(cells: Sequence[Cell]) -> list[int]:
    """Half of CHECK_DRAWS for each coupling, rounded up to the same number for all of its cells."""
    sizes = Counter(cell.sampling.coupling for cell in cells)
    return [math.ceil(CHECK_DRAWS / len(sizes) / sizes[cell.sampling.coupling]) for cell in cells]


def tally_all(cells: Sequence[Cell], draws: Sequence[int], processes: int) -> list[Tally]:
    """The cells' outcomes in chunks, by several processes; what they add up to does not depend on how."""
    chunks = [(index, range(start, min(start + CHUNK, wanted))) for index, wanted in enumerate(draws)
              for start in range(0, wanted, CHUNK)]
    tallies = [Tally() for _ in cells]
    with tqdm(total=sum(draws), desc="generations", unit="", mininterval=1, leave=False) as bar:
        if processes == 1:
            for index, generations in chunks:
                tallies[index] += count(cells[index], generations)
                bar.update(len(generations))
            return tallies
        with ProcessPoolExecutor(processes, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
            futures: dict[Future[Tally], tuple[int, range]] = {
                pool.submit(count, cells[index], generations): (index, generations) for index, generations in chunks}
            try:
                for future in as_completed(futures):
                    index, generations = futures[future]
                    tallies[index] += future.result()
                    bar.update(len(generations))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    return tallies


def check_row(finding: Finding, tally: Tally, adjusted: float | None) -> dict[str, Any]:
    """adjusted: p after Holm's correction over all tests; None for the control."""
    cell, fit = finding.cell, finding.fit
    return {
        "type": "control" if adjusted is None else "cell", "name": cell.name, "coupling": cell.sampling.coupling,
        "drafter": cell.drafter, "num_speculative_tokens": cell.num_speculative_tokens,
        "temperature": cell.sampling.temperature, "top_k": cell.sampling.top_k, "top_p": cell.sampling.top_p,
        "min_p": cell.sampling.min_p, "repetition_penalty": cell.sampling.repetition_penalty, "vocab_size": cell.vocab_size,
        "tokens": finding.tokens, "draws": finding.draws, "statistic": fit.statistic, "degrees": fit.degrees, "p": fit.p,
        "p_adjusted": adjusted, "drafted": tally.drafted, "accepted": tally.accepted,
        "target_passes": tally.rounds - finding.draws, "suggestions": tally.suggestions,
    }


def check_line(coupling: str, name: str, temperature: str, tokens: str, draws: int, accepted: float | None, fit: Fit,
               adjusted: float | None) -> str:
    return (f"{coupling:10}{name:47}{temperature:>4}{tokens:>7}{draws:>7}{number(accepted):>7}{fit.statistic:>9.1f}"
            f"{fit.degrees:>6}{fit.p:>9.2g}{'' if adjusted is None else format(adjusted, '.2g'):>9}").rstrip()


def finding_line(finding: Finding, tally: Tally, adjusted: float | None) -> str:
    cell = finding.cell
    return check_line(cell.sampling.coupling, cell.name, str(cell.sampling.temperature), finding.tokens, finding.draws,
                      tally.accepted / tally.drafted if tally.drafted else None, finding.fit, adjusted)


def check(args: argparse.Namespace) -> int:
    """All cells, each coupling's cells together, and the control; 0 if nothing is off and the control is rejected."""
    cells, start = [*CELLS, CONTROL], time.perf_counter()
    control_draws = args.draws or CONTROL_DRAWS
    draws = [*([args.draws] * len(CELLS) if args.draws else default_draws(CELLS)), control_draws]
    processes = args.threads or os.cpu_count() or 1
    header = results.header(args, None, cells=len(CELLS), draws=sum(draws[:-1]), alpha=ALPHA, alpha_control=ALPHA_CONTROL,
                            processes=processes)
    with results.Writer(args.output or results.FOLDER / OUTPUTS[args.mode], header) as writer:
        tallies = dict(zip(cells, tally_all(cells, draws, processes), strict=True))
        *findings, control = (finding for cell in cells for finding in judge(cell, tallies[cell]))
        by_coupling = {name: [finding for finding in findings if finding.cell.sampling.coupling == name]
                       for name in COUPLINGS if any(cell.sampling.coupling == name for cell in CELLS)}
        pooled = {name: together(group) for name, group in by_coupling.items()}
        adjusted = holm([finding.fit.p for finding in findings] + [fit.p for fit in pooled.values()])
        print(f"{'coupling':10}{'cell':47}{'T':>4}{'tokens':>7}{'draws':>7}{'accept':>7}{'chi2':>9}{'dof':>6}{'p':>9}"
              f"{'Holm':>9}")
        for finding, p in [*zip(findings, adjusted, strict=False), (control, None)]:
            print(finding_line(finding, tallies[finding.cell], p))
            writer.write(check_row(finding, tallies[finding.cell], p))
        for (name, fit), p in zip(pooled.items(), adjusted[len(findings):], strict=True):
            members = list({finding.cell: finding.draws for finding in by_coupling[name]}.values())
            print(check_line(name, "all its cells together", "", "", sum(members), None, fit, p))
            writer.write({"type": "coupling", "coupling": name, "cells": len(members), "draws": sum(members),
                          "statistic": fit.statistic, "degrees": fit.degrees, "p": fit.p, "p_adjusted": p})
        seconds = time.perf_counter() - start
        off, noticed = [p for p in adjusted if not p > ALPHA], control.fit.p < ALPHA_CONTROL
        writer.write({"type": "verdict", "tests": len(adjusted), "off": len(off), "control_rejected": noticed,
                      "seconds": seconds})
    print(f"{len(CELLS)} cells, {sum(draws[:-1])} x {LENGTH} tokens in {seconds:.0f} s, {len(adjusted)} tests: {len(off)} "
          f"with a corrected p of {ALPHA:g} or less")
    verdict = "rejected" if noticed else "NOT rejected"
    print(f"the control is {verdict}: p = {control.fit.p:.2g}, wanted below {ALPHA_CONTROL:g}")
    return int(bool(off) or not noticed)


# ---- the pair itself against plain sampling ----


def second_tokens(assembled: Assembled, prompt: list[int], config: GenerationConfig,
                  seeds: range) -> tuple[Counter[int], Statistics]:
    """How often each token comes second; it is the first that speculation has a part in."""
    found: Counter[int] = Counter()
    whole = Statistics()
    for seed in tqdm(seeds, desc="generations", leave=False):
        generation = assembled.engine.generate(prompt, replace(config, sampling=replace(config.sampling, seed=seed)))
        rounds = [next(generation), next(generation)]
        generation.close()
        whole.rounds += rounds
        found[rounds[1].tokens[0]] += 1
    return found, whole


def compare_histograms(args: argparse.Namespace) -> int:
    """Plain sampling against each coupling, with seeds of their own; 0 if the second token is distributed alike."""
    draws, sampling = args.draws or PAIR_DRAWS, sampling_from(args)
    if args.num_speculative_tokens is None:
        args.num_speculative_tokens = PAIR_DRAFT_TOKENS
    pair = cli.pair_from(args)
    prompt = pair.encode(PAIR_PROMPT if args.prompt is None else args.prompt, args.raw or args.prompt is None)
    header = results.header(args, pair, draws=draws, prompt_tokens=len(prompt), temperature=args.temperature,
                            drafter=args.drafter, num_speculative_tokens=args.num_speculative_tokens)
    with results.Writer(args.output or results.FOLDER / OUTPUTS[args.mode], header) as writer:
        assembled = load(args, pair)
        samples = {}
        for index, name in enumerate(("plain", *args.variants)):
            config = variant_config(args, pair, sampling, name, max_new_tokens=SECOND_TOKEN_LIMIT, end_token_ids=())
            first_seed = sampling.seed + index * draws
            samples[name] = second_tokens(assembled, prompt, config, range(first_seed, first_seed + draws))
            if name != "plain" and not samples[name][1].drafted:
                raise ValueError("nothing was drafted, so there is nothing to test; use a drafter and a K of 1 or more")
        fits = {name: two_sample(samples["plain"][0], samples[name][0]) for name in args.variants}
        adjusted = dict(zip(fits, holm([fit.p for fit in fits.values()]), strict=True))
        for name, (found, whole) in samples.items():
            row = {"type": "two-sample", "variant": name, "draws": draws, "outcomes": len(found), "drafted": whole.drafted,
                   "accepted": whole.accepted, "top": found.most_common(8)}
            if name in fits:
                row |= {"statistic": fits[name].statistic, "degrees": fits[name].degrees, "p": fits[name].p,
                        "p_adjusted": adjusted[name]}
            writer.write(row)
            print(histogram_line(pair, name, found, whole, fits.get(name), draws))
    alike = all(p > ALPHA for p in adjusted.values())
    print(f"second token of {draws} generations each: {'alike' if alike else 'NOT ALIKE'} (wanted: a corrected p above "
          f"{ALPHA:g})")
    return int(not alike)


def histogram_line(pair: Pair, name: str, found: Counter[int], whole: Statistics, fit: Fit | None, draws: int) -> str:
    """One variant: its most frequent tokens, and how well it agrees with plain sampling."""
    top = ", ".join(f"{pair.tokenizer.decode([token])!r} {times / draws:.2f}" for token, times in found.most_common(4))
    against = f"chi2 {fit.statistic:.1f}, dof {fit.degrees}, p {fit.p:.2g}" if fit else ""
    return f"{name:10}acceptance {number(whole.acceptance_rate)}  {against:30}  {len(found)} outcomes: {top}, ..."


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    return {"compare": compare, "check": check, "two-sample": compare_histograms}[args.mode](args)


if __name__ == "__main__":
    cli.run(main)
