"""A checkpoint folder (config, safetensors, tokenizer) opened lazily, and the pair of target and draft.

Nothing here decodes or downloads, no pickle is read, and no code that comes with a checkpoint is run. Weights stay
memory-mapped until a caller asks for a tensor, so opening a model costs milliseconds.
"""

import hashlib
import json
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from cache import cache_folder

if TYPE_CHECKING:  # importing it takes two seconds, which a start that decodes with our own forward need not spend
    from transformers import PreTrainedModel

SAMPLE_BYTES = 1024  # of each tensor, at its start and in its middle, that enter a digest
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}  # for every from_pretrained


class ModelError(ValueError):
    """What a user can fix about a model, in one line that names the model and the remedy."""


def brief(error: BaseException) -> str:
    """The first line of somebody else's error text, short enough for one line of ours."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return text if len(text) <= 160 else text[:157] + "..."


def damaged(name: str, file: Path, error: Exception) -> ModelError:
    return ModelError(f"model {name}: {file} is damaged ({brief(error)}); {get_again(file.parent)}")


def get_again(folder: Path) -> str:
    """The remedy for an incomplete folder: of a cache all must go, or the hub's would link the same file again."""
    of_the_hub = folder.parent.name == "snapshots"
    if not of_the_hub and not folder.is_relative_to(cache_folder()):
        return f"check that {folder} is the folder of a model, and complete"
    return f"delete the folder {folder.parents[1] if of_the_hub else folder} and get the model again"


class SafetensorsFolder(Mapping[str, Tensor]):
    """Tensors of a safetensors checkpoint, one file or many, read when asked for."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.files = weight_files(name, folder)
        self.headers = {file: self._header(file) for file in self.files}
        self.place = {key: file for file, header in self.headers.items() for key in header}

    def _header(self, file: Path) -> dict[str, dict[str, Any]]:
        """Tensor name -> dtype, shape and offsets; raises if the file is not exactly as long as it must be."""
        try:
            with safe_open(file, "pt"):  # checks the header and the length
                pass
            with open(file, "rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                header = json.loads(stream.read(length))
        except (SafetensorError, OSError, ValueError, struct.error) as error:
            raise damaged(self.name, file, error) from error
        return {key: value for key, value in header.items() if key != "__metadata__"}

    def __getitem__(self, key: str) -> Tensor:
        file = self.place[key]
        try:
            with safe_open(file, "pt") as opened:  # anew each time: the tensor's pages leave memory with it
                return opened.get_tensor(key)
        except SafetensorError as error:
            raise damaged(self.name, file, error) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self.place)

    def __len__(self) -> int:
        return len(self.place)

    @property
    def num_parameters(self) -> int:
        return sum(prod(entry["shape"]) for header in self.headers.values() for entry in header.values())

    def digest(self) -> str:
        """16 hex digits over config.json and, of each file, its size, header, and 2 KiB of every tensor.

        It tells checkpoints apart in a few milliseconds; it is not a checksum of every byte.
        """
        total = hashlib.sha256((self.folder / "config.json").read_bytes())
        for file, header in self.headers.items():
            total.update(f"{file.name} {file.stat().st_size} {json.dumps(header, sort_keys=True)}".encode())
            with open(file, "rb") as stream:
                data = 8 + struct.unpack("<Q", stream.read(8))[0]
                for entry in header.values():
                    start, end = entry["data_offsets"]
                    for position in (start, (start + end) // 2):
                        stream.seek(data + position)
                        total.update(stream.read(min(SAMPLE_BYTES, end - position)))
        return total.hexdigest()[:16]


def weight_files(name: str, folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, all present."""
    index = folder / INDEX
    if index.is_file():
        try:
            files = sorted({folder / file for file in json.loads(index.read_text("utf-8"))["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise damaged(name, index, error) from error
    else:
        files = [folder / WEIGHTS]
    for file in files:
        if not file.is_file():
            if any(path for pattern in PICKLES for path in folder.glob(pattern)):
                raise ModelError(
                    f"model {name}: {folder} has pickled weights only, which are never loaded; "
                    "save it again with save_pretrained(), which writes safetensors"
                )
            raise ModelError(f"model {name}: {file} is missing; {get_again(folder)}")
    return files


@dataclass(frozen=True)
class Checkpoint:
    """One model on disk or in memory: everything a decoder needs, nothing loaded yet."""

    name: str  # how a person calls it: hub id, path, "packaged:qwen2.5-coder-1.5b-instruct", "tiny-target"
    config: PretrainedConfig
    folder: Path | None  # holds config.json and the safetensors files; None for a model in memory
    end_token_ids: tuple[int, ...]
    digest: str  # identifies the weights, see SafetensorsFolder.digest
    num_parameters: int
    weights: Mapping[str, Tensor] = field(repr=False, compare=False)

    def tensors(self) -> Mapping[str, Tensor]:
        """Hugging Face name -> tensor, memory-mapped; a model with a tied output has no `lm_head.weight`."""
        return self.weights

    def hf_model(self, dtype: torch.dtype) -> "PreTrainedModel":
        """The stock transformers model, in eval mode, that stops on all of `end_token_ids`."""
        with torch.random.fork_rng(devices=[]):  # its constructor draws weights that are then overwritten
            if self.folder is None:
                model = AutoModelForCausalLM.from_config(self.config, dtype=dtype)
                model.load_state_dict(self.weights)
            else:
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    self.folder, dtype=dtype, use_safetensors=True, output_loading_info=True, **LOCAL
                )
                model, report = loaded
                if missing := sorted(report["missing_keys"]):
                    raise ModelError(f"model {self.name}: no tensor {missing[0]}; {get_again(self.folder)}")
        model.generation_config.eos_token_id = list(self.end_token_ids)
        return model.eval()


@dataclass(frozen=True)
class Pair:
    """A target, an optional draft, and the tokenizer that they share."""

    target: Checkpoint
    draft: Checkpoint | None
    tokenizer: PreTrainedTokenizerBase
    description: str  # one line: what was chosen and why
    warnings: tuple[str, ...] = ()  # one line each

    def encode(self, prompt: str, raw: bool = False) -> list[int]:
        """Token ids of a prompt, through the chat template unless `raw` or the tokenizer has none."""
        if not prompt:
            raise ValueError("the prompt is empty; give it at least one character")
        prompt = re.sub("[\ud800-\udfff]", "\ufffd", prompt)  # bytes that were not UTF-8 cannot be tokenized
        if raw or not self.tokenizer.chat_template:
            ids = self.tokenizer.encode(prompt)
        else:
            turn = [{"role": "user", "content": prompt}]
            text = self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
            ids = self.tokenizer.encode(text, add_special_tokens=False)  # the template wrote them
        if not ids:
            raise ValueError("the prompt has no tokens; give it at least one visible character")
        return ids


def open_checkpoint(name: str, folder: Path, tokenizer: PreTrainedTokenizerBase) -> Checkpoint:
    """Read the config and the safetensors headers of a folder; damage shows here, not in the middle of a run."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"model {name}: {folder} has no config.json; pass the folder that save_pretrained() wrote")
    try:
        config = AutoConfig.from_pretrained(folder, **LOCAL)
    except Exception as error:  # the library raises what a broken file makes it stumble over
        raise damaged(name, folder / "config.json", error) from error
    weights = SafetensorsFolder(name, folder)
    ends = end_token_ids(name, folder, config, tokenizer)
    return Checkpoint(name, config, folder, ends, weights.digest(), weights.num_parameters, weights)


def end_token_ids(
    name: str, folder: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """Union of what generation_config, config and tokenizer call the end, in that order."""
    found: list[int] = []
    sources = [config.eos_token_id, tokenizer.eos_token_id]
    if (folder / "generation_config.json").is_file():
        try:
            sources.insert(0, GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id)
        except Exception as error:
            raise damaged(name, folder / "generation_config.json", error) from error
    for source in sources:
        found += source if isinstance(source, list) else [] if source is None else [source]
    return tuple(dict.fromkeys(found))


def load_tokenizer(name: str, folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint folder."""
    try:
        return AutoTokenizer.from_pretrained(folder, **LOCAL)
    except Exception as error:
        raise ModelError(
            f"model {name}: no readable tokenizer in {folder} ({brief(error)}); {get_again(folder)}"
        ) from error


def check_shared_tokenizer(target: Checkpoint, draft: Checkpoint, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a draft whose token ids mean other tokens: equal sizes do not make equal maps."""
    assert target.folder and draft.folder
    if not same_files(target.folder, draft.folder, ("tokenizer.json", "tokenizer_config.json")):
        ours, theirs = tokenizer.get_vocab(), load_tokenizer(draft.name, draft.folder).get_vocab()
        if differing := set(ours.items()) ^ set(theirs.items()):
            first = min(index for _, index in differing)
            in_target, in_draft = (
                [token for token, index in vocab.items() if index == first] for vocab in (ours, theirs)
            )
            raise ModelError(
                f"target {target.name} and draft {draft.name} do not share a tokenizer: token id {first} is "
                f"{''.join(in_target[:1])!r} in the target and {''.join(in_draft[:1])!r} in the draft; "
                "use a draft of the target's family"
            )
    if draft.config.vocab_size <= (last := max(tokenizer.get_vocab().values())):
        raise ModelError(
            f"draft {draft.name} has {draft.config.vocab_size} embedding rows, too few for token id {last}; use another draft"
        )


def same_files(first: Path, second: Path, names: tuple[str, ...]) -> bool:
    """Whether both folders hold all of these files with the same bytes."""
    return all(
        (first / name).is_file()
        and (second / name).is_file()
        and (first / name).read_bytes() == (second / name).read_bytes()
        for name in names
    )
