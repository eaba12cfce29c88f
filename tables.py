"""Markdown tables from results files, for the documents: one function per table, each gives its lines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from findings import (
    ABLATIONS,
    BASELINES,
    FIXED_K,
    HEADLINE,
    Estimate,
    Findings,
    NoData,
    Row,
    estimate,
    in_order,
    make_with,
    mean,
    per_prompt,
    same,
    speed,
    variant_label,
)

NOT_AVAILABLE = "n/a"
AGAINST = dict(zip(BASELINES, ("× HF greedy", "× HF assisted", "× plain"), strict=True))


def number(value: Any, form: str = ".2f", scale: float = 1.0) -> str:
    """A figure as text; 'n/a' where there is none."""
    return NOT_AVAILABLE if value is None else format(value * scale, form)


def interval(found: Estimate | None, form: str = ".2f", unit: str = "") -> str:
    """'4.56× [4.10, 5.02]'; without an interval the mean alone."""
    if found is None:
        return NOT_AVAILABLE
    text = number(found.mean, form) + unit
    return text if found.low is None else f"{text} [{number(found.low, form)}, {number(found.high, form)}]"


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A markdown table, its first column to the left and all others to the right."""
    rows = [list(head), [":--"] + ["--:"] * (len(head) - 1), *map(list, lines)]
    cells = [[cell.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def captioned(text: str, caption: str) -> str:
    return f"{text}\n\n<sub>{caption}</sub>"


def speed_table(found: Findings, variants: Sequence[str], against: Mapping[str, str] = AGAINST) -> str:
    """All figures of some variants. against: baseline -> head of the column with the ratios to it."""
    head = ["variant", "n", "tokens/s [95%]", "decode tokens/s", *against.values(), "first token, s", "acceptance",
            "tokens/round", "same output"]
    lines = [speed_line(found, name, against) for name in variants]
    return captioned(table(head, lines), found.caption(found.benchmark))


def speed_line(found: Findings, variant: str, against: Iterable[str]) -> list[str]:
    """One variant; where it was not run, all is n/a."""
    rows = found.runs.get(variant, [])
    ratios = {name: found.ratio(variant, name) if name != variant else None for name in against}
    return [found.label(variant), str(len({row["prompt_id"] for row in rows})), interval(speed(rows), ".1f"),
            number(mean(rows, "decode_tokens_per_second"), ".1f"),
            *("1 (baseline)" if name == variant and rows else interval(value)
              for name, value in ratios.items()),
            number(mean(rows, "first_token_seconds")), number(mean(rows, "acceptance_rate")),
            number(mean(rows, "tokens_per_round")), same_output(rows)]


def same_output(rows: Sequence[Row]) -> str:
    """How many runs gave the reference's output: to the bit where bits were compared, else the same ids."""
    field = "same_bits" if any(row.get("same_bits") is not None for row in rows) else "same_ids"
    alike = same(rows, field)
    return NOT_AVAILABLE if alike is None else f"{alike} of {sum(row.get(field) is not None for row in rows)}"


def headline(found: Findings) -> str:
    """The baselines and ours."""
    wanted = {*(name for name in HEADLINE if name in found.runs), *BASELINES, "dynamic"}
    return speed_table(found, in_order(wanted))


def ksweep(found: Findings) -> str:
    """Fixed K beside dynamic K."""
    return speed_table(found, ["plain", *require(found, FIXED_K), "dynamic"])


def ablations(found: Findings) -> str:
    """Dynamic K and what happens without each of its pieces."""
    found = found.ablated
    return speed_table(found, ["plain", "dynamic", *require(found, ABLATIONS)], {"plain": "× plain", "dynamic": "× dynamic K"})


def require(found: Findings, variants: Sequence[str]) -> list[str]:
    """Those that were run. Raises NoData where none was."""
    present = [name for name in variants if name in found.runs]
    if not present:
        raise NoData(f"none of {', '.join(variants)} was run; {make_with(found.benchmark)}")
    return present


def categories(found: Findings) -> str:
    """Ratios of dynamic K by category."""
    names = sorted({str(row["category"]) for row in found.runs.get("dynamic", [])})
    if not names:
        raise NoData(f"the variant 'dynamic' was not run; {make_with('benchmark')}")
    lines = []
    for name in names:
        rows = [row for row in found.runs["dynamic"] if row["category"] == name]
        lines.append([name, str(len({row["prompt_id"] for row in rows})), interval(speed(rows), ".1f"),
                      *(interval(found.ratio("dynamic", base, category=name)) for base in BASELINES),
                      number(mean(rows, "acceptance_rate")), number(mean(rows, "tokens_per_round"))])
    head = ["category", "n", "tokens/s [95%]", *AGAINST.values(), "acceptance", "tokens/round"]
    return captioned(table(head, lines), found.caption("benchmark"))


def card(found: Findings) -> str:
    """Step times by width."""
    rows = sorted(found.rows("card", "step"), key=lambda row: (row["model"] != "target", row["weights"], row["backend"],
                                                               row["width"]))
    lines = [[row["model"], row["weights"], row["backend"], str(row["width"]), number(row["seconds"], ".1f", 1000),
              number(row.get("bandwidth_gbps"), ".1f"), number(row.get("share_of_machine"), ".0%")] for row in rows]
    head = ["model", "weights", "backend", "width", "ms", "GB/s", "share of the machine's"]
    return captioned(table(head, lines), found.caption("card"))


def prediction(found: Findings) -> str:
    """The card's promise: for each acceptance the best K, and whether to speculate."""
    best: dict[float, Row] = {}
    for row in found.rows("card", "prediction"):
        if row["acceptance"] not in best or row["speedup"] > best[row["acceptance"]]["speedup"]:
            best[row["acceptance"]] = row
    lines = [[number(rate), str(row["advice"]), str(row["width"]), number(row["tokens_per_second"], ".1f"),
              number(row["speedup"])] for rate, row in sorted(best.items())]
    head = ["acceptance", "advice", "width", "tokens/s", "speed-up"]
    return captioned(table(head, lines), found.caption("card"))


def shapes(found: Findings) -> str:
    """Which widths give the same bits."""
    rows = sorted(found.rows("shapes", "shape"), key=lambda row: (row["backend"], row["weights"], row["width"]))
    lines = [[row["backend"], row["weights"], str(row["width"]), f"{row['equal']} of {row['positions']}",
              number(row["seconds"], ".1f", 1000), "yes" if row["proven"] else "no"] for row in rows]
    head = ["backend", "weights", "width", "equal positions", "ms", "proven"]
    return captioned(table(head, lines), found.caption("shapes"))


def policies(found: Findings) -> str:
    """Ways of choosing K, the least regret first; several rows of a policy are averaged."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in found.rows("policies", "policy"):
        groups[row["policy"]].append(row)
    fields = ("tokens_per_second", "regret", "regret_per_prompt", "tokens_per_round", "mean_k")
    means = {name: {field: average(rows, field) for field in fields} for name, rows in groups.items()}
    shown = sorted(means, key=lambda name: (means[name]["regret"] or 0.0, name))
    forms = dict(zip(fields, (".1f", ".1%", ".1%", ".2f", ".1f"), strict=True))
    lines = [[name, *(number(means[name][field], form) for field, form in forms.items())] for name in shown]
    head = ["policy", "tokens/s", "regret", "per prompt", "tokens/round", "mean K"]
    return captioned(table(head, lines), found.caption("policies"))


def average(rows: Sequence[Row], field: str) -> float | None:
    values = sorted(row[field] for row in rows if row.get(field) is not None)
    return sum(values) / len(values) if values else None


def memory(found: Findings) -> str:
    """Peak memory by variant."""
    rows = {row["variant"]: row for row in found.rows("memory", "memory")}
    lines = [[variant_label(rows[name]), number(rows[name]["peak_mb"], ",.0f"), str(rows[name]["how"])] for name in in_order(rows)]
    return captioned(table(["variant", "peak, MB", "measured as"], lines), found.caption("memory"))


def verify(found: Findings) -> str:
    """Comparisons to the bit by K, then the cross-checks."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in found.rows("verify", "comparison"):
        groups[str(row["num_speculative_tokens"])].append(row)
    lines = [["plain decoding, ids and logit bits", count, str(len(groups[count])),
              str(sum(not row["equal"] for row in groups[count])), NOT_AVAILABLE]
             for count in sorted(groups, key=lambda count: (not count.isdigit(), int(count) if count.isdigit() else 0))]
    checks: dict[str, list[str]] = defaultdict(list)
    for row in found.optional("verify", "cross-check"):
        checks[row["against"]].append(row["verdict"])
    lines += [[f"{against}, ids", "0", str(len(verdicts)), str(verdicts.count("bug")), str(verdicts.count("near-tie"))]
              for against, verdicts in sorted(checks.items())]
    head = ["compared with", "K", "comparisons", "differences or bugs", "near-ties"]
    return captioned(table(head, lines), found.caption("verify"))


def sampling(found: Findings) -> str:
    """Plain sampling and both couplings beside each other."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in found.rows("sampling", "run"):
        groups[row["variant"]].append(row)
    lines = []
    for name, rows in sorted(groups.items(), key=lambda item: (item[0] != "plain", item[0])):
        judged, alike = sum(row.get("same_as_plain") is not None for row in rows), same(rows, "same_as_plain")
        rates = estimate(list(per_prompt(rows, "tokens_per_second").values()))
        lines.append([name, str(len({row["prompt_id"] for row in rows})), number(mean(rows, "acceptance_rate")),
                      number(mean(rows, "tokens_per_round")), interval(rates, ".1f"),
                      NOT_AVAILABLE if alike is None else f"{alike} of {judged}"])
    head = ["variant", "n", "acceptance", "tokens/round", "tokens/s [95%]", "same as plain sampling"]
    return captioned(table(head, lines), found.caption("sampling"))


def sampling_speed(found: Findings) -> str:
    """The benchmark at a temperature above 0: both couplings against stock sampling and our own plain sampling."""
    found = found.sampled
    lines = []
    for name, rows in found.runs.items():
        lines.append([found.label(name), str(len({row["prompt_id"] for row in rows})), interval(speed(rows), ".1f"),
                      *("1 (baseline)" if name == base else interval(found.ratio(name, base)) for base in ("hf-greedy", "plain")),
                      number(mean(rows, "acceptance_rate")), number(mean(rows, "tokens_per_round")), same_output(rows)])
    head = ["variant", "n", "tokens/s [95%]", "× HF sampling", "× plain sampling", "acceptance", "tokens/round",
            "same as plain sampling"]
    return captioned(table(head, lines), found.caption("benchmark-sampling"))


def verify_sampling(found: Findings) -> str:
    """Coupled sampling against target-only sampling with the seed, by drafter and K."""
    groups: dict[tuple[str, int | str], list[Row]] = defaultdict(list)
    for row in found.rows("verify-sampling", "comparison"):
        count = str(row["num_speculative_tokens"])
        groups[row["drafter"], int(count) if count.isdigit() else count].append(row)
    lines = [[drafter, str(count), str(len({row["id"] for row in rows})), str(len({row["seed"] for row in rows})),
              str(len(rows)), str(sum(not row["equal"] for row in rows)),
              number(sum(row["accepted"] for row in rows) / max(1, sum(row["drafted"] for row in rows)))]
             for (drafter, count), rows in sorted(groups.items(), key=lambda item: (item[0][0], str(item[0][1]).zfill(3)))]
    head = ["drafter", "K", "prompts", "seeds", "comparisons of ids and bits", "differences", "acceptance"]
    return captioned(table(head, lines), found.caption("verify-sampling"))


def sampling_check(found: Findings) -> str:
    """The distribution test: each coupling's cells, and the control."""
    cells = found.rows("sampling-check", "cell")
    lines = []
    for row in sorted(found.rows("sampling-check", "coupling"), key=lambda row: str(row["coupling"])):
        own = [cell["p_adjusted"] for cell in cells if cell["coupling"] == row["coupling"]]
        lines.append([row["coupling"], str(row["cells"]), f"{row['draws']:,}", number(min(own), ".2g"), number(row["p"], ".2g")])
    control = found.rows("sampling-check", "control")[0]
    lines.append([control["name"], "1", f"{control['draws']:,}", NOT_AVAILABLE, number(control["p"], ".2g")])
    head = ["coupling", "cells", "draws of 4 tokens", "smallest p, corrected", "p of all together"]
    header = found.header("sampling-check")
    return captioned(table(head, lines), f"small tables, exact probabilities · chi-square, Holm · commit {header['commit']}"
                     + (" with changes" if header["dirty"] else ""))


def two_sample(found: Findings) -> str:
    """The pair's next token under each coupling against plain sampling."""
    rows = sorted(found.rows("sampling-two-sample", "two-sample"), key=lambda row: (row["variant"] != "plain", row["variant"]))
    lines = [[row["variant"], str(row["draws"]), str(row["outcomes"]), str(row["drafted"]), str(row["accepted"]),
              number(row.get("p"), ".2g"), number(row.get("p_adjusted"), ".2g")] for row in rows]
    head = ["variant", "draws", "different tokens", "drafted", "accepted", "p", "corrected"]
    return captioned(table(head, lines), found.caption("sampling-two-sample"))


TABLES: dict[str, Callable[[Findings], str]] = {
    function.__name__: function
    for function in (headline, categories, ksweep, ablations, card, prediction, shapes, policies, memory, verify, sampling,
                     sampling_speed, verify_sampling, sampling_check, two_sample)
}
