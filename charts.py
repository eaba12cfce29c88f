"""The charts: each takes the findings and gives a figure, or raises NoData naming the command that makes what it lacks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from chart_style import BLACK, BLUE, LINES, LOOKS, ORANGE, RED, Look, bars_across, beside, grouped_bars, legend_above, new
from findings import (
    ABLATIONS,
    BASELINES,
    FIXED_K,
    Estimate,
    Findings,
    NoData,
    Row,
    caption,
    in_order,
    make_with,
    mean,
    per_prompt,
    speed,
    variant_label,
)

SHORT = {"hf-greedy": "Hugging Face greedy", "hf-assisted": "Hugging Face assisted", "plain": "our plain decoding"}
SOURCES = ("benchmark", "benchmark-ablations", "card", "policies", "memory")  # files that charts are drawn from
PARTS: dict[str, tuple[str, Look]] = {  # of a round
    "draft": ("drafting", {"color": ORANGE, "hatch": "//"}), "verify": ("target pass (verify)", {"color": BLUE}),
    "rest": ("the rest", {"color": "#dddddd"}),
}
MEASURED: dict[str, Look] = {"k4": {"color": ORANGE, "marker": "^"}, "dynamic": {"color": BLUE, "marker": "o"}}


def family(found: Findings, variant: str) -> str:
    """'hf', 'plain' or 'ours'; '' where the variant was not run."""
    rows = found.runs.get(variant)
    return str(rows[0].get("family") or "ours") if rows else ""


def with_ratio(found: Findings, variant: str, baseline: str) -> str:
    """'12.3 (4.1x)'; without the baseline its ratio is n/a, never a made-up 1."""
    value, against = speed(found.runs.get(variant, [])), found.ratio(variant, baseline)
    if value is None:
        return "n/a"
    if variant == baseline:
        return f"{value.mean:.1f}  (baseline)"
    return f"{value.mean:.1f}  ({f'{against.mean:.2f}×' if against else 'n/a'})"


def speed_chart(found: Findings, title: str, variants: Sequence[str], baseline: str) -> Figure:
    """Tokens per second of some variants, with ratios against a baseline."""
    figure, axes = new(title, found.caption(found.benchmark), height=1.9 + 0.34 * len(variants))
    values = [speed(found.runs.get(name, [])) for name in variants]
    bars_across(axes, [found.label(name) for name in variants], values, [with_ratio(found, v, baseline) for v in variants],
                [LOOKS[family(found, name)] for name in variants])
    base = values[variants.index(baseline)]
    if base is not None:
        axes.axvline(base.mean, color=BLACK, linewidth=1.1, linestyle="--")
    for label, name in zip(axes.get_yticklabels(), variants, strict=True):
        label.set_fontweight("bold" if name == "dynamic" else "normal")
    axes.set_xlabel("tokens per second, prefill included (geometric mean, 95% interval)\n"
                    f"in brackets: against {SHORT[baseline]}, on the same prompts")
    return figure


def throughput(found: Findings) -> Figure:
    """The headline: everybody's speed, Hugging Face greedy as the baseline."""
    wanted = {*(name for name in found.runs if name not in ABLATIONS), *BASELINES, "dynamic"}
    return speed_chart(found, "Throughput by variant", in_order(wanted), "hf-greedy")


def ablations(found: Findings) -> Figure:
    """What each piece of ours is worth."""
    found = found.ablated
    present = [name for name in ABLATIONS if name in found.runs]
    if not present:
        raise NoData(f"no ablations were run; {make_with(found.benchmark)}")
    return speed_chart(found, "Ablations: pieces taken away or exchanged", ["plain", "dynamic", *present], "plain")


def speedup_by_category(found: Findings) -> Figure:
    """Dynamic K against the three baselines, by kind of prompt and overall."""
    if "dynamic" not in found.runs:
        raise NoData(f"the variant 'dynamic' was not run; {make_with('benchmark')}")
    categories = sorted({str(row["category"]) for row in found.runs["dynamic"]})
    figure, axes = new("Speed-up of dynamic K by category of prompt", found.caption("benchmark"), width=10.5)
    series = {f"against {SHORT[name]}": [found.ratio("dynamic", name, category=c) for c in (None, *categories)]
              for name in BASELINES}
    grouped_bars(axes, ["all", *categories], series)
    axes.axhline(1.0, color=BLACK, linewidth=1.1, linestyle="--")
    axes.set_ylabel("ratio of tokens per second\n(geometric mean, 95% interval)")
    legend_above(axes, 3)
    return figure


def acceptance_by_position(found: Findings) -> Figure:
    """How often a draft token is right, given that those before it were."""
    counts: dict[str, dict[int, list[int]]] = {}
    for variant, rows in found.runs.items():
        for row in rows:
            for position, (accepted, judged) in enumerate(row.get("acceptance_by_position") or [], start=1):
                sums = counts.setdefault(variant, {}).setdefault(position, [0, 0])
                sums[0], sums[1] = sums[0] + accepted, sums[1] + judged
    shown = [name for name in (*FIXED_K, "dynamic", *ABLATIONS[1:3]) if counts.get(name)][:len(LINES)]
    if not shown:
        raise NoData(f"no run has acceptance_by_position; {make_with('benchmark')}")
    figure, axes = new("Acceptance by draft position", found.caption("benchmark"))
    for name, look in zip(shown, LINES, strict=False):
        points = [(position, a / n) for position, (a, n) in sorted(counts[name].items()) if n >= 10]
        axes.plot(*zip(*points, strict=True) if points else ([], []), label=found.label(name), markersize=5, **look)
    axes.set(ylim=(0, 1.02), xlabel="position in the draft (positions judged fewer than 10 times are left out)",
             ylabel="share accepted, of those judged\n(all before it accepted)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="lower left", ncols=2)
    return figure


def round_time(found: Findings) -> Figure:
    """Milliseconds of an average round: drafting, the target's pass, the rest."""
    shown = [name for name, rows in found.runs.items() if family(found, name) != "hf" and sum_of(rows, "target_passes")]
    if not shown:
        raise NoData(f"no run has target_passes and its seconds; {make_with('benchmark')}")
    figure, axes = new("Where a round's time goes", found.caption("benchmark"), height=1.9 + 0.36 * len(shown))
    ends = [0.0] * len(shown)
    for part, (label, look) in PARTS.items():
        values = [1000 * sum_of(found.runs[v], f"{part}_seconds") / sum_of(found.runs[v], "target_passes") for v in shown]
        axes.barh(range(len(shown)), values, left=ends, height=0.72, edgecolor="black", linewidth=0.7, label=label, **look)
        ends = [end + value for end, value in zip(ends, values, strict=True)]
    for row, name in enumerate(shown):
        tokens = mean(found.runs[name], "tokens_per_round")
        text = f"{ends[row]:.0f} ms" + (f" for {tokens:.2f} tokens" if tokens else "")
        beside(axes, ends[row] + 0.012 * max(ends), row, text)
    axes.set_yticks(range(len(shown)), [found.label(name) for name in shown])
    axes.set(ylim=(len(shown) - 0.4, -0.6), xlim=(0, max(ends) * 1.45), xlabel="milliseconds per round, prefill left out")
    axes.grid(visible=False, axis="y")
    legend_above(axes, 3)
    return figure


def sum_of(rows: Sequence[Row], field: str) -> float:
    return sum(sorted(float(row.get(field) or 0.0) for row in rows))


def step_time(found: Findings) -> Figure:
    """What a pass costs by width, beside the time that reading its weights takes at least; proven widths are filled."""
    steps, machine = found.rows("card", "step"), found.optional("card", "bandwidth")
    proven = {(row["backend"], row["weights"], row["width"]) for row in found.optional("shapes", "shape") if row["proven"]}
    groups: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in steps:
        groups[row["model"], row["weights"], row["backend"]].append(row)
    figure, axes = new("Time of a pass by its width", found.caption("card"), height=5.4)
    order = sorted(groups, key=lambda key: (key[0] != "target", key[2] == "transformers", key))
    for key, look in zip(order, LINES * 9, strict=False):
        rows = sorted(groups[key], key=lambda row: row["width"])
        step_line(axes, key, rows, look, proven)
        if machine and len(rows) > 1:
            floor = 1000 * rows[0]["bytes"] / machine[0]["read_gbps"] / 1e9
            axes.axhline(floor, color=look["color"], linewidth=0.9, linestyle=(0, (1, 2)))
    marks = ("filled: target widths proven to give the same bits (a draft needs no proof)" if proven
             else f"proven widths: n/a ({make_with('shapes')})")
    floors = f"dotted: reading the weights at the machine's {machine[0]['read_gbps']:.1f} GB/s" if machine else ""
    axes.set(yscale="log", xlabel=f"width: rows of the pass\n{marks}\n{floors}", ylabel="milliseconds (logarithmic)")
    axes.set_xticks(sorted({row["width"] for row in steps}))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    legend_above(axes, 3)
    return figure


def step_line(axes: Axes, key: tuple[str, str, str], rows: Sequence[Row], look: Look,
              proven: set[tuple[str, str, int]]) -> None:
    """One model's line; its markers are filled where the width is proven (only the target's widths matter)."""
    model, weights, backend = key
    widths, milliseconds = [row["width"] for row in rows], [1000 * row["seconds"] for row in rows]
    look = look | {"marker": look["marker"] if model == "target" else "x"}
    axes.plot(widths, milliseconds, label=f"{model}, {weights}, {backend}", markerfacecolor="white", markersize=7, **look)
    filled = [(width, ms) for width, ms in zip(widths, milliseconds, strict=True)
              if model == "target" and (backend, weights, width) in proven]
    if filled:
        axes.plot(*zip(*filled, strict=True), color=look["color"], marker=look["marker"], linestyle="", markersize=7)


def predicted_and_measured(found: Findings) -> Figure:
    """The card's promise by acceptance, and what the benchmark's prompts got at theirs."""
    best: dict[float, float] = {}
    for row in found.rows("card", "prediction"):
        if row.get("speedup") is not None:
            best[row["acceptance"]] = max(best.get(row["acceptance"], 0.0), row["speedup"])
    measured = f"; measured: {found.caption('benchmark')}" if found.optional("benchmark", "run") else ""
    figure, axes = new("Predicted and measured speed-up over plain decoding", f"predicted: {found.caption('card')}{measured}")
    axes.plot(*zip(*sorted(best.items()), strict=True), color=BLACK, linewidth=1.8, label="predicted by the card, best K")
    points = 0
    for name, look in MEASURED.items():
        pairs = measured_points(found, name)
        points += len(pairs)
        if pairs:
            axes.plot(*zip(*pairs, strict=True), linestyle="", markersize=6, markeredgecolor="black", markeredgewidth=0.6,
                      label=f"measured, {found.label(name)}, a prompt each", **look)
    if not points:
        axes.plot([], [], " ", label=f"measured: n/a ({make_with('benchmark')})")
    axes.axhline(1.0, color=RED, linewidth=1.1, linestyle="--", label="no gain: do not speculate")
    axes.set(xlabel="acceptance (share right of the draft tokens that were judged)",
             ylabel="decode tokens per second,\nagainst our plain decoding")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left")
    return figure


def measured_points(found: Findings, variant: str) -> list[tuple[float, float]]:
    """(acceptance, decoding speed-up over plain) per prompt.

    As the card has it: the share right of the tokens that were judged; accepted / drafted counts those never looked at too.
    """
    try:
        rows = found.runs.get(variant, [])
    except NoData:
        return []
    right, judged = Counter[str](), Counter[str]()
    for row in rows:
        for accepted, looked_at in row.get("acceptance_by_position") or []:
            right[str(row["prompt_id"])] += accepted
            judged[str(row["prompt_id"])] += looked_at
    rates = {prompt: right[prompt] / judged[prompt] for prompt in sorted(judged)}
    ours, plain = (per_prompt(side, "decode_tokens_per_second") for side in (rows, found.runs.get("plain", [])))
    return [(rates[prompt], ours[prompt] / plain[prompt]) for prompt in rates if prompt in ours and plain.get(prompt)]


def policy_regret(found: Findings) -> Figure:
    """How much slower each way of choosing K is than the best fixed K in hindsight."""
    values: dict[str, list[float]] = defaultdict(list)
    for row in found.rows("policies", "policy"):
        values[row["policy"]].append(100 * row["regret"])
    average = {name: sum(sorted(column)) / len(column) for name, column in values.items()}
    shown = sorted(average, key=lambda name: (average[name], name))
    figure, axes = new("Choosing K: regret against the best fixed K in hindsight", found.caption("policies"),
                       height=1.7 + 0.3 * len(shown))
    lowest, highest = min(0.0, *average.values()), max(1e-9, *average.values())
    for place, name in enumerate(shown):
        look = LOOKS["ours" if name.startswith("dynamic") else "plain" if name.startswith("fixed") else "hf"]
        axes.barh(place, average[name], height=0.72, edgecolor="black", linewidth=0.7, **look)
        beside(axes, max(0.0, average[name]) + 0.012 * highest, place, f"{average[name]:.1f}%")
    axes.set_yticks(range(len(shown)), shown)
    axes.set(ylim=(len(shown) - 0.4, -0.6), xlim=(1.1 * lowest, 1.15 * highest),
             xlabel="tokens per second lost, in percent (replay of recorded rounds; less is better)")
    axes.grid(visible=False, axis="y")
    return figure


def memory(found: Findings) -> Figure:
    """Peak memory by variant."""
    rows = {row["variant"]: row for row in found.rows("memory", "memory")}
    shown = in_order(rows)
    figure, axes = new("Peak memory by variant", caption(found.header("memory")), height=1.8 + 0.34 * len(shown))
    peaks = [Estimate(rows[name]["peak_mb"] / 1000, None, None, 1) for name in shown]
    bars_across(axes, [variant_label(rows[name]) for name in shown], peaks, [f"{peak.mean:.2f}" for peak in peaks],
                [LOOKS[str(rows[name]["family"])] for name in shown])
    how = "; ".join(sorted({str(row["how"]) for row in rows.values()}))
    axes.set_xlabel(f"GB ({how})")
    return figure


CHARTS: dict[str, Callable[[Findings], Figure]] = {
    function.__name__: function
    for function in (throughput, speedup_by_category, ablations, acceptance_by_position, round_time, step_time,
                     predicted_and_measured, policy_regret, memory)
}
