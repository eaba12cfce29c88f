"""The calibration card: what a step costs here, how much of the memory's speed it uses, and what speculation can bring.

Decoding reads all weights once per pass, so a pass cannot be faster than its bytes / the machine's read bandwidth. From
the measured step times follows, for each acceptance rate, the best number of draft tokens K, or that none pays:
a round of K draft tokens, each accepted with chance a, emits (1 - a^(K+1)) / (1 - a) tokens and costs K draft steps and
one target pass of K + 1 rows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

import results
from assemble import DTYPE_NAMES, load_decoder, usable_widths
from models import Checkpoint, Pair
from shapes import Widths, measure_seconds
from summary import columns
from transformer import Decoder
from variants import Clock

WIDTHS = (1, 2, 4, 6, 8, 12, 16, 24)
ACCEPTANCES = tuple(round(0.5 + 0.05 * i, 2) for i in range(10))
MAX_TOKENS = 15  # draft tokens considered
BUFFER_BYTES, CHUNK = 1 << 30, 1 << 18  # a buffer beyond any cache; elements of a chunk
CONTEXTS, KV_TOKENS = (128, 2000), 2048
ROUND_TOKENS = 5  # draft tokens of the round whose cost is compared over context lengths
STOCK_TOKENS = 9
DEFINITIONS = {
    "read_gbps": "best of several ways to read 1 GiB with all threads, 10^9 bytes per second",
    "seconds": "fastest of a few passes at 64 tokens of context, made monotonic in the width",
    "bytes": "of the weights that a pass reads", "share_of_machine": "bytes / seconds / read_gbps",
    "ms_per_token": "plain decoding: a target pass of one row at this length of context",
    "round_ms": f"{ROUND_TOKENS} draft steps and a target pass of {ROUND_TOKENS + 1} rows at this length of context",
}


# ---- the machine ----


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def best_seconds(action: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    """Seconds of the fastest of several runs: what the machine can do, not what it did on average."""
    taken = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        action()
        synchronize(device)
        taken.append(time.perf_counter() - start)
    return min(taken)


def read_gbps(device: torch.device, size: int = BUFFER_BYTES) -> float:
    """Read bandwidth of the machine: sums and a matrix-vector product, by PyTorch's threads and by our own."""
    buffer = torch.ones(size // 4, device=device)  # 1-D fp32
    vector = torch.ones(4096, device=device)
    actions: list[Callable[[], object]] = [buffer.sum, buffer.amax, lambda: torch.mv(buffer.view(-1, 4096), vector)]
    if device.type == "cpu":
        actions.append(lambda: chunked_read(buffer))
    return max(size / best_seconds(action, device) for action in actions) / 1e9


def chunked_read(buffer: Tensor) -> None:
    """One thread per part of the buffer, each summing chunk after chunk."""
    numbers, threads = buffer.numpy().view("int64"), torch.get_num_threads()
    share = -(-len(numbers) // threads)

    def read(part: int) -> None:
        for start in range(part * share, min((part + 1) * share, len(numbers)), CHUNK):
            numbers[start:start + CHUNK].sum()  # releases the interpreter's lock

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))


# ---- steps ----


def step_rows(name: str, decoder: Decoder, seconds: dict[int, float], gbps: float) -> Iterator[dict[str, Any]]:
    for width, spent in seconds.items():
        used = decoder.read_bytes / spent / 1e9
        yield {"type": "step", "model": name, "weights": decoder.weights, "backend": decoder.backend, "width": width,
               "seconds": spent, "bytes": decoder.read_bytes, "bandwidth_gbps": used, "share_of_machine": used / gbps}


def stock_step(name: str, checkpoint: Checkpoint, args: argparse.Namespace, size: int, gbps: float) -> dict[str, Any]:
    """A decoding step of transformers' own model at its defaults. size: bytes of the same weights in ours."""
    model: Any = checkpoint.hf_model(args.dtype).to(args.device)
    ids, clock = torch.arange(64, device=args.device)[None] % 50 + 5, Clock()
    model.generation_config.eos_token_id = None
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=STOCK_TOKENS, do_sample=False, pad_token_id=0,
                   streamer=clock)
    seconds = (time.perf_counter() - clock.start - clock.first_seconds) / (STOCK_TOKENS - 1)
    used = size / seconds / 1e9
    return {"type": "step", "model": name, "weights": DTYPE_NAMES[args.dtype], "backend": "transformers", "width": 1,
            "seconds": seconds, "bytes": size, "bandwidth_gbps": used, "share_of_machine": used / gbps}


def pass_seconds(decoder: Decoder, width: int, context: int, repeats: int = 7) -> float:
    """Median seconds of a pass over a cache of `context` slots. Their contents do not matter to the time."""
    decoder.reserve(context + width)
    ids, taken = torch.arange(width) % 50 + 5, []
    for _ in range(repeats):
        decoder.cache.length = context
        start = time.perf_counter()
        decoder.forward(ids)
        synchronize(decoder.device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def context_row(target: Decoder, draft: Decoder, length: int) -> dict[str, Any]:
    """What a token and a round cost after this many tokens."""
    plain = pass_seconds(target, 1, length)
    one_round = ROUND_TOKENS * pass_seconds(draft, 1, length) + pass_seconds(target, ROUND_TOKENS + 1, length)
    return {"type": "context", "length": length, "ms_per_token": 1e3 * plain, "round_ms": 1e3 * one_round}


def memory_row(target: Decoder, draft: Decoder) -> dict[str, Any]:
    """Bytes in tensors with room for 2,048 tokens."""
    for decoder in (target, draft):
        decoder.reserve(KV_TOKENS)
    parts = {"target weights": target.weight_bytes, "draft weights": draft.weight_bytes,
             "target KV cache": target.cache.nbytes, "draft KV cache": draft.cache.nbytes}
    return {"type": "memory", "parts": parts, "total_gib": sum(parts.values()) / 2**30}


# ---- the prediction ----


def expected_tokens(acceptance: float, k: int) -> float:
    """Tokens of a round: the accepted ones and one of the target's own (Leviathan et al. 2023, equation 1)."""
    return sum(acceptance**i for i in range(k + 1))


def predict(acceptance: float, draft_seconds: float, widths: Widths) -> dict[str, Any]:
    """The best K at this acceptance, and what it brings over plain decoding."""
    largest = MAX_TOKENS if widths.any_width else min(MAX_TOKENS, widths.largest - 1)
    rates = [expected_tokens(acceptance, k) / (k * draft_seconds + widths.cost(k + 1)) for k in range(largest + 1)]
    k = max(range(len(rates)), key=lambda i: (rates[i], -i))
    return {"type": "prediction", "acceptance": acceptance, "k": k, "width": widths.fit(k + 1),
            "tokens_per_second": rates[k], "speedup": rates[k] / rates[0],
            "advice": f"K = {k}" if k else "do not speculate"}


# ---- all of it ----


def card_rows(args: argparse.Namespace, pair: Pair) -> Iterator[dict[str, Any]]:
    """The rows of the card as they are measured."""
    assert pair.draft is not None
    gbps = read_gbps(args.device)
    yield {"type": "bandwidth", "read_gbps": gbps}
    own = DTYPE_NAMES[args.dtype]
    target, draft = load_decoder(pair.target, own, args.device), load_decoder(pair.draft, "int4", args.device)
    yield memory_row(target, draft)
    target_seconds, draft_seconds = measure_seconds(target, WIDTHS), measure_seconds(draft, WIDTHS)
    yield from step_rows("target", target, target_seconds, gbps)
    yield from step_rows("draft", draft, draft_seconds, gbps)
    measured, usable = Widths(target_seconds), usable_widths(target, pair.target.digest)
    widths = measured if usable.any_width else Widths({w: measured.cost(w) for w in usable.seconds}, any_width=False)
    yield from (predict(acceptance, draft_seconds[1], widths) for acceptance in ACCEPTANCES)
    yield from (context_row(target, draft, length) for length in CONTEXTS)
    sizes = {"target": target.read_bytes}
    del target, draft
    for weights in ("int8", own):
        draft = load_decoder(pair.draft, weights, args.device)
        yield from step_rows("draft", draft, measure_seconds(draft, WIDTHS), gbps)
        sizes["draft"] = draft.read_bytes
        del draft
    for name, checkpoint in (("target", pair.target), ("draft", pair.draft)):
        yield stock_step(name, checkpoint, args, sizes[name], gbps)


def report(rows: Sequence[dict[str, Any]]) -> str:
    """The card as text."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(row["type"], []).append(row)
    steps = [["model", "weights", "backend", "rows", "ms", "GB/s", "of the machine"]]
    steps += [[row["model"], row["weights"], row["backend"], str(row["width"]), f"{1e3 * row['seconds']:.1f}",
               f"{row['bandwidth_gbps']:.1f}", f"{row['share_of_machine']:.0%}"] for row in kinds["step"]]
    predictions = [["acceptance", "advice", "rows", "tokens/s", "over plain"]]
    predictions += [[f"{row['acceptance']:.2f}", row["advice"], str(row["width"]), f"{row['tokens_per_second']:.1f}",
                     f"{row['speedup']:.2f}"] for row in kinds["prediction"]]
    memory, contexts = kinds["memory"][0], kinds["context"]
    parts = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in memory["parts"].items())
    lengths = ", ".join(f"{row['ms_per_token']:.1f} ms a token and {row['round_ms']:.1f} ms a round at {row['length']}"
                        for row in contexts)
    growth = {key: contexts[-1][key] / contexts[0][key] for key in ("ms_per_token", "round_ms")}
    return "\n\n".join((
        f"read bandwidth of the machine: {kinds['bandwidth'][0]['read_gbps']:.1f} GB/s",
        columns(steps), columns(predictions),
        f"in tensors, KV for {KV_TOKENS} tokens: {memory['total_gib']:.2f} GiB ({parts})",
        f"context: {lengths} tokens ({growth['ms_per_token']:.2f}x, {growth['round_ms']:.2f}x)"))


def run(args: argparse.Namespace, pair: Pair) -> int:
    """Measure the card, write it to --output and print it."""
    if pair.draft is None:
        raise ValueError("the card needs a draft model; give --draft, or use --pair")
    rows = []
    with results.Writer(args.output, results.header(args, pair, definitions=DEFINITIONS)) as writer:
        for row in card_rows(args, pair):
            writer.write(row)
            rows.append(row)
    print(report(rows))
    return 0
