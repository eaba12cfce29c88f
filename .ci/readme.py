"""Run every command of README.md on the tiny random pair, in a copy of the checkout, so that none of them can rot.

The two lines that make the virtual environment are what .ci/run does itself.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMALL = {"run_baseline.py": "--limit 2 --max-new-tokens 8", "run_spec.py": "--max-new-tokens 8",
         "verify.py": "--limit 2 --max-new-tokens 8", "benchmark.py": "--limit 2 --max-new-tokens 8"}


def commands(text: str) -> list[str]:
    """Those of the shell blocks and of the tables, without comments, each once."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line.partition("#")[0] for block in blocks for line in block.replace("\\\n", " ").splitlines() if "venv" not in line]
    found = [part.strip() for line in lines for part in line.split("&&")] + re.findall(r"^\| `(python .+?)`", text, re.MULTILINE)
    return list(dict.fromkeys(filter(None, found)))


def small(command: str) -> list[str]:
    """The same command on the tiny pair; what is drawn are the results of the checkout."""
    program, script, *flags = command.split()
    assert program == "python", f"README.md has a command of another kind: {command}"
    extra = ["--pair", "tiny", *SMALL.get(script, "").split()]
    if script == "visualize.py":
        extra = ["--results", str(ROOT / "results"), "--output-dir", "drawn"]
    return [sys.executable, script, *flags, *extra]


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
        for name in files:
            if (ROOT / name).is_file() and not name.startswith("results/"):
                target = Path(scratch, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, target)
        for command in commands((ROOT / "README.md").read_text("utf-8")):
            print(f"$ {command}", flush=True)
            done = subprocess.run(small(command), cwd=scratch, capture_output=True, text=True, env=os.environ | {"NO_COLOR": "1"})
            if done.returncode and "the negative control found no difference" not in done.stdout:  # so few tokens may hold none
                print(done.stdout[-2000:], done.stderr[-4000:], f"exit code {done.returncode}", sep="\n")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
