"""The folder outside the repository for what is made once: converted weights, compiled kernels, measured widths."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/speculative-decoding`, by default under `~/.cache`."""
    root = os.environ.get("XDG_CACHE_HOME")
    base = Path(root) if root and Path(root).is_absolute() else Path.home() / ".cache"
    return base / "speculative-decoding"
