"""How all charts look: colours by Okabe and Ito with a hatch or marker each (readable in grey and by colour-blind people),
a title, and a caption that says how the figures were measured. Figures are made without pyplot, so that no display and no
windowing library is needed whatever MPLBACKEND says.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from findings import Estimate

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PINK = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
GREY = "#555555"
Look = dict[str, Any]
LOOKS: dict[str, Look] = {  # of a bar, by family
    "hf": {"color": ORANGE, "hatch": "//"}, "plain": {"color": SKY, "hatch": ".."}, "ours": {"color": BLUE, "hatch": ""},
    "": {"color": "white", "hatch": ""},
}
SERIES: tuple[Look, ...] = (  # of bars side by side
    {"color": BLUE, "hatch": ""}, {"color": ORANGE, "hatch": "//"}, {"color": SKY, "hatch": ".."},
    {"color": PINK, "hatch": "xx"},
)
LINES: tuple[Look, ...] = (
    {"color": BLUE, "marker": "o", "linestyle": "-"}, {"color": RED, "marker": "s", "linestyle": "--"},
    {"color": GREEN, "marker": "^", "linestyle": "-."}, {"color": PINK, "marker": "D", "linestyle": ":"},
    {"color": BLACK, "marker": "v", "linestyle": "-"}, {"color": ORANGE, "marker": "P", "linestyle": "--"},
)
STYLE: Any = {
    "font.family": "DejaVu Sans", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": "#dddddd", "grid.linewidth": 0.7, "axes.axisbelow": True, "legend.frameon": False,
    "hatch.linewidth": 0.6, "svg.fonttype": "none", "svg.hashsalt": "charts", "figure.facecolor": "white",
}


def new(title: str, caption: str, width: float = 9.0, height: float = 4.8) -> tuple[Figure, Axes]:
    """A figure with one pair of axes, its title above and the caption below."""
    lines = wrap(caption, int(width * 16.5))
    room = (0.17 * len(lines) + 0.12) / height
    layout = ConstrainedLayoutEngine(rect=(0.0, room, 1.0, 1.0 - room), w_pad=0.1, h_pad=0.06)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout=layout)
        FigureCanvasAgg(figure)
        axes = figure.subplots()
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold")
    figure.text(0.012, 0.012, "\n".join(lines), fontsize=7.5, color=GREY, va="bottom", linespacing=1.4)
    return figure, axes


def wrap(caption: str, length: int) -> list[str]:
    """A caption in lines, broken between its parts; a part that is longer than a line is broken too."""
    lines: list[str] = []
    for part in caption.split(" · "):
        joined = f"{lines[-1]} · {part}" if lines else part
        if lines and len(joined) <= length:
            lines[-1] = joined
        else:
            lines += textwrap.wrap(part, length)
    return lines


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write PNG and SVG; the same figure gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    with matplotlib.rc_context(STYLE):
        figure.savefig(paths[0], dpi=150)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def error(found: Estimate | None) -> tuple[float, float]:
    """Lengths of an error bar below and above the mean; none where there is no interval."""
    if found is None or found.low is None or found.high is None:
        return 0.0, 0.0
    return max(0.0, found.mean - found.low), max(0.0, found.high - found.mean)


def bars_across(axes: Axes, labels: Sequence[str], values: Sequence[Estimate | None], texts: Sequence[str],
                looks: Sequence[Look]) -> None:
    """Horizontal bars from the top down with intervals; each with a text to the right of it ('n/a' without a value)."""
    means = [0.0 if value is None else value.mean for value in values]
    ends = [mean + error(value)[1] for mean, value in zip(means, values, strict=True)]
    space = 0.012 * max([*ends, 1e-9])
    for row, (mean, value, end, text, look) in enumerate(zip(means, values, ends, texts, looks, strict=True)):
        axes.barh(row, mean, height=0.72, edgecolor="black", linewidth=0.7, **look)
        if any(error(value)):
            axes.errorbar(mean, row, xerr=[[side] for side in error(value)], color="black", capsize=3, linewidth=1.1)
        beside(axes, end + space, row, text if value is not None else "n/a")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_xlim(0, max([*ends, 1e-9]) * 1.32)
    axes.grid(visible=False, axis="y")


def beside(axes: Axes, x: float, row: int, text: str) -> None:
    """A text to the right of a horizontal bar, legible over grid lines."""
    axes.text(x, row, text, va="center", fontsize=9, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8})


def legend_above(axes: Axes, columns: int) -> None:
    """A legend between title and axes, where it covers nothing."""
    axes.legend(ncols=columns, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def grouped_bars(axes: Axes, groups: Sequence[str], series: dict[str, list[Estimate | None]]) -> None:
    """Vertical bars side by side in groups, with intervals and the value above each ('n/a' without one)."""
    width = 0.84 / len(series)
    top = max([found.mean + error(found)[1] for column in series.values() for found in column if found], default=1.0)
    for number, (label, column) in enumerate(series.items()):
        places = [group + (number - (len(series) - 1) / 2) * width for group in range(len(groups))]
        axes.bar(places, [found.mean if found else 0.0 for found in column], width * 0.94, label=label, edgecolor="black",
                 linewidth=0.6, **SERIES[number % len(SERIES)])
        for place, found in zip(places, column, strict=True):
            end = found.mean + error(found)[1] if found else 0.0
            if any(error(found)):
                axes.errorbar(place, found.mean if found else 0.0, yerr=[[side] for side in error(found)], color="black",
                              capsize=2, linewidth=0.9)
            text = f"{found.mean:.1f}" if found else "n/a"
            axes.text(place, end + 0.012 * top, text, ha="center", va="bottom", fontsize=7.5)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylim(0, top * 1.12)
    axes.grid(visible=False, axis="x")
