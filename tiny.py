"""A tiny random pair, made in memory: Qwen2-shaped target and draft with a byte-level tokenizer, for tests and dry runs.

The draft is the target's embedding, first layer and output head with some noise on top, so it is smaller than the
target and agrees with it on some tokens but not on all, as a real draft does.
"""

import hashlib

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config

from checkpoint import Checkpoint, Pair

SEED = 20250
WEIGHT_SCALE = 0.2  # standard deviation of the target's weights: large enough that its output is not one token for ever
LAST_LAYER_SCALE = 0.2  # damps the layer that the draft lacks
NOISE_SHARE = 0.03  # of other random weights in the draft's; with the scale above, two in three greedy tokens agree
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS = 64, 128, 4, 2
KV_SIZE = HIDDEN // HEADS * KV_HEADS
LAYER_SHAPES: dict[str, tuple[int, ...]] = {
    "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "self_attn.q_proj.bias": (HIDDEN,),
    "self_attn.k_proj.weight": (KV_SIZE, HIDDEN),
    "self_attn.k_proj.bias": (KV_SIZE,),
    "self_attn.v_proj.weight": (KV_SIZE, HIDDEN),
    "self_attn.v_proj.bias": (KV_SIZE,),
    "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
}
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_pair() -> Pair:
    """The same pair at every call; the caller's random state is not touched."""
    tokenizer = byte_tokenizer()
    generator = torch.Generator().manual_seed(SEED)
    target_config, draft_config = (config(tokenizer, num_layers) for num_layers in (2, 1))
    target_weights = random_weights(target_config, generator)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        target_weights[f"model.layers.1.{name}.weight"] *= LAST_LAYER_SCALE
    draft_weights = {
        key: torch.lerp(target_weights[key], other, NOISE_SHARE)
        for key, other in random_weights(draft_config, generator).items()
    }
    ends = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    target = checkpoint("tiny-target", target_config, ends, target_weights)
    draft = checkpoint("tiny-draft", draft_config, ends, draft_weights)
    return Pair(target, draft, tokenizer, "tiny-target + tiny-draft (random weights: the text means nothing)")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, ids 0 to 255 in the order of the byte alphabet, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )


def config(tokenizer: PreTrainedTokenizerFast, num_layers: int) -> Qwen2Config:
    """A Qwen2 of about 100 thousand parameters, with grouped key/value heads and an output head of its own."""
    return Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=num_layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        architectures=["Qwen2ForCausalLM"],
        dtype="float32",
    )


def random_weights(config: Qwen2Config, generator: torch.Generator) -> dict[str, Tensor]:
    """Gaussian weights for every parameter of a Qwen2 with an output head of its own; norms are around one."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB_SIZE, HIDDEN)}
    for layer in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in LAYER_SHAPES.items()}
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB_SIZE, HIDDEN)}
    weights = {key: WEIGHT_SCALE * torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    for key in weights:
        if key.endswith("norm.weight"):
            weights[key] += 1.0
    weights["lm_head.weight"][-len(SPECIAL_TOKENS) :] = 0.0  # greedy decoding never ends by itself or prints a marker
    return weights


def checkpoint(name: str, config: Qwen2Config, ends: tuple[int, ...], weights: dict[str, Tensor]) -> Checkpoint:
    """A checkpoint in memory, whose digest covers every byte."""
    total = hashlib.sha256(config.to_json_string().encode())
    for key, tensor in weights.items():
        total.update(key.encode() + tensor.numpy().tobytes())
    size = sum(tensor.numel() for tensor in weights.values())
    return Checkpoint(name, config, None, ends, total.hexdigest()[:16], size, weights)
