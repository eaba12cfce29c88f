"""The lean decoder computes what transformers computes, on both backends, and refuses by name what it does not compute."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scripted import VOCAB, decoder, tiny
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

import native
from quantize import quantize
from transformer import PREFILL_ROWS, Decoder, DecoderConfig, QuantizedEmbedding, UnsupportedModel

SIZES: dict[str, Any] = {"vocab_size": 103, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2,
                         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 640}
CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen2": (Qwen2Config, {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}),
    "qwen3": (Qwen3Config, {"head_dim": 32}),
    "llama": (LlamaConfig, {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4, "rms_norm_eps": 1e-3}),
    "mistral": (MistralConfig, {"sliding_window": None, "head_dim": 16}),
}
IDS = torch.randint(0, 103, (600,), generator=torch.Generator().manual_seed(9))
BACKENDS = ["native", "torch"]


@functools.cache
def reference(family: str, tied: bool) -> tuple[Any, Tensor]:
    """A random model of transformers in fp32 and its logits for IDS[:600]."""
    kind, extra = CONFIGS[family]
    config = kind(**SIZES | extra, tie_word_embeddings=tied)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config).eval()
        for name, parameter in model.named_parameters():
            parameter.data.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    with torch.no_grad():
        return model, model(IDS[None]).logits[0]


def ours(family: str, tied: bool, backend: str, weights: str = "fp32") -> Decoder:
    model, _ = reference(family, tied)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    made = Decoder(DecoderConfig.from_hf(model.config), tensors, weights=weights, backend=backend)
    made.reserve(640)
    return made


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_equal_those_of_transformers(family: str, tied: bool, backend: str) -> None:
    """Caught: a rotary base, norm or bias of another family; heads folded in another order; positions off by one."""
    made, (_, expected) = ours(family, tied, backend), reference(family, tied)
    assert made.backend == backend and made.max_length == 640
    logits = made.prefill(IDS, num_logits=80)  # in two passes, across the block
    assert relative(logits, expected[520:]) < 1e-4
    made.cache.crop(37)
    made.forward(IDS[90:97])  # to be rejected
    made.cache.crop(37)
    for begin, end in ((37, 38), (38, 45), (45, 60), (60, 61)):
        assert relative(made.forward(IDS[begin:end]), expected[begin:end]) < 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_logits_are_those_of_bf16_weights(backend: str) -> None:
    """Caught: weights rounded twice, or a KV cache in a lower precision than the model's."""
    model, _expected = reference("qwen2", False)
    rounded = {name: tensor.bfloat16().float() for name, tensor in model.state_dict().items()}
    exact = Decoder(DecoderConfig.from_hf(model.config), rounded, weights="fp32", backend=backend)
    exact.reserve(640)
    made = ours("qwen2", False, backend, "bf16")
    assert made.cache.keys.dtype == torch.bfloat16
    found, wanted = made.prefill(IDS[:60], num_logits=60), exact.prefill(IDS[:60], num_logits=60)
    assert float((found - wanted).norm() / wanted.norm()) < 0.03


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("weights", "share"), [("int8", 0.36), ("int4", 0.28)])
def test_quantised_decoders_are_those_of_the_restored_weights(weights: str, share: float, backend: str) -> None:
    """Caught: an embedding read with the head's nibble order, or scales of the wrong layer."""
    model, _ = reference("qwen2", True)
    restored = {name: quantize(tensor, int(weights[3])).dequantize() if tensor.dim() == 2 else tensor
                for name, tensor in model.state_dict().items()}
    exact = Decoder(DecoderConfig.from_hf(model.config), restored, weights="fp32", backend=backend)
    exact.reserve(640)
    made = ours("qwen2", True, backend, weights)
    found, expected = made.prefill(IDS[:60], num_logits=60), exact.prefill(IDS[:60], num_logits=60)
    assert float((found - expected).norm() / expected.norm()) < 0.06  # native: inputs in int8; torch: in bf16
    assert made.weight_bytes < ours("qwen2", True, "native").weight_bytes * share or backend == "torch"


def test_a_quantised_embedding_restores_the_rows() -> None:
    """Caught: two values to a byte, taken apart in the wrong order."""
    weight = quantize(torch.randn(20, 64, generator=torch.Generator().manual_seed(1)), 4)
    index = torch.tensor([3, 19, 0, 3])
    assert torch.equal(QuantizedEmbedding(weight)[index], weight.dequantize()[index])
    assert QuantizedEmbedding(weight).nbytes == 20 * 64 // 2 + 20 * 2 * 2


# ---- what a pass may depend on ----


@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8", "int4"])
def test_any_grouping_of_positions_gives_the_same_bits(weights: str) -> None:
    """Caught: a native pass whose rows depend on their number, on the visible length or on where a tile ends."""
    made = decoder("target", weights, "native")
    text = torch.arange(560) * 7 % VOCAB
    made.reserve(600)
    made.prefill(text[:495], num_logits=0)
    whole = made.forward(text[495:535])
    for groups in ([1] * 40, [2] * 20, [3, 5, 7, 11, 13, 1], [17, 23], [40]):
        made.cache.crop(495)
        at, found = 495, []
        for rows in groups:
            found.append(made.forward(text[at:at + rows]))
            at += rows
        assert torch.equal(torch.cat(found), whole), groups
    made.reserve(600)
    for at in range(0, 495, 33):
        made.forward(text[at:at + 33], num_logits=0)
    assert torch.equal(made.forward(text[495:535]), whole), "the prefill's grouping either"


@pytest.mark.parametrize(("weights", "backend"), [("bf16", "native"), ("int4", "native"), ("fp32", "native"), ("fp32", "torch")])
def test_siblings_leave_the_chain_alone_and_are_right_themselves(weights: str, backend: str) -> None:
    """Caught: a chain row that sees a sibling; a sibling at its slot's position instead of its own."""
    made, prompt = decoder("target", weights, backend), torch.arange(50) * 3 % VOCAB
    made.reserve(100)
    made.prefill(prompt)
    chain, siblings = [11, 12, 13, 14], [(1, 90), (1, 91), (3, 92)]
    padded = torch.tensor(chain + [14] * 3)
    expected, slots = made.forward(padded)[:4], made.cache.keys[:, :, 50:54].clone()
    if backend == "native":  # there, without any padding too
        made.cache.crop(50)
        assert torch.equal(made.forward(padded[:4]), expected)
    made.cache.crop(50)
    positions, visible = torch.arange(50, 57), torch.ones(7, 7, dtype=torch.bool).tril()
    for row, (depth, _) in enumerate(siblings, start=4):
        positions[row], visible[row] = 50 + depth, False
        visible[row, :depth] = visible[row, row] = True
    logits = made.forward(torch.tensor(chain + [token for _, token in siblings]), positions, visible)
    assert torch.equal(logits[:4], expected) and torch.equal(made.cache.keys[:, :, 50:54], slots)
    for row, (depth, token) in enumerate(siblings, start=4):
        made.cache.crop(50)
        alone = made.forward(torch.tensor([*chain[:depth], token]))[-1]
        assert relative(logits[row], alone) < 1e-3, "near, not equal: it is a draft, and its slot is another"
        assert not torch.allclose(logits[row], expected[depth], atol=1e-2), "the control: it is another text"


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_logits_for_prompt_positions_other_than_the_last(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trial 40. Caught: a (prompt, vocabulary) matrix of logits: 4.9 GB for 8,000 tokens; passes that grow with the prompt."""
    made = decoder("target", "fp32", backend)
    rows, head, forward = [], made.head, made.forward

    class Watched:
        def __call__(self, x: Tensor, **kwargs: Any) -> Tensor:
            rows.append(len(x))
            return head(x, **kwargs)

    def watched(ids: Tensor, **kwargs: Any) -> Tensor:
        lengths.append(len(ids))
        return forward(ids, **kwargs)

    lengths: list[int] = []
    monkeypatch.setattr(made, "head", Watched())
    monkeypatch.setattr(made, "forward", watched)
    made.reserve(1100)
    assert made.prefill(torch.arange(1100) % VOCAB).shape == (1, VOCAB)
    assert rows == [1] and lengths == [PREFILL_ROWS, PREFILL_ROWS, 1100 - 2 * PREFILL_ROWS]
    made.reserve(10)
    assert made.prefill(torch.arange(5), num_logits=0).shape == (0, VOCAB) and rows == [1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pass_of_no_tokens_is_refused(backend: str) -> None:
    """Caught: a division by zero in the kernels, which ended the process."""
    made = decoder("target", "fp32", backend)
    made.reserve(8)
    with pytest.raises(ValueError, match="at least one token"):
        made.forward(torch.arange(0))


def test_a_step_is_one_graph_whatever_its_values() -> None:
    """Caught: a Python branch or a shape that depends on a position or a token, so that a step cannot be captured."""
    torch._dynamo.reset()
    graphs: list[Any] = []

    def count(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    made = decoder("target", "fp32", "torch")
    made.reserve(600)
    step = torch.compile(made.step, backend=count, fullgraph=True)
    with torch.inference_mode():
        for start, rows in ((5, 4), (9, 4), (100, 4)):
            made.reserve(600)
            made.prefill(torch.arange(start) % VOCAB)
            ids, slots = torch.arange(start, start + rows) * 5 % VOCAB, torch.arange(start, start + rows)
            mask = made._mask(rows, None)
            hidden = step(ids, slots, slots, mask)
            assert torch.allclose(hidden, made.step(ids, slots, slots, mask), atol=1e-5)
    torch._dynamo.reset()
    assert len(graphs) == 1


# ---- refusals ----


def test_a_sliding_window_is_refused_by_name() -> None:
    """Trial 42. Caught: a window silently ignored: right for 16 tokens, wrong from the 17th on."""
    for config in (Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=16, max_window_layers=0),
                   MistralConfig(**SIZES, sliding_window=64)):
        with pytest.raises(UnsupportedModel, match=r"sliding-window attention \((16|64) tokens\) is not supported"):
            DecoderConfig.from_hf(config)
    for config in (Qwen2Config(**SIZES, use_sliding_window=False, sliding_window=16), MistralConfig(**SIZES, sliding_window=None),
                   MistralConfig(**SIZES, sliding_window=640)):
        assert DecoderConfig.from_hf(config).layers == 2, "no window in use, or none that is ever reached"


@pytest.mark.parametrize("rope", [
    {"rope_type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 160},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 160}])
def test_other_rope_types_are_refused_by_name(rope: dict[str, Any]) -> None:
    """Caught: a scaled rotary table taken for the plain one: good text that falls apart later."""
    config = LlamaConfig(**SIZES, rope_parameters=rope | {"rope_theta": 10000.0})
    with pytest.raises(UnsupportedModel, match=f"rope type '{rope['rope_type']}' is not supported"):
        DecoderConfig.from_hf(config)


def test_other_architectures_are_refused_by_name() -> None:
    """Caught: an AttributeError about a missing field, after minutes of download."""
    with pytest.raises(UnsupportedModel, match="architecture 'gpt2' is not supported; use one of qwen2"):
        DecoderConfig.from_hf(GPT2Config())
    with pytest.raises(UnsupportedModel, match="architecture 'made-up' is not supported"):
        DecoderConfig.from_hf(SimpleNamespace(model_type="made-up"))
    with pytest.raises(UnsupportedModel, match="activation 'gelu' is not supported"):
        DecoderConfig.from_hf(LlamaConfig(**SIZES, hidden_act="gelu"))


@pytest.mark.parametrize("missing", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"])
def test_an_incomplete_checkpoint_is_refused_by_name(missing: str) -> None:
    """Caught: a bare KeyError for a tensor that a conversion left out."""
    checkpoint = tiny().target
    tensors = {name: tensor for name, tensor in checkpoint.tensors().items() if name != missing}
    with pytest.raises(UnsupportedModel, match=f"no tensor '{missing}'"):
        Decoder(DecoderConfig.from_hf(checkpoint.config), tensors, weights="fp32")


def test_wrong_settings_are_refused() -> None:
    """Caught: an unknown precision taken for bf16; the native kernels asked for where they cannot run."""
    checkpoint = tiny().target
    config, tensors = DecoderConfig.from_hf(checkpoint.config), checkpoint.tensors()
    with pytest.raises(ValueError, match="weights 'fp8' are not supported; choose one of bf16"):
        Decoder(config, tensors, weights="fp8")
    with pytest.raises(ValueError, match="backend 'numpy' is not known"):
        Decoder(config, tensors, backend="numpy")
    with pytest.raises(ValueError, match="choose --backend torch"):
        Decoder(config, tensors, weights="fp16", backend="native")


def test_an_odd_head_size_runs_on_pytorch_and_says_so() -> None:
    """Caught: a kernel that reads 16 floats at a time past the end of a head of 24."""
    kind, _ = CONFIGS["qwen3"]
    config = DecoderConfig.from_hf(kind(**SIZES, head_dim=24))
    shapes = {"q_proj": (96, 64), "k_proj": (48, 64), "v_proj": (48, 64), "o_proj": (64, 96)}
    tensors = {f"model.layers.{i}.self_attn.{name}.weight": torch.randn(shape) for name, shape in shapes.items() for i in (0, 1)}
    tensors |= {f"model.layers.{i}.self_attn.{name}_norm.weight": torch.ones(24) for name in "qk" for i in (0, 1)}
    for i in (0, 1):
        tensors |= {f"model.layers.{i}.mlp.{name}_proj.weight": torch.randn(112, 64) for name in ("gate", "up")}
        tensors |= {f"model.layers.{i}.mlp.down_proj.weight": torch.randn(64, 112)}
        tensors |= {f"model.layers.{i}.{name}_layernorm.weight": torch.ones(64) for name in ("input", "post_attention")}
    tensors |= {"model.norm.weight": torch.ones(64), "model.embed_tokens.weight": torch.randn(103, 64)}
    made = Decoder(config, tensors, weights="fp32")
    assert (made.backend, made.backend_note) == ("torch", "head size 24 is not a multiple of 16")
    assert made.prefill(IDS[:9]).isfinite().all()
    with pytest.raises(ValueError, match=r"not available \(head size 24"):
        Decoder(config, tensors, weights="fp32", backend="native")


def test_bytes_are_counted() -> None:
    """Caught: a tied head counted twice, or the embedding counted as read in each pass."""
    tied, untied = ours("llama", True, "native"), ours("llama", False, "native")
    assert tied.weight_bytes == tied.read_bytes and untied.weight_bytes - untied.read_bytes == 103 * 64 * 4
    parameters = sum(tensor.numel() for tensor in reference("llama", False)[0].state_dict().values())
    assert untied.weight_bytes == pytest.approx(4 * parameters, rel=0.05)
    assert native.load() is not None
