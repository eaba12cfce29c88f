"""Reference outputs of the target alone: ids, text, speed and a digest of the logits of every token, per prompt.

    python run_baseline.py                    the prompts of this repository -> results/baseline.jsonl
    python run_baseline.py --limit 4 --max-new-tokens 32

Greedy decoding, K = 0, no draft model. Rows are written as they finish. A short generation that is not counted comes
first, so that no prompt pays for the first touch of the weights.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

import cli
import results
from assemble import add_engine_arguments, assemble
from models import Pair
from spec_decode import GenerationConfig, SpeculativeDecoder
from text import decode

WARM_UP_TOKENS = 4


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    cli.add_prompts_argument(parser)
    parser.add_argument("--limit", type=cli.positive_int, metavar="N", help="only the first N prompts (default: all)")
    parser.add_argument("--max-new-tokens", type=cli.non_negative_int, default=96, metavar="N",
                        help="tokens per prompt (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=results.FOLDER / "baseline.jsonl", metavar="FILE",
                        help="JSONL file; an older one is moved aside (default: results/baseline.jsonl)")
    cli.add_model_arguments(parser)
    cli.add_runtime_arguments(parser)
    add_engine_arguments(parser, drafting=False)
    return parser.parse_args()


def run_prompt(engine: SpeculativeDecoder, pair: Pair, prompt: cli.Prompt, args: argparse.Namespace) -> dict[str, Any]:
    """Decode one prompt; its row."""
    config = GenerationConfig(args.max_new_tokens, 0, end_token_ids=pair.target.end_token_ids, digests=True)
    prompt_ids = pair.encode(prompt.prompt, args.raw)
    try:
        generation = engine.generate(prompt_ids, config)
    except ValueError as error:
        raise ValueError(f"prompt {prompt.id}: {error}") from error
    ids, done = generation.run(), generation.statistics
    return {
        "type": "run", "variant": "plain", "prompt_id": prompt.id, "category": prompt.category, "prompt": prompt.prompt,
        "prompt_tokens": len(prompt_ids), "ids": ids, "text": decode(pair.tokenizer, ids), "new_tokens": len(ids),
        "seconds": done.seconds, "first_token_seconds": done.first_token_seconds,
        "tokens_per_second": done.tokens_per_second, "decode_tokens_per_second": done.decode_tokens_per_second,
        "digests": [digest for r in done.rounds for digest in r.digests], "finish_reason": done.finish_reason,
    }


def summary(rates: list[float], num_prompts: int, path: Path) -> str:
    """The last line."""
    mean = f"{statistics.mean(rates):.2f}" if rates else "n/a"
    deviation = f"{statistics.stdev(rates):.2f}" if len(rates) > 1 else "n/a"
    return f"{num_prompts} prompts, tokens/s with prefill: mean {mean}, standard deviation {deviation}; written to {path}"


def main() -> None:
    args = parse_args()
    prompts = cli.load_prompts(args.prompts)[:args.limit]
    pair = cli.pair_from(args)
    rates: list[float] = []
    header = results.header(args, pair, max_new_tokens=args.max_new_tokens, prompts=args.prompts.name)
    with results.Writer(args.output, header) as writer:
        assembled = assemble(pair, args)
        for note in assembled.notes:
            print(f"note: {note}", file=sys.stderr)
        assembled.engine.generate(pair.encode(prompts[0].prompt, args.raw), GenerationConfig(WARM_UP_TOKENS, 0)).run()
        for prompt in tqdm(prompts, desc="target alone", unit="prompt", file=sys.stderr):
            row = run_prompt(assembled.engine, pair, prompt, args)
            writer.write(row)
            rates += [row["tokens_per_second"]] if row["tokens_per_second"] is not None else []
    print(summary(rates, len(prompts), args.output))


if __name__ == "__main__":
    cli.run(main)
