"""Tables and numbers in the documents, between markers that markdown does not show, so that they cannot drift:

    <!-- table:headline -->...<!-- /table -->                          a table of tables.py
    <!-- num:summary.ratio_vs_hf_greedy.mean|.2f -->4.56<!-- /num -->  a number from a results file, with its format

Where a number comes from: summary.FIELD...: what the benchmark prints last. variant[NAME].FIELD...: figures of a variant
(tokens_per_second.mean, first_token_seconds, vs.hf-assisted.low, ...). ablated[NAME].FIELD...: the same of the run with --ablations.
count[FILE,key=value,...]: how many rows.
FILE.TYPE[key=value,...].FIELD... or FILE[key=value,...].FIELD...: the one row that fits, e.g.
card.step[model=target,width=6].share_of_machine|.0%. FILE.header.FIELD: the header. After the format a factor may
follow: |.1f*1000 shows seconds as milliseconds.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import summary
from findings import Findings, NoData, Row
from tables import TABLES

DOCUMENTS = ("README.md", "TECHNICAL_REPORT.md")
BLOCK = re.compile(r"<!-- (table|num):(.+?) -->(.*?)<!-- /(table|num) -->", re.DOTALL)
MARKER = re.compile(r"<!-- (/?(?:table|num)\b.*?) ?-->", re.DOTALL)
DOT = re.compile(r"\.(?![^\[]*\])")  # outside brackets
FORMAT = re.compile(r"([^*]*)(?:\*([0-9.eE+-]+))?")
FIGURE = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:\s?(?:%|×|x\b|times\b|tokens/s|tok/s|ms\b|s\b|GB/s|GiB|GB\b|MB\b))|"
                    r"(?<![\w.])\d+\.\d+(?![\w.]*\d?[Bb]\b)")


def update(path: Path, found: Findings) -> tuple[str, str]:
    """The document as it is and as it should be. Raises ValueError that names document and marker."""
    before = path.read_text("utf-8")

    def fill(match: re.Match[str]) -> str:
        kind, name, _, end = match.groups()
        try:
            if kind != end or MARKER.search(match[3]):
                raise ValueError("its end marker is missing or of another kind")
            text = f"\n{table_of(name, found)}\n" if kind == "table" else number_of(name, found)
        except ValueError as error:
            raise type(error)(f"{path.name}, marker {kind}:{name}: {error}") from error
        return f"<!-- {kind}:{name} -->{text}<!-- /{kind} -->"

    after = BLOCK.sub(fill, before)
    if stray := MARKER.search(BLOCK.sub("", before)):
        raise ValueError(f"{path.name}, marker {stray[1]!r}: has no counterpart, as in <!-- table:NAME --><!-- /table -->")
    return before, after


def stale(path: Path, found: Findings) -> list[str]:
    """The markers whose content is not what the results files say."""
    before, after = update(path, found)
    return [f"{kind}:{name}" for (kind, name, old, _), (_, _, new, _) in
            zip(BLOCK.findall(before), BLOCK.findall(after), strict=True) if old != new]


def count(text: str) -> int:
    """How many tables and numbers a document takes from results files."""
    return len(BLOCK.findall(text))


def unbacked(text: str) -> list[str]:
    """Figures in the abstract (decimals, and numbers with a unit) that stand outside markers, so have no results file."""
    section = re.search(r"^#+ *(?:\d+\.? *)?Abstract\b.*?$(.*?)(?=^#|\Z)", text, re.DOTALL | re.MULTILINE | re.IGNORECASE)
    bare = re.sub(r"`[^`]*`|\]\([^)]*\)", " ", BLOCK.sub(" ", section[1])) if section else ""
    return [found[0] for found in FIGURE.finditer(bare)]


def table_of(name: str, found: Findings) -> str:
    if name not in TABLES:
        raise ValueError(f"there is no such table; there are {', '.join(TABLES)}")
    return TABLES[name](found)


def number_of(name: str, found: Findings) -> str:
    """'path|format' -> text."""
    path, _, form = name.partition("|")
    value = look_up(path.strip(), found)
    match = FORMAT.fullmatch(form)
    try:
        spec, factor = match.groups() if match else (form, None)
        return format(value * float(factor) if factor else value, spec)
    except (ValueError, TypeError):
        raise ValueError(f"{value!r} cannot be written in the format {form!r}") from None


def look_up(path: str, found: Findings) -> Any:
    """The value at a path, as the module's docstring lists them. Raises NoData or ValueError."""
    first, *rest = DOT.split(path)
    source, _, selector = first.rstrip("]").partition("[")
    if source == "count":
        file, *keys = selector.split(",")
        return len(matching(found.rows(file), keys))
    value: Any
    if source == "summary":
        value = summary.summarize(found.rows("benchmark", "run"))  # a resumed run has several such rows
    elif source in ("variant", "ablated"):
        value = (found if source == "variant" else found.ablated).figures(selector)
    elif selector:
        value = one(matching(found.rows(source), selector.split(",")), path)
    elif rest and rest[0] == "header":
        value, rest = found.header(source), rest[1:]
    elif rest:
        kind, _, selector = rest.pop(0).rstrip("]").partition("[")
        value = one(matching(found.rows(source, kind), selector.split(",") if selector else []), path)
    else:
        raise ValueError("names a file and no row; write FILE.TYPE[key=value].FIELD")
    return descend(value, rest)


def matching(rows: list[Row], conditions: list[str]) -> list[Row]:
    """The rows whose fields have the given values, compared as text."""
    for condition in conditions:
        key, _, wanted = condition.partition("=")
        rows = [row for row in rows if str(row.get(key.strip())) == wanted.strip()]
    return rows


def one(rows: list[Row], path: str) -> Row:
    if len(rows) != 1:
        raise ValueError(f"{len(rows)} rows fit {path!r} where one is needed")
    return rows[0]


def descend(value: Any, fields: list[str]) -> Any:
    """Follow field names into nested objects."""
    for field in fields:
        if not isinstance(value, dict) or field not in value:
            known = ", ".join(value) if isinstance(value, dict) else "nothing"
            raise ValueError(f"has no {field!r}; there is {known}")
        value = value[field]
    if value is None:
        raise NoData("the results have no value here (null)")
    return value
