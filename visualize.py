"""Draw the results: charts, the tables of the documents, and the page of a trace. Reads results files and nothing else.

    python visualize.py                   all charts whose data are there, as PNG and SVG, into results/
    python visualize.py --tables          write the tables and numbers of README.md and TECHNICAL_REPORT.md
    python visualize.py --tables --check  exit code 1 when they are stale, or the abstract has a figure without a source
    python visualize.py --trace           one page that shows results/trace.jsonl token by token
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import charts
import cli
import documents
import results
import trace_page
from chart_style import save
from findings import COMMANDS, Findings, NoData

ROOT = Path(__file__).parent


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=results.FOLDER, metavar="DIR",
                        help="folder of the results files (default: results/)")
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="where charts and pages go (default: as --results)")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--tables", action="store_true", help="update what stands between markers in the documents")
    mode.add_argument("--trace", nargs="?", type=Path, const=True, metavar="FILE",
                      help="make the page of a trace (default: trace.jsonl of the results)")
    parser.add_argument("--check", action="store_true", help="with --tables: change nothing, say what is stale")
    parser.add_argument("--documents", nargs="+", type=Path, metavar="FILE",
                        help="with --tables: other documents than README.md and TECHNICAL_REPORT.md")
    args = parser.parse_args(arguments)
    if not args.tables and (args.check or args.documents):
        parser.error("--check and --documents belong to --tables")
    args.output_dir = args.output_dir or args.results
    return args


def draw(found: Findings, folder: Path) -> int:
    """All charts; a line for each that lacks its data."""
    if not any((found.folder / f"{name}.jsonl").is_file() for name in charts.SOURCES):
        raise NoData(f"{found.folder} holds no results to draw; measure first: {COMMANDS['benchmark']}")
    drawn = 0
    for name, chart in charts.CHARTS.items():
        try:
            paths = save(chart(found), folder, name)
        except NoData as reason:
            print(f"skipped {name}: {reason}", file=sys.stderr)
        else:
            drawn += 1
            print(" ".join(map(str, paths)))
    return 0 if drawn else cli.fail(f"no chart could be drawn from {found.folder}")


def tables(found: Findings, paths: Sequence[Path] | None, check: bool) -> int:
    """Update the documents, or only say what is stale in them."""
    present = [path for path in paths or [ROOT / name for name in documents.DOCUMENTS] if paths or path.is_file()]
    if not present:
        raise NoData(f"there is neither {' nor '.join(documents.DOCUMENTS)} here")
    complaints = []
    for path in present:
        before, after = documents.update(path, found)
        if check:
            complaints += [f"{path.name}: {name} is stale; update with: python visualize.py --tables"
                           for name in documents.stale(path, found)]
            complaints += [f"{path.name}: the abstract's {figure!r} has no results file; put it between num markers"
                           for figure in documents.unbacked(before)]
        elif before != after:
            path.write_text(after, "utf-8")
        print(f"{path.name}: {documents.count(before)} markers", file=sys.stderr)
    for complaint in complaints:
        print(f"error: {complaint}", file=sys.stderr)
    return int(bool(complaints))


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_args(arguments)
    if args.trace:
        path = args.results / "trace.jsonl" if args.trace is True else args.trace
        print(trace_page.write(path, args.output_dir / f"{path.stem}.html"))
        return 0
    found = Findings(args.results)
    return tables(found, args.documents, args.check) if args.tables else draw(found, args.output_dir)


if __name__ == "__main__":
    cli.run(main)
