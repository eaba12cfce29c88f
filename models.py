"""Where a pair of models comes from: hub id, local folder, GGUF file, the packaged pair, or a tiny random pair.

`load_pair` resolves both names to folders of safetensors (downloading or converting what is missing), checks that draft
and target share a tokenizer, and says on one line what it chose and why. Nothing here decodes.
"""

import contextlib
import hashlib
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

import packaged
import tiny
from cache import cache_folder
from checkpoint import (
    INDEX,
    WEIGHTS,
    Checkpoint,
    ModelError,
    Pair,
    brief,
    check_shared_tokenizer,
    load_tokenizer,
    open_checkpoint,
    weight_files,
)

__all__ = ["PAIRS", "Checkpoint", "ModelError", "Pair", "load_pair"]

HUB_PAIRS = {
    "qwen2.5": ("Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-0.5B"),
    "qwen2.5-instruct": ("Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
}
PAIRS = ("auto", *HUB_PAIRS, "packaged", "tiny")
HUB_PROBE_SECONDS = 3.0  # a hub that has not answered by then counts as unreachable


def load_pair(
    pair: str = "auto", target: str | None = None, draft: str | None = None, cache_dir: str | Path | None = None
) -> Pair:
    """Resolve a pair by name, or a target and perhaps a draft by hub id, folder, GGUF file or packaged name."""
    cache = Path(cache_dir) if cache_dir is not None else cache_folder()
    if pair not in PAIRS:
        raise ModelError(f"unknown pair {pair!r}; choose one of {', '.join(PAIRS)}, or pass --target and --draft")
    if target is None and draft is None:
        return load_named_pair(pair, cache)
    if pair != "auto":
        raise ModelError(f"--pair {pair} and --target/--draft exclude each other; drop one of them")
    if target is None:
        raise ModelError(f"--draft {draft} needs a --target beside it")
    names = [name for name in (target, draft) if name is not None]
    for name in names:
        check_name(name)  # before the other one is downloaded
    return build_pair(names, [locate(name, cache) for name in names], "as given")


def load_named_pair(pair: str, cache: Path) -> Pair:
    """One of `PAIRS`; `auto` prefers the Hugging Face pair, from its cache or the hub, to the packaged one."""
    if pair == "tiny":
        return tiny.tiny_pair()
    if pair in HUB_PAIRS:
        names = HUB_PAIRS[pair]
        return build_pair(names, [hub_folder(name) for name in names], "as chosen")
    if pair == "packaged":
        return packaged_pair(cache, "as chosen")
    names = HUB_PAIRS["qwen2.5"]
    cached = [cached_snapshot(name) for name in names]
    if all(cached):
        return build_pair(names, [folder for folder in cached if folder], "found in the Hugging Face cache")
    if (status := hub_status(names[0])) != "ok":
        return packaged_pair(cache, f"the hub {status}")
    try:
        folders = [hub_folder(name) for name in names]
    except ModelError as error:
        return packaged_pair(cache, f"hub download failed: {brief(error.__cause__ or error)}")
    return build_pair(names, folders, "from the hub")


def packaged_pair(cache: Path, reason: str) -> Pair:
    packages = [packaged.TARGET, packaged.DRAFT]
    names = [f"packaged:{package.name}" for package in packages]
    return build_pair(names, packaged.prepare(packages, cache), reason)


def check_name(name: str) -> None:
    """Refuse at once what cannot be a model, without touching network or cache."""
    path = Path(name).expanduser()
    if name.startswith("packaged:"):
        if name.removeprefix("packaged:") not in packaged.PACKAGES:
            raise ModelError(f"unknown packaged model {name!r}; choose one of {', '.join(packaged.PACKAGES)}")
    elif name.endswith(".gguf") and not path.is_file():
        raise ModelError(f"model {name}: no such file; check the path")
    elif path.is_file() and not name.endswith(".gguf"):
        raise ModelError(f"model {name}: a file, but not a .gguf; pass the folder that holds it, or a .gguf file")
    elif not path.exists() and not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise ModelError(f"model {name}: no such folder, and not a hub id (organisation/name); check the path")


def locate(name: str, cache: Path) -> Path:
    """The folder with config, safetensors and tokenizer for a model name, made or downloaded if need be."""
    path = Path(name).expanduser()
    if name.startswith("packaged:"):
        return packaged.prepare([packaged.PACKAGES[name.removeprefix("packaged:")]], cache)[0]
    if name.endswith(".gguf"):
        return packaged.prepare_gguf(path, gguf_fingerprint(path), cache)
    if path.is_dir():
        return inside_cache_layout(path)
    return hub_folder(name)


def gguf_fingerprint(path: Path) -> str:
    """Identifies a GGUF file by size, time of change and samples, without reading all of it."""
    status = path.stat()
    total = hashlib.sha256(f"{status.st_size} {status.st_mtime_ns}".encode())
    with open(path, "rb") as file:
        for position in range(0, status.st_size, max(status.st_size // 64, 1)):
            file.seek(position)
            total.update(file.read(4096))
    return total.hexdigest()[:16]


def inside_cache_layout(folder: Path) -> Path:
    """The snapshot in a `models--organisation--name` folder of the hub cache; any other folder as it is."""
    snapshots = folder / "snapshots"
    if (folder / "config.json").is_file() or not snapshots.is_dir():
        return folder
    ref = folder / "refs" / "main"
    revisions = [ref.read_text().strip()] if ref.is_file() else sorted(os.listdir(snapshots))
    return snapshots / revisions[0] if revisions else folder


def cached_snapshot(name: str) -> Path | None:
    """The complete snapshot of a hub model in the local Hugging Face cache, if there is one."""
    try:
        folder = Path(huggingface_hub.snapshot_download(name, cache_dir=hub_cache(), local_files_only=True))
        weight_files(name, folder)
    except (OSError, ValueError):  # not there, or only in part
        return None
    return folder if (folder / "config.json").is_file() and any(folder.glob("tokenizer*")) else None


def hub_cache() -> str:
    return huggingface_hub.constants.HF_HUB_CACHE


def hub_status(name: str) -> str:
    """`ok`, or why not, decided within HUB_PROBE_SECONDS even where the network swallows every packet."""
    if huggingface_hub.constants.is_offline_mode():
        return "was not asked (HF_HUB_OFFLINE is set)"
    answer = ["is not reachable"]

    def ask() -> None:
        with contextlib.suppress(Exception):  # whatever a proxy or a captive portal may answer
            answer[0] = ask_hub(name)

    thread = threading.Thread(target=ask, daemon=True)  # name resolution alone can hang for longer
    thread.start()
    thread.join(HUB_PROBE_SECONDS + 0.5)
    return answer[0]


def ask_hub(name: str) -> str:
    """One small request about a model."""
    try:
        info = huggingface_hub.HfApi().model_info(name, timeout=HUB_PROBE_SECONDS)
    except RepositoryNotFoundError:
        return "knows no such model, or not for you"
    files = {sibling.rfilename for sibling in info.siblings or []}
    return "ok" if {WEIGHTS, INDEX} & files else "has no safetensors of it"


def hub_folder(name: str) -> Path:
    """A hub model's snapshot: from the cache, else downloaded (safetensors and text files only)."""
    if folder := cached_snapshot(name):
        return folder
    if (status := hub_status(name)) != "ok":
        raise ModelError(
            f"model {name}: no such folder, not in the Hugging Face cache, and the hub {status}; "
            "check the name and the network, or use --pair packaged"
        )
    try:
        with packaged.one_line_errors(Path(hub_cache())):
            return Path(huggingface_hub.snapshot_download(
                name, cache_dir=hub_cache(), ignore_patterns=["*/*", "consolidated*"],
                allow_patterns=["*.safetensors", "*.json", "*.txt", "*.jinja"],
            ))  # fmt: skip
    except (HfHubHTTPError, ValueError, OSError) as error:
        raise ModelError(f"model {name}: its download failed ({brief(error)}); run again to resume") from error


def build_pair(names: Sequence[str], folders: Sequence[Path], reason: str) -> Pair:
    """Open the checkpoints and check that they belong together."""
    tokenizer = load_tokenizer(names[0], folders[0])
    target, *drafts = [open_checkpoint(name, folder, tokenizer) for name, folder in zip(names, folders, strict=True)]
    warnings = [] if tokenizer.chat_template else [f"{names[0]} has no chat template; prompts are used as they are"]
    for draft in drafts:
        check_shared_tokenizer(target, draft, tokenizer)
        if draft.num_parameters > target.num_parameters:
            warnings.append(f"the draft {draft.name} is larger than the target {target.name}; expect to lose time")
    description = f"{' + '.join(names)} ({reason})"
    return Pair(target, drafts[0] if drafts else None, tokenizer, description, tuple(warnings))
