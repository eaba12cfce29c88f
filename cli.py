"""What all scripts share: flags defined once, prompt files, and errors as one line instead of a traceback.

A script is `parse_args()` + `main()` + `cli.run(main)`. With `python -X dev` errors keep their traceback.
"""

import argparse
import errno
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from models import PAIRS, Pair, load_pair

DEFAULT_PROMPTS = Path(__file__).parent / "prompts" / "default.jsonl"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
DTYPE_ALIASES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}


@dataclass(frozen=True)
class Prompt:
    """One line of a prompt file."""

    id: str
    category: str
    prompt: str


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """--pair, --target, --draft, --raw."""
    group = parser.add_argument_group("models")
    group.add_argument(
        "--pair",
        choices=PAIRS,
        default="auto",
        help="auto: Qwen2.5-1.5B + 0.5B from the Hugging Face cache or hub if there, else the packaged pair "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--target", metavar="MODEL", help="hub id, folder, .gguf file or packaged:NAME, in place of --pair"
    )
    group.add_argument("--draft", metavar="MODEL", help="the same for the draft model; it must share the tokenizer")
    group.add_argument("--raw", action="store_true", help="use prompts as they are, without the chat template")


def add_runtime_arguments(parser: argparse.ArgumentParser) -> None:
    """--device, --dtype, --threads."""
    group = parser.add_argument_group("machine")
    group.add_argument("--device", type=device, default="auto", metavar="DEVICE",
                       help="cpu, cuda, cuda:N, mps, or auto: cuda if there is one, else cpu (default: auto)")  # fmt: skip
    group.add_argument("--dtype", type=dtype, default="bf16", metavar="DTYPE",
                       help="bf16, fp32 or fp16 (default: bf16)")  # fmt: skip
    group.add_argument("--threads", type=thread_count, metavar="N", help="CPU threads (default: PyTorch's choice)")


def add_prompts_argument(parser: argparse.ArgumentParser) -> None:
    """--prompts; the scripts read it with `load_prompts`."""
    parser.add_argument("--prompts", type=Path, default=DEFAULT_PROMPTS, metavar="FILE",
                        help="JSONL file, an object with id, category and prompt per line (default: prompts/default.jsonl)",
                        )  # fmt: skip


def device(text: str) -> torch.device:
    """Parse --device; an absent device is a usage error, not a crash after the models were loaded."""
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not one of cpu, cuda, cuda:N, mps, auto")
    chosen = torch.device(text)
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise argparse.ArgumentTypeError("no MPS device here (it takes a Mac with Apple silicon); use cpu")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(
            f"{text} is not among the {torch.cuda.device_count()} CUDA devices here; use cpu or auto"
        )
    return chosen


def dtype(text: str) -> torch.dtype:
    """Parse --dtype, in our short names or PyTorch's."""
    name = DTYPE_ALIASES.get(text, text)
    if name not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def positive_int(text: str) -> int:
    """Parse an integer of at least 1."""
    if (value := non_negative_int(text)) == 0:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def thread_count(text: str) -> int:
    """Parse --threads; numbers far beyond the machine's end in a crash of PyTorch's."""
    value, most = positive_int(text), max(64, os.cpu_count() or 1)
    if value > most:
        raise argparse.ArgumentTypeError(f"{value} threads are not possible; choose 1 to {most}")
    return value


def non_negative_int(text: str) -> int:
    """Parse an integer of at least 0."""
    if not re.fullmatch(r"\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def pair_from(args: argparse.Namespace) -> Pair:
    """Apply --threads, load the pair that the flags ask for, and say on stderr which one it is."""
    if getattr(args, "threads", None):
        torch.set_num_threads(args.threads)
    pair = load_pair(args.pair, args.target, args.draft)
    print(f"models: {pair.description}", file=sys.stderr)
    for warning in pair.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return pair


def load_prompts(path: str | Path) -> list[Prompt]:
    """Read a prompt file; every error names the file and the line."""
    try:
        lines = Path(path).read_text("utf-8-sig").split("\n")
    except OSError as error:
        raise ValueError(f"cannot read prompts from {path} ({error.strerror}); check --prompts") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text; save it as UTF-8") from error
    prompts: dict[str, Prompt] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            prompt = parse_prompt(line, f"{path}, line {number}")
            if prompt.id in prompts:
                raise ValueError(f"{path}, line {number}: id {prompt.id!r} is used twice; give each prompt its own")
            prompts[prompt.id] = prompt
    if not prompts:
        raise ValueError(f"{path} has no prompts; add lines with id, category and prompt")
    return list(prompts.values())


def parse_prompt(line: str, where: str) -> Prompt:
    """One JSON object with the three fields as text that is not empty (a number will do as id)."""
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error}); expected an object with id, category and prompt") from error
    fields = entry if isinstance(entry, dict) else {}
    if isinstance(fields.get("id"), int):
        fields["id"] = str(fields["id"])
    for key in ("id", "category", "prompt"):
        if not isinstance(fields.get(key), str) or not fields[key]:
            raise ValueError(
                f"{where}: {key!r} must be a text that is not empty, in an object with id, category, prompt"
            )
    return Prompt(fields["id"], fields["category"], fields["prompt"])


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run a script's main and exit: 0 or its result; 1 after one line for a user's mistake; 130 after Ctrl-C."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # half an emoji in, or a narrow console: no Unicode traceback
    try:
        code = main() or 0
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail again
        code = fail("the reader of the output went away")
    except (ValueError, OSError, MemoryError, torch.OutOfMemoryError) as error:
        if sys.flags.dev_mode:
            raise
        code = fail(one_line(error))
    except KeyboardInterrupt:
        code = fail("interrupted", 130)
    sys.exit(code)


def fail(message: str, code: int = 1) -> int:
    """Print the one line and give the exit code."""
    print(f"error: {message}", file=sys.stderr)
    return code


def one_line(error: Exception) -> str:
    """An error as one line, with a remedy where the library's own text has none."""
    if isinstance(error, torch.OutOfMemoryError):
        return "the GPU's memory is full; use a smaller pair, a shorter --max-new-tokens, or --device cpu"
    if isinstance(error, OSError) and error.strerror:
        remedy = "; free some space" if error.errno == errno.ENOSPC else ""
        return f"{error.filename}: {error.strerror}{remedy}" if error.filename else error.strerror + remedy
    return " ".join(str(error).split()) or type(error).__name__
