"""Results files: JSON Lines, a header row that says how the rest was measured, then a row per measurement.

Rows are written as they finish, so an interruption loses nothing; a new run moves an older file aside.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from models import Pair

FOLDER = Path(__file__).parent / "results"
LIBRARIES = ("torch", "transformers", "accelerate", "numpy")


def git(*arguments: str) -> str:
    """The answer of a git command in this repository; empty where there is none."""
    try:
        return subprocess.run(["git", *arguments], cwd=FOLDER.parent, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def cpu_name() -> str:
    """The CPU's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def scikit_learn() -> str | None:
    """Its version if installed: transformers then refits the threshold of assisted generation in each round."""
    try:
        return metadata.version("scikit-learn")
    except metadata.PackageNotFoundError:
        return None


def header(args: argparse.Namespace, pair: Pair | None, **extra: Any) -> dict[str, Any]:
    """The first row: everything needed to run it again and to judge it.

    pair: None where no models are loaded. Its draft model is recorded unless --drafter says that it is not loaded; a script
    that decides otherwise passes draft and draft_digest.
    """
    device = getattr(args, "device", torch.device("cpu"))
    target, draft = (pair.target, pair.draft) if pair else (None, None)
    if getattr(args, "drafter", "model") not in ("both", "model"):
        draft = None
    return {
        "type": "header", "script": Path(sys.argv[0]).name,
        "command": " ".join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": git("rev-parse", "--short=12", "HEAD") or "unknown",
        "dirty": bool(git("status", "--porcelain", "-uno", "--", ".", ":!results", ":!*.md")),  # other code, not other texts
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads(),
        "dtype": str(getattr(args, "dtype", torch.bfloat16)).removeprefix("torch."),
        "target": target.name if target else None, "target_digest": target.digest if target else None,
        "draft": draft.name if draft else None, "draft_digest": draft.digest if draft else None,
        "versions": {name: metadata.version(name) for name in LIBRARIES} | {"python": platform.python_version(),
                                                                            "scikit-learn": scikit_learn()},
        "seed": getattr(args, "seed", None), **extra,
    }


class Writer:
    """Writes one results file, row by row."""

    def __init__(self, path: Path, header_row: dict[str, Any], append: bool = False) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() and not append:  # /dev/stdout and the like stay where they are
            aside = path.parent / "older" / f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}{path.suffix}"
            aside.parent.mkdir(exist_ok=True)
            path.rename(aside)
        fresh = not path.is_file()
        self._file = path.open("a", encoding="utf-8", errors="replace")
        if fresh:
            self.write(header_row)

    def write(self, row: dict[str, Any]) -> None:
        """Append one row; it is on its way to the disk when this returns."""
        try:
            self._file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Header and rows; a last line cut off by an interruption is left out. Raises ValueError for any other damage."""
    lines = path.read_text("utf-8").split("\n")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: not JSON; remove the line or measure again") from None
    if not rows or rows[0].get("type") != "header":
        raise ValueError(f"{path} does not begin with a header row; it is not a results file of this repository")
    return rows[0], rows[1:]
