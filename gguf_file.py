"""GGUF files: read the header, dequantise the tensors to bf16 safetensors, rebuild config and tokenizer.

Our own header reader, because it takes one second where the `gguf` package takes ten (its arrays of 150,000 tokens
become as many NumPy views), and because a truncated file must be told from a good one without reading it. The block
formats themselves (Q4_K, Q5_0, ...) are the package's. Only Qwen2 and Qwen3 are converted: Llama files hold permuted
attention weights, and their tokenizers come in many kinds; anything unknown is refused by name rather than guessed.
"""

import json
import mmap
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2Tokenizer,
    Qwen3Config,
)

from checkpoint import ModelError

ARCHITECTURES: dict[str, type[Qwen2Config] | type[Qwen3Config]] = {"qwen2": Qwen2Config, "qwen3": Qwen3Config}
ROWS_AT_A_TIME = 8192  # bounds the fp32 copy of the embedding while it is dequantised

FIXED_SIZE = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # token types

OUTSIDE_LAYERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INSIDE_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class GGUFTensor:
    name: str
    shape: tuple[int, ...]  # in PyTorch's order
    quantization: gguf.GGMLQuantizationType
    offset: int  # from the start of the file
    nbytes: int


class GGUFFile:
    """Metadata and tensor table of a GGUF file; raises ModelError if any byte that they promise is missing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.position = 0
            self.metadata, self.tensors = self._read_header()
        except (struct.error, ValueError, KeyError, OverflowError, MemoryError, IndexError) as error:
            raise damaged(path, str(error)) from error
        if any(tensor.offset + tensor.nbytes > len(self.data) for tensor in self.tensors):
            raise damaged(path, "it ends before its last tensor")

    def _read_header(self) -> tuple[dict[str, Any], tuple[GGUFTensor, ...]]:
        magic, version, tensor_count, field_count = self._unpack("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError("no GGUF header of version 2 or 3")
        metadata: dict[str, Any] = {}
        for _ in range(field_count):
            key = self._string()
            metadata[key] = self._value(*self._unpack("I"))
        table = [self._tensor_entry() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        start = -(-self.position // alignment) * alignment
        return metadata, tuple(self._place(start, *entry) for entry in table)

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self.data, self.position)
        self.position += struct.calcsize("<" + layout)
        return values

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        if self.position + length > len(self.data):
            raise ValueError("a text runs over the end of the file")
        self.position += length
        return self.data[self.position - length : self.position].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind in FIXED_SIZE:
            return self._unpack(FIXED_SIZE[kind])[0]
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            raise ValueError(f"unknown value type {kind}")
        element, count = self._unpack("IQ")
        if count > len(self.data):
            raise ValueError("an array is larger than the file")
        if element in FIXED_SIZE:
            return list(self._unpack(f"{count}{FIXED_SIZE[element]}"))
        return [self._value(element) for _ in range(count)]

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (rank,) = self._unpack("I")
        shape = tuple(reversed(self._unpack(f"{rank}Q")))
        quantization, offset = self._unpack("IQ")
        return name, shape, quantization, offset

    def _place(self, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
        quantization = gguf.GGMLQuantizationType(kind)
        block, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
        return GGUFTensor(name, shape, quantization, start + offset, prod(shape) // block * block_bytes)

    def rows(self, tensor: GGUFTensor) -> Iterator[np.ndarray]:
        """The tensor dequantised to fp32, some rows at a time."""  # each (rows, columns)
        raw = np.frombuffer(self.data, np.uint8, tensor.nbytes, tensor.offset)
        matrix = raw.reshape(prod(tensor.shape[:-1]), -1)  # (rows, bytes of a row)
        for first in range(0, len(matrix), ROWS_AT_A_TIME):
            yield gguf.dequantize(matrix[first : first + ROWS_AT_A_TIME], tensor.quantization)


def damaged(path: Path, reason: str) -> ModelError:
    return ModelError(f"{path} is damaged or not a GGUF file ({reason}); download it again")


def unsupported(path: Path, reason: str) -> ModelError:
    return ModelError(f"{path} is unsupported: {reason}; use a Qwen2.5 or Qwen3 GGUF, or a safetensors folder")


def convert_gguf(path: Path, folder: Path, check_space: Callable[[int], None] = lambda needed: None) -> None:
    """Write `folder` (config, bf16 safetensors, tokenizer) from a GGUF file; it appears complete or not at all.

    `check_space` is called with the number of bytes to be written, before the first one is.
    """
    source = GGUFFile(path)
    check_supported(source)
    config = build_config(source)
    names = checked_names(source, config)
    tokenizer = build_tokenizer(source)
    check_space(2 * sum(prod(tensor.shape) for tensor in source.tensors))
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir(parents=True)
    try:
        config.save_pretrained(partial)
        end = dict.fromkeys([tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")])
        GenerationConfig(eos_token_id=list(end), pad_token_id=config.pad_token_id).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        write_safetensors(source, names, partial / "model.safetensors")
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # nothing is left of a failed one, least of all on a full disk


def check_supported(source: GGUFFile) -> None:
    """Refuse by name every file whose meaning this converter does not carry over."""
    fields = source.metadata
    architecture = fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise unsupported(source.path, f"architecture {architecture!r}")
    if fields.get("tokenizer.ggml.model") != "gpt2" or fields.get("tokenizer.ggml.pre") != "qwen2":
        raise unsupported(source.path, f"tokenizer {fields.get('tokenizer.ggml.pre')!r}")
    if fields.get(f"{architecture}.rope.scaling.type", "none") != "none":
        raise unsupported(source.path, "scaled rotary positions")
    if fields.get("split.count", 1) > 1:
        raise unsupported(source.path, "it is one piece of a split file")


def build_config(source: GGUFFile) -> PretrainedConfig:
    """The Hugging Face config of the file; tied output when it holds no output tensor of its own."""
    architecture = source.metadata["general.architecture"]
    embedding = next((tensor for tensor in source.tensors if tensor.name == "token_embd.weight"), None)
    if embedding is None:
        raise damaged(source.path, "no token_embd.weight")

    def field(key: str) -> Any:
        if f"{architecture}.{key}" not in source.metadata:
            raise damaged(source.path, f"no {architecture}.{key}")
        return source.metadata[f"{architecture}.{key}"]

    token_ids: dict[str, Any] = {name: source.metadata.get(f"tokenizer.ggml.{key}_token_id")
                 for name, key in (("eos_token_id", "eos"), ("pad_token_id", "padding"))}  # fmt: skip
    extra: dict[str, Any] = {"head_dim": field("attention.key_length")} if architecture == "qwen3" else {}
    return ARCHITECTURES[architecture](
        vocab_size=embedding.shape[0],
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"),
        max_position_embeddings=field("context_length"),
        rms_norm_eps=shortest_float(field("attention.layer_norm_rms_epsilon")),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in source.tensors),
        architectures=[f"{architecture.capitalize()}ForCausalLM"],
        dtype="bfloat16",
        **token_ids,
        **extra,
    )


def shortest_float(value: float) -> float:
    """1e-06 for the fp32 value 9.999999974752427e-07: the decimal that the file's author wrote."""
    return float(str(np.float32(value)))


def checked_names(source: GGUFFile, config: PretrainedConfig) -> dict[str, str]:
    """GGUF tensor name -> Hugging Face name, for exactly the tensors that the stock model has."""
    with torch.device("meta"):
        expected = {
            key: tuple(value.shape) for key, value in AutoModelForCausalLM.from_config(config).state_dict().items()
        }
    if config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
    names = {tensor.name: huggingface_name(tensor.name) for tensor in source.tensors}
    found = {names[tensor.name]: tensor.shape for tensor in source.tensors}
    for name in expected.keys() | found.keys():
        if expected.get(name) != found.get(name):
            raise unsupported(
                source.path, f"tensor {name}: {found.get(name)} in the file, {expected.get(name)} expected"
            )
    return names


def huggingface_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; an unknown name stays as it is."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer and layer[2] in INSIDE_LAYERS:
        return f"model.layers.{layer[1]}.{INSIDE_LAYERS[layer[2]]}.{layer[3]}"
    stem, _, suffix = name.rpartition(".")
    return f"{OUTSIDE_LAYERS[stem]}.{suffix}" if stem in OUTSIDE_LAYERS else name


def build_tokenizer(source: GGUFFile) -> Qwen2Tokenizer:
    """Qwen's own tokenizer class (NFC, its digit-by-digit split) over the vocabulary and merges of the file."""
    fields = source.metadata
    try:
        tokens, types, merges = (fields[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type", "merges"))
        vocabulary = {token: index for index, token in enumerate(tokens) if types[index] != UNUSED}
        eos, pad = tokens[fields["tokenizer.ggml.eos_token_id"]], fields.get("tokenizer.ggml.padding_token_id")
        pairs: list[Any] = [tuple(merge.split(" ")) for merge in merges]
        tokenizer = Qwen2Tokenizer(
            vocab=vocabulary,
            merges=pairs,
            eos_token=eos,
            pad_token=tokens[pad] if pad is not None else eos,
            unk_token=None,  # type: ignore[arg-type]
            chat_template=fields.get("tokenizer.chat_template"),
            model_max_length=fields[f"{fields['general.architecture']}.context_length"],
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise damaged(source.path, f"its tokenizer: {error}") from error
    whole = [AddedToken(token, special=types[index] == CONTROL, normalized=False)
             for token, index in vocabulary.items() if types[index] in (CONTROL, USER_DEFINED)]  # fmt: skip
    tokenizer.add_tokens(whole)
    if tokenizer.get_vocab() != vocabulary:
        raise unsupported(source.path, "its token ids are not those of a Qwen tokenizer")
    return tokenizer


def bf16_bytes(rows: np.ndarray) -> memoryview:
    """fp32 rows rounded to bf16, in memory order."""
    return torch.from_numpy(np.require(rows, requirements="W")).bfloat16().view(torch.int16).numpy().data


def write_safetensors(source: GGUFFile, names: dict[str, str], path: Path) -> None:
    """Dequantise tensor by tensor into a safetensors file of bf16; memory stays at one piece of one tensor."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in source.tensors:
        start, end = end, end + 2 * prod(tensor.shape)
        header[names[tensor.name]] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as sink:
        sink.write(struct.pack("<Q", len(text)) + text)
        for tensor in tqdm(source.tensors, desc=f"converting {source.path.name}", unit="tensor", leave=False):
            sink.writelines(bf16_bytes(rows) for rows in source.rows(tensor))
        sink.flush()
        os.fsync(sink.fileno())
