"""Stream a speculative generation: text as it is accepted, coloured by where each token came from, then its figures.

    python run_spec.py                                  a built-in prompt
    python run_spec.py --prompt "Why is the sky blue?"  your own; or as standard input: python run_spec.py < question.txt
    python run_spec.py --stop END --json                one JSON object instead of the stream
    python run_spec.py --trace results/trace.jsonl      a row per round as well, for visualize.py --trace

The text goes to standard output, all else to standard error. Ctrl-C ends the output after the round in flight.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import stat
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TextIO

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
from metrics import Round, Statistics
from models import Pair
from spec_decode import Generation
from text import TextStream

DEFAULT_PROMPT = "Write a Python function that returns the first n prime numbers, and explain it in three sentences."
MAX_NEW_TOKENS = 128
RESET = "\x1b[0m"
COLOURS = {"accepted": "\x1b[32m", "corrected": "\x1b[31m", "bonus": "\x1b[36m", "plain": "", "prefill": ""}
LEGEND = {"accepted": "drafted and accepted", "corrected": "corrected by the target",
          "bonus": "the target's, after a draft that was right throughout", "plain": "without a draft"}
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # what could steer a terminal
GIB = 2**30


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prompt", metavar="TEXT", help="default: standard input if piped, else a built-in prompt")
    parser.add_argument("--stop", type=stop_string, action="append", default=[], metavar="TEXT",
                        help="end the output before this text; may be given several times")
    parser.add_argument("--json", action="store_true", help="print one JSON object (ids, text, statistics) and no stream")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="also write a JSONL file with a row per round")
    cli.add_model_arguments(parser)
    cli.add_runtime_arguments(parser)
    add_engine_arguments(parser)
    add_generation_arguments(parser, MAX_NEW_TOKENS)
    add_sampling_arguments(parser, temperature=0.0)
    args = parser.parse_args()
    if args.num_speculative_tokens == 0:
        args.drafter = "none"  # a draft model would be loaded for nothing
    return args


def stop_string(text: str) -> str:
    """Parse --stop."""
    if not text:
        raise argparse.ArgumentTypeError("must not be empty: every text begins with an empty text")
    return text


def read_prompt(given: str | None, stdin: TextIO | None) -> str:
    """--prompt, else what is piped in (UTF-8, broken bytes replaced), else the built-in prompt. Never empty."""
    prompt = DEFAULT_PROMPT
    if given is not None:
        prompt = re.sub("[\ud800-\udfff]", "\ufffd", given)  # arguments that were not UTF-8
    elif stdin is not None and not stat.S_ISCHR(os.fstat(stdin.fileno()).st_mode):  # a terminal and /dev/null are devices
        print("reading the prompt from standard input", file=sys.stderr)
        prompt = stdin.buffer.read().decode("utf-8-sig", "replace")
    if not prompt:
        raise ValueError("the prompt is empty; give --prompt a text, or pipe one in")
    return prompt


class TokenTexts:
    """The text of each token as a stream releases it. As `stop` of a generation it ends that at a stop string."""

    def __init__(self, stream: TextStream) -> None:
        self.stream = stream
        self._pieces: list[str] = []

    def __call__(self, new_tokens: Sequence[int]) -> int | None:
        """Take a round's tokens; how many of them to keep if a stop string is complete."""
        for count, token in enumerate(new_tokens, start=1):
            self._pieces.append(self.stream.push([token]))
            if self.stream.stopped:
                return count
        return None

    def take(self, last: bool) -> list[str]:
        """The texts of the tokens since the last call; the last round's last token gets what was held back."""
        pieces, self._pieces = self._pieces, []
        if last:
            pieces[-1] += self.stream.finish()
        return pieces


class Interrupt:
    """While entered, Ctrl-C is only noted, so that text, counts and trace still agree; a second one does not wait."""

    def __init__(self, statistics: Statistics) -> None:
        self.statistics, self.asked = statistics, False

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _ask(self, *_: object) -> None:
        if self.asked or not self.statistics.rounds:  # nothing to show yet: end at once
            raise KeyboardInterrupt
        self.asked = True


class Printer:
    """Prints the texts of tokens, coloured by origin on a terminal that can."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.terminal = stream, stream.isatty()
        self.coloured = self.terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        if self.coloured:
            stream.write("".join(self._paint(f"[{meaning}] ", origin) for origin, meaning in LEGEND.items()) + "\n")

    def _paint(self, text: str, origin: str) -> str:
        colour = COLOURS[origin] if self.coloured and text else ""
        return f"{colour}{text}{RESET}" if colour else text

    def write(self, pieces: Iterable[str], origins: Iterable[str]) -> None:
        """Print one round, at once."""
        for piece, origin in zip(pieces, origins, strict=True):
            self.stream.write(self._paint(CONTROL.sub("\ufffd", piece) if self.terminal else piece, origin))
        self.stream.flush()


class Trace:
    """Writes a row per round: what was drafted and emitted, how sure both models were, and how long it took."""

    def __init__(self, writer: results.Writer, pair: Pair) -> None:
        self.writer, self.tokenizer = writer, pair.tokenizer

    def name(self, token: int) -> str:
        """A token on its own, special tokens by name."""
        return str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def alternatives(self, pairs: Sequence[tuple[int, float]]) -> list[tuple[int, str, float]]:
        return [(token, self.name(token), probability) for token, probability in pairs]

    def round(self, index: int, this_round: Round, pieces: Sequence[str]) -> None:
        tokens = [{"id": token, "text": piece, "origin": origin, "target_prob": detail["target_prob"],
                   "target_top": self.alternatives(detail["target_top"]),
                   "draft_confidence": detail.get("draft_confidence"),
                   "draft_top": self.alternatives(detail.get("draft_top", []))}
                  for token, piece, origin, detail in zip(this_round.tokens, pieces, this_round.origins, this_round.details,
                                                          strict=True)]
        self.writer.write({
            "type": "round", "index": index, "tokens": tokens, "source": this_round.source,
            "drafted": [(token, self.name(token)) for token in this_round.draft_tokens],
            "num_accepted": this_round.num_accepted, "k": this_round.num_drafted, "stopped": this_round.stopped,
            "width": this_round.width, "siblings": this_round.num_siblings, "sibling_hit": this_round.sibling_hit,
            "suggested": this_round.suggested, "draft_ms": 1e3 * this_round.draft_seconds,
            "verify_ms": 1e3 * this_round.verify_seconds, "total_ms": 1e3 * this_round.seconds,
            "finish_reason": this_round.finish_reason,
        })

    def summary(self, statistics: Statistics, prompt: str, text: str) -> None:
        self.writer.write({"type": "summary", **statistics.as_dict(), "prompt": prompt, "text": text})


def follow(generation: Generation, texts: TokenTexts, printer: Printer | None, trace: Trace | None) -> bool:
    """Show and record the rounds as they come; whether Ctrl-C ended them."""
    with Interrupt(generation.statistics) as interrupt:
        for index, this_round in enumerate(generation):
            if interrupt.asked and not this_round.finish_reason:
                this_round.finish_reason = "interrupted"
                generation.close()
            pieces = texts.take(last=bool(this_round.finish_reason))
            if printer is not None:
                printer.write(pieces, this_round.origins)
            if trace is not None:
                trace.round(index, this_round, pieces)
    return generation.statistics.finish_reason == "interrupted"


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    return "n/a" if value is None else f"{value:.{digits}f}{unit}"


def report(statistics: Statistics, tensor_bytes: dict[str, int], notes: Iterable[str]) -> list[str]:
    """The figures of a generation, each with its definition, and the notes."""
    figures = statistics.as_dict()
    parts = ", ".join(f"{part} {size / GIB:.3f}" for part, size in tensor_bytes.items())
    split = ", ".join(f"{part} {figures[f'{part}_seconds']:.2f}" for part in ("draft", "verify", "rest"))
    rows = [
        ("tokens", str(statistics.emitted), f"emitted, counted by id; ended by: {statistics.finish_reason}"),
        ("tokens/s", number(statistics.tokens_per_second), "emitted / seconds of the whole generation, prefill included"),
        ("decode tokens/s", number(statistics.decode_tokens_per_second), "the same without prefill and the token of it"),
        ("acceptance rate", number(statistics.acceptance_rate, 3),
         f"accepted / drafted tokens ({statistics.accepted} / {statistics.drafted})"),
        ("tokens per round", number(statistics.tokens_per_round),
         "emitted / target passes, without prefill and the token of it (plain decoding: 1)"),
        ("first token", number(statistics.first_token_seconds, 2, " s"), "from the call: the target's prefill"),
        ("whole generation", number(statistics.seconds, 2, " s"), f"prefill and, in seconds: {split}"),
        ("memory", number(sum(tensor_bytes.values()) / GIB, 3, " GiB"), f"held in tensors: {parts}"),
    ]
    return [f"{name:17}{value:>10}  {meaning}" for name, value, meaning in rows] + [f"note: {note}" for note in notes]


def trace_file(args: argparse.Namespace, pair: Pair, prompt: str) -> AbstractContextManager[results.Writer | None]:
    """The file of --trace with its header, before the models are loaded, so that a wrong path shows at once."""
    if args.trace is None:
        return nullcontext()
    names = ("max_new_tokens", "num_speculative_tokens", "drafter", "draft_weights", "temperature", "coupling", "stop")
    settings = {name: getattr(args, name) for name in names}
    return results.Writer(args.trace, results.header(args, pair, prompt=prompt, **settings))


def as_json(args: argparse.Namespace, pair: Pair, assembled: Assembled, prompt: str, text: str, done: Statistics) -> str:
    """What --json prints; ASCII, so that no terminal's encoding can damage it."""
    models = {"description": pair.description, "target": assembled.target_name,
              "draft": pair.draft.name if assembled.draft and pair.draft and args.drafter != "self" else None}
    answer: dict[str, Any] = {"prompt": prompt, "text": text, "ids": done.tokens, "statistics": done.as_dict(),
                              "models": models, "notes": [*assembled.notes, *done.notes]}
    return json.dumps(answer)


def main() -> int:
    args = parse_args()
    sampling = sampling_from(args)
    prompt = read_prompt(args.prompt, sys.stdin)
    pair = cli.pair_from(args)
    prompt_ids = pair.encode(prompt, args.raw)
    texts = TokenTexts(TextStream(pair.tokenizer, args.stop))
    with trace_file(args, pair, prompt) as writer:
        assembled = assemble(pair, args)
        config = generation_config(args, pair, sampling=sampling, stop=texts, details=writer is not None)
        generation = assembled.engine.generate(prompt_ids, config)
        statistics = generation.statistics
        trace = Trace(writer, pair) if writer is not None else None
        try:
            interrupted = follow(generation, texts, None if args.json else Printer(sys.stdout), trace)
        finally:
            if not args.json:
                print(flush=True)  # whatever comes next on the terminal begins a line
        if trace is not None:
            trace.summary(statistics, prompt, texts.stream.text)
    if args.json:
        print(as_json(args, pair, assembled, prompt, texts.stream.text, statistics), flush=True)
    else:
        print("\n".join(report(statistics, assembled.tensor_bytes, [*assembled.notes, *statistics.notes])), file=sys.stderr)
    return cli.fail("interrupted", 130) if interrupted else 0


if __name__ == "__main__":
    cli.run(main)
