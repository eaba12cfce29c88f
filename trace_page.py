"""One self-contained HTML page from a trace (`run_spec.py --trace`): the text token by token, and its rounds in time.

The page needs no network and asks for none. Model text is data: it sits in the page as JSON with < > & escaped, is put
on the screen as text only, and a content security policy lets no script run but the page's own (by its hash).
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from pathlib import Path
from typing import Any

import results
from findings import COMMANDS, caption

TEMPLATE, SCRIPT = Path(__file__).with_suffix(".html"), Path(__file__).with_suffix(".js")
PLACEHOLDER = re.compile("__(TITLE|POLICY|DATA|TEXT|SCRIPT)__")
ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}  # in JSON strings these mean the same; in HTML they mean nothing


def write(trace: Path, page: Path) -> Path:
    """Make the page of a trace file. Raises ValueError where there is no such file, and for one that is no trace."""
    if not trace.is_file():
        raise ValueError(f"{trace} is not a file; make a trace with: {COMMANDS['trace']}")
    text = build(*results.read(trace), name=trace.name)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, "utf-8", newline="\n")
    return page


def build(header: dict[str, Any], rows: list[dict[str, Any]], name: str = "the trace") -> str:
    """Header and rows of a trace -> the page."""
    rounds = sorted((row for row in rows if row.get("type") == "round"), key=lambda row: row["index"])
    if not rounds:
        raise ValueError(f"{name} has no rounds; make a trace with: {COMMANDS['trace']}")
    summary = next((row for row in rows if row.get("type") == "summary"), {})  # none where the run was cut off
    prompt = str(summary.get("prompt") or header.get("prompt") or "")
    data = {"prompt": prompt, "caption": caption(header), "summary": {**summary, "text": None}, "rounds": rounds}
    plain = "".join(str(token.get("text") or "") for row in rounds for token in row["tokens"])
    template, script = TEMPLATE.read_text("utf-8"), SCRIPT.read_text("utf-8")
    parts = {"TITLE": html.escape(readable(f"Trace: {' '.join(prompt.split())[:60]}")), "DATA": as_json(data),
             "POLICY": policy(script, template.split("<style>")[1].split("</style>")[0]),
             "TEXT": html.escape(readable(plain)), "SCRIPT": script}
    # In one pass: a placeholder's name in the model's text is not a placeholder.
    return PLACEHOLDER.sub(lambda match: parts[match[1]], template)


def as_json(data: Any) -> str:
    """JSON that can end no script element: ASCII, without < > &."""
    return re.sub("[<>&]", lambda match: ESCAPES[match[0]], json.dumps(data))


def readable(text: str) -> str:
    """Text that can be written as UTF-8: halves of surrogate pairs are replaced."""
    return text.encode("utf-8", "replace").decode("utf-8")


def policy(script: str, style: str) -> str:
    """Allows the page's own script and style, by hash, and nothing else: no other script, no address, no form."""
    sources = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style)]
    return (f"default-src 'none'; script-src 'sha256-{sources[0]}'; style-src 'sha256-{sources[1]}'; base-uri 'none'; "
            "form-action 'none'")
