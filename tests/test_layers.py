"""The fallback on PyTorch's operators computes the same as the plain formulas, within the rounding of its precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from layers import Int4Weight, PackedWeight, TorchLinear, attend, rms_norm, rotate
from quantize import quantize

CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_packed_weight_of_this_torch() -> None:
    """Says when an upgrade of torch changes the private operators: then PackedWeight needs another look."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch was built without oneDNN")
    for n, k in ((64, 128), (33, 50), (896, 896)):
        weight, bias = random(n, k).bfloat16(), random(n, seed=1).bfloat16()
        if not PackedWeight.supports(weight):
            pytest.skip("this CPU has no bf16 in oneDNN")
        packed = PackedWeight(weight)
        assert packed.nbytes == n * k * 2
        for rows in (1, 2, 3, 6, 8, 17):
            x = random(rows, k, seed=rows).bfloat16()
            for term in (None, bias):
                y, expected = packed(x, term), F.linear(x.double(), weight.double(), None if term is None else term.double())
                assert y.dtype == torch.bfloat16 and y.shape == (rows, n)
                assert float((y - expected).abs().max()) <= float(expected.abs().max()) / 128
                assert float((F.linear(x, weight, term).double() - expected).abs().max()) <= float(expected.abs().max()) / 128


def test_the_packed_weight_refuses_other_precisions() -> None:
    """Caught: a fp32 or fp16 weight packed as if it were bf16."""
    assert not PackedWeight.supports(random(8, 8)) and not PackedWeight.supports(random(8, 8).half())


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]


@pytest.mark.parametrize("name", DEVICES)
def test_the_int4_weight_is_the_matmul_with_the_restored_weight(name: str) -> None:
    """Caught: nibbles, scales or zero points in another order than this torch's kernel reads them."""
    device = torch.device(name)
    for n, k in ((64, 128), (192, 384)):
        weight = quantize(random(n, k), 4)
        assert Int4Weight.supports(weight, device, torch.bfloat16)
        packed, restored = Int4Weight(weight, device), weight.dequantize().to(device)
        bias = random(n, seed=2).bfloat16().to(device)
        for rows in (1, 2, 5, 9):
            x = random(rows, k, seed=rows).bfloat16().to(device)
            for term in (None, bias):
                expected = F.linear(x.float(), restored, None if term is None else term.float())
                assert float((packed(x, term).float() - expected).abs().max()) <= 0.02 * float(expected.abs().max())
    assert packed.nbytes < 0.7 * n * k


def test_the_int4_weight_refuses_what_it_has_no_kernel_for() -> None:
    """Caught: a crash in the kernel for odd sizes, small groups, int8 or fp32 activations."""
    fits = quantize(random(64, 128), 4)
    assert not Int4Weight.supports(quantize(random(60, 128), 4), CPU, torch.bfloat16)
    assert not Int4Weight.supports(quantize(random(64, 16), 4), CPU, torch.bfloat16)
    assert not Int4Weight.supports(quantize(random(64, 128), 8), CPU, torch.bfloat16)
    assert not Int4Weight.supports(fits, CPU, torch.float32)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16", "int8", "int4", "int4 odd"])
def test_a_layer_with_all_that_comes_before_and_after_it(kind: str) -> None:
    """Caught: the residual added before the projection, gate and up exchanged, a norm in half precision."""
    n, k, rows = (64, 128, 5) if kind != "int4 odd" else (50, 72, 5)
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(kind, torch.bfloat16)
    full, bias, norm = random(n, k) / k**0.5, random(n, seed=1), random(k, seed=2).abs() + 0.5
    weight = quantize(full, int(kind[3])) if kind.startswith("int") else full.to(dtype)
    exact = weight.dequantize().double() if kind.startswith("int") else weight.double()  # type: ignore[union-attr]
    layer = TorchLinear(weight, bias, dtype, CPU)
    assert (layer.out_features, layer.in_features) == (n, k) and layer.nbytes > 0
    x, gated, residual = random(rows, k, seed=3), random(rows, 2 * k, seed=4), random(rows, n, seed=5)
    scale = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]

    def close(y: Tensor, inputs: Tensor, extra: Tensor | float = 0.0) -> None:
        expected = inputs @ exact.T + bias.double() + extra
        assert y.dtype == dtype and float((y.double() - expected).abs().max()) <= scale * float(expected.abs().max())

    wide = x.to(dtype).double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.double()
    gate, up = gated.to(dtype).double().chunk(2, -1)
    close(layer(x.to(dtype)), wide)
    close(layer(x.to(dtype), norm=norm, eps=1e-6), normed)
    close(layer(gated.to(dtype), swiglu=True, residual=residual.to(dtype)), F.silu(gate) * up, residual.to(dtype).double())


def test_rows_of_a_tied_head() -> None:
    """Caught: an embedding looked up in columns."""
    weight = random(10, 4)
    assert torch.equal(TorchLinear(weight, None, torch.float32, CPU).rows(torch.tensor([7, 2])), weight[[7, 2]])


def test_the_norm_is_that_of_pytorch() -> None:
    """Caught: eps outside the root, or squares in bf16."""
    x, weight = random(3, 64) * 1e-3, random(64, seed=1)
    assert torch.allclose(rms_norm(x, weight, 1e-6), F.rms_norm(x, (64,), weight, 1e-6), atol=1e-6)
    assert rms_norm(x.bfloat16(), weight, 1e-6).dtype == torch.bfloat16


def test_rotation_turns_pairs_half_a_head_apart() -> None:
    """Caught: neighbouring dimensions paired (the other convention), or the angle's sign."""
    angle = torch.tensor([[0.3, 1.2]])
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]])
    turned = rotate(x, angle.cos(), angle.sin())[0, 0]
    expected = [angle[0, 0].cos(), -2 * angle[0, 1].sin(), angle[0, 0].sin(), 2 * angle[0, 1].cos()]
    assert torch.allclose(turned, torch.stack(expected))


def test_attention_with_grouped_heads() -> None:
    """Caught: query heads given to the wrong KV head by the folding, or the mask of another row."""
    rows, heads, kv_heads, dim, length = 3, 6, 2, 8, 11
    q, k, v = random(rows, heads, dim), random(kv_heads, length, dim, seed=1), random(kv_heads, length, dim, seed=2)
    mask = torch.rand(rows, length, generator=torch.Generator().manual_seed(3)) < 0.6
    mask[:, 0] = True
    mixed = attend(q, k, v, mask).view(rows, heads, dim)
    for row in range(rows):
        for head in range(heads):
            kv = head // (heads // kv_heads)
            scores = (k[kv] @ q[row, head] / dim**0.5).masked_fill(~mask[row], -torch.inf)
            assert torch.allclose(mixed[row, head], scores.softmax(-1) @ v[kv], atol=1e-5)
