"""One lean decoder for the Llama-shaped families: Qwen2/2.5, Qwen3, Llama (SmolLM2), Mistral without a sliding window.

The layers exist in two forms: the kernels of native.py (CPU, fp32 activations over bf16, fp32 or quantised weights) and the
PyTorch operators of layers.py. The decoder owns its KV cache and knows nothing of speculation:
a pass is given tokens, their positions, and which rows of the pass each row may see.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

import native
from kv_cache import KVCache
from layers import TorchLinear, attend, rms_norm, rotate
from quantize import QuantizedWeight, quantize

FAMILIES = ("qwen2", "qwen3", "llama", "mistral")
WEIGHTS: dict[str, torch.dtype | int] = {
    "bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16, "int8": 8, "int4": 4}
PREFILL_ROWS = 512  # rows of a prefill pass; bounds the working memory at any prompt length


class UnsupportedModel(ValueError):
    """The model's architecture is not one this decoder computes; the message names what is in the way."""


class LinearLayer(Protocol):
    """What both forms of a linear layer offer."""

    @property
    def nbytes(self) -> int: ...
    def rows(self, index: Tensor) -> Tensor: ...
    def __call__(self, x: Tensor, norm: Tensor | None = None, eps: float = 0.0, swiglu: bool = False,
                 residual: Tensor | None = None) -> Tensor: ...


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a model; `from_hf` reads it from a transformers configuration."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_length: int  # positions

    @classmethod
    def from_hf(cls, config: Any) -> DecoderConfig:
        """Read a transformers configuration. Raises UnsupportedModel by name for what is not computed here."""
        family = config.model_type
        if family not in FAMILIES:
            raise UnsupportedModel(f"architecture '{family}' is not supported; use one of {', '.join(FAMILIES)}")
        window = getattr(config, "sliding_window", None)
        uses_window = getattr(config, "use_sliding_window", window is not None)
        if window is not None and uses_window and window < config.max_position_embeddings:
            raise UnsupportedModel(f"sliding-window attention ({window} tokens) is not supported; use a model without it")
        rope = dict(getattr(config, "rope_parameters", None) or {})
        if rope.get("rope_type", "default") != "default":
            raise UnsupportedModel(f"rope type '{rope['rope_type']}' is not supported; use a model with the default one")
        if config.hidden_act != "silu":
            raise UnsupportedModel(f"activation '{config.hidden_act}' is not supported; use a model with silu")
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(config.vocab_size, config.hidden_size, config.num_hidden_layers, config.num_attention_heads,
                   config.num_key_value_heads, head_dim, rope.get("rope_theta", 10000.0), config.rms_norm_eps,
                   config.max_position_embeddings)


@dataclass(frozen=True)
class Layer:
    """The weights of one decoder layer."""

    qkv: LinearLayer
    out: LinearLayer
    gate_up: LinearLayer
    down: LinearLayer
    input_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None


class QuantizedEmbedding:
    """Token embeddings at the precision of a quantised model: 4-bit values two to a byte."""

    def __init__(self, weight: QuantizedWeight) -> None:
        self.bits, self.group = weight.bits, weight.group
        values = weight.values
        self.values = values[:, ::2] | values[:, 1::2] << 4 if weight.bits == 4 else values
        self.scales, self.minimums = weight.scales, weight.minimums

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes + self.minimums.nbytes

    def __getitem__(self, index: Tensor) -> Tensor:
        values = self.values[index]
        if self.bits == 4:
            values = torch.stack([values & 15, values >> 4], -1).flatten(1)
        return QuantizedWeight(values, self.scales[index], self.minimums[index], self.bits, self.group).dequantize()


def required(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """A tensor of the checkpoint. Raises UnsupportedModel where it is missing."""
    if name not in tensors:
        raise UnsupportedModel(f"the checkpoint has no tensor '{name}'; it is incomplete or of another architecture")
    return tensors[name]


class Decoder:
    """A decoder with its KV cache.

    weights: 'bf16', 'fp32', 'fp16' (as they are) or 'int8', 'int4' (weight-only; activations as in bf16).
    backend: 'native', 'torch', or 'auto' (native on a CPU where it can be built). `backend_note` says why not.
    """

    def __init__(self, config: DecoderConfig, tensors: Mapping[str, Tensor], *, weights: str = "bf16",
                 device: str | torch.device = "cpu", backend: str = "auto") -> None:
        if weights not in WEIGHTS:
            raise ValueError(f"weights '{weights}' are not supported; choose one of {', '.join(WEIGHTS)}")
        self.config, self.weights, self.device = config, weights, torch.device(device)
        self.max_length = config.max_length
        self.backend, self.backend_note = self._choose_backend(backend)
        kind = WEIGHTS[weights]
        self.dtype = kind if isinstance(kind, torch.dtype) else torch.bfloat16
        self.activations = torch.float32 if self.backend == "native" else self.dtype
        with torch.inference_mode():
            self._load(tensors)
            self.cache = KVCache(config.layers, config.kv_heads, config.head_dim, self.dtype, self.device)
            self._extend_rope(self.cache.capacity)
        if self.backend == "native":
            native.set_threads(torch.get_num_threads())
            self._native_layers = native.NativeLayers(self.layers, config.heads, config.kv_heads, config.head_dim, config.rms_norm_eps)

    def _choose_backend(self, wanted: str) -> tuple[str, str]:
        if wanted not in ("auto", "native", "torch"):
            raise ValueError(f"backend '{wanted}' is not known; choose auto, native or torch")
        if wanted == "torch" or self.device.type != "cpu" or self.weights == "fp16":
            if wanted == "native":
                raise ValueError("the native kernels run on a CPU in bf16, fp32, int8 or int4; choose --backend torch")
            return "torch", ""
        try:
            native.load()
            if self.config.head_dim % 16:
                raise native.NativeUnavailable(f"head size {self.config.head_dim} is not a multiple of 16")
            return "native", ""
        except native.NativeUnavailable as error:
            if wanted == "native":
                raise ValueError(f"the native kernels are not available ({error}); choose --backend torch") from None
            return "torch", str(error)

    # ---- weights ----

    def _linear(self, tensors: Mapping[str, Tensor], *names: str) -> LinearLayer:
        """One layer from the concatenated rows of several."""
        weights = [required(tensors, f"{name}.weight") for name in names]
        biases = [tensors[f"{name}.bias"] for name in names if f"{name}.bias" in tensors]
        return self._pack(torch.cat(weights) if len(weights) > 1 else weights[0], torch.cat(biases) if biases else None)

    def _pack(self, weight: Tensor, bias: Tensor | None = None) -> LinearLayer:
        kind = WEIGHTS[self.weights]
        ready: Tensor | QuantizedWeight = quantize(weight, kind) if isinstance(kind, int) else weight.to(kind)
        if self.backend == "native":
            return native.NativeLinear(ready, bias)
        return TorchLinear(ready, bias, self.dtype, self.device)

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        def vector(name: str) -> Tensor | None:
            return tensors[name].to(self.device, torch.float32).contiguous() if name in tensors else None

        def norm(name: str) -> Tensor:
            return required(tensors, name).to(self.device, torch.float32).contiguous()

        self.layers: list[Layer] = []
        for index in range(self.config.layers):
            prefix = f"model.layers.{index}."
            attention, mlp = prefix + "self_attn.", prefix + "mlp."
            self.layers.append(Layer(
                qkv=self._linear(tensors, *(attention + part for part in ("q_proj", "k_proj", "v_proj"))),
                out=self._linear(tensors, attention + "o_proj"),
                gate_up=self._linear(tensors, mlp + "gate_proj", mlp + "up_proj"),
                down=self._linear(tensors, mlp + "down_proj"),
                input_norm=norm(prefix + "input_layernorm.weight"),
                mlp_norm=norm(prefix + "post_attention_layernorm.weight"),
                q_norm=vector(attention + "q_norm.weight"), k_norm=vector(attention + "k_norm.weight")))
        self.final_norm = norm("model.norm.weight")
        embedding = required(tensors, "model.embed_tokens.weight")
        tied = "lm_head.weight" not in tensors
        self.head = self._pack(embedding if tied else tensors["lm_head.weight"])
        kind = WEIGHTS[self.weights]
        self.embedding: Tensor | QuantizedEmbedding | None = None
        if isinstance(kind, int):
            quantized = quantize(embedding, kind)
            self.embedding = QuantizedEmbedding(QuantizedWeight(
                quantized.values.to(self.device), quantized.scales.to(self.device), quantized.minimums.to(self.device),
                kind, quantized.group))
        elif not tied or getattr(self.head, "kernel", None) is not None:
            self.embedding = embedding.to(self.device, kind).clone()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights held."""
        layers = sum(part.nbytes for layer in self.layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down))
        return layers + self.head.nbytes + (self.embedding.nbytes if self.embedding is not None else 0)

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that one pass reads: all but the embedding table."""
        return self.weight_bytes - (self.embedding.nbytes if self.embedding is not None else 0)

    # ---- passes ----

    def _extend_rope(self, positions: int) -> None:
        """Rotary angles (positions, head_dim / 2) in fp32, as transformers computes them."""
        half = torch.arange(0, self.config.head_dim, 2, dtype=torch.int64).float() / self.config.head_dim
        angles = torch.outer(torch.arange(positions).float(), 1.0 / self.config.rope_theta**half)
        self.cos, self.sin = angles.cos().to(self.device), angles.sin().to(self.device)

    def reserve(self, slots: int) -> None:
        """Empty the cache and make room for `slots` slots."""
        with torch.inference_mode():
            self.cache.reserve(slots)
            if self.cos.shape[0] < self.cache.capacity:
                self._extend_rope(self.cache.capacity)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor | None = None, visible: Tensor | None = None,
                num_logits: int | None = None) -> Tensor:
        """Logits of the last `num_logits` rows (all by default), (rows, V) fp32; appends W slots to the cache.

        token_ids (W,) int64. positions (W,) int64: by default they follow the cache. visible (W, W) bool: may row i see
        row j of this pass; by default a chain. Every row sees the whole cache. Raises ValueError when the cache is full or no
        token is given.
        """
        rows = token_ids.shape[0]
        if not rows:
            raise ValueError("a pass needs at least one token")
        self.cache.check_room(rows)
        token_ids = token_ids.to(self.device)
        start = self.cache.length
        slots = torch.arange(start, start + rows, device=self.device)
        positions = slots if positions is None else positions.to(self.device)
        num_logits = rows if num_logits is None else num_logits
        if self.backend == "native":
            seen = None if visible is None else visible.to(torch.uint8).contiguous()
            hidden = self._native_layers(self._embed(token_ids), self.cache.keys, self.cache.values, start, positions, seen,
                                         self.cos, self.sin)
        else:
            mask = self._mask(rows, visible)
            hidden = self.step(token_ids, positions, slots, mask)
        self.cache.length = start + rows
        if not num_logits:
            return hidden.new_empty(0, self.config.vocab_size)
        logits = self.head(hidden[rows - num_logits:], norm=self.final_norm, eps=self.config.rms_norm_eps)
        return logits.float()

    def prefill(self, token_ids: Tensor, num_logits: int = 1) -> Tensor:
        """Feed many tokens in passes of PREFILL_ROWS rows; logits (num_logits, V) of the last ones only."""
        chunks = token_ids.split(PREFILL_ROWS)
        for chunk in chunks[:-1]:
            self.forward(chunk, num_logits=0)
        return self.forward(chunks[-1], num_logits=num_logits)

    def _embed(self, token_ids: Tensor) -> Tensor:
        rows = self.head.rows(token_ids) if self.embedding is None else self.embedding[token_ids]
        return rows.to(self.activations).contiguous()

    def _mask(self, rows: int, visible: Tensor | None) -> Tensor:
        """(W, visible length) bool: the cache, and what each row may see of this pass."""
        start = self.cache.length
        mask = torch.zeros(rows, self.cache.visible_length(rows), dtype=torch.bool, device=self.device)
        mask[:, :start] = True
        chain = torch.ones(rows, rows, dtype=torch.bool, device=self.device).tril_()
        mask[:, start:start + rows] = chain if visible is None else visible.to(self.device)
        return mask

    def step(self, token_ids: Tensor, positions: Tensor, slots: Tensor, mask: Tensor) -> Tensor:
        """The layers as one graph of PyTorch operators: no shape or branch depends on a tensor's values. -> (W, hidden)"""
        config, eps, rows = self.config, self.config.rms_norm_eps, token_ids.shape[0]
        x, length = self._embed(token_ids), mask.shape[1]
        cos, sin = self.cos[positions], self.sin[positions]
        sizes = [config.heads, config.kv_heads, config.kv_heads]
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(x, norm=layer.input_norm, eps=eps).view(rows, -1, config.head_dim)
            q, k, v = qkv.split(sizes, dim=1)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = rms_norm(q, layer.q_norm, eps), rms_norm(k, layer.k_norm, eps)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            self.cache.append(index, slots, k.transpose(0, 1).to(self.dtype), v.transpose(0, 1))
            mixed = attend(q, self.cache.keys[index, :, :length], self.cache.values[index, :, :length], mask)
            x = layer.out(mixed, residual=x)
            gate_up = layer.gate_up(x, norm=layer.mlp_norm, eps=eps)
            x = layer.down(gate_up, swiglu=True, residual=x)
        return x
