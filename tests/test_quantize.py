"""Quantised weights restore to what they were, as nearly as their bits allow, whatever their range."""

import pytest
import torch
from torch import Tensor

import quantize as module
from quantize import GROUP, QuantizedWeight, group_size, quantize


def weights(n: int = 24, k: int = 192, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def error(weight: Tensor, restored: QuantizedWeight) -> Tensor:
    """Squared error per group. (n, k / group)"""
    return (restored.dequantize() - weight.float()).square().view(len(weight), -1, restored.group).sum(-1)


@pytest.mark.parametrize(("bits", "share"), [(8, 0.006), (4, 0.1)])
def test_the_error_is_half_a_step(bits: int, share: float) -> None:
    """Caught: values rounded down, scales of the wrong row, or a range that the bits do not cover."""
    weight = weights()
    quantized = quantize(weight, bits)
    assert quantized.values.dtype == torch.uint8 and int(quantized.values.max()) == 2**bits - 1
    assert quantized.scales.dtype == quantized.minimums.dtype == torch.bfloat16
    assert quantized.shape == weight.shape and quantized.scales.shape == (24, 192 // GROUP)
    assert float((quantized.dequantize() - weight).norm() / weight.norm()) < share
    step = quantized.scales.float().repeat_interleave(quantized.group, 1)
    rounding = weight.abs().amax() / 128  # of the minimum and of the scale to bf16
    assert bool(((quantized.dequantize() - weight).abs() <= step * 0.51 + rounding).all())


def test_weights_on_the_grid_come_back_exactly() -> None:
    """Caught: a scale of range / 16 instead of range / 15, or nibbles in another order than their scales."""
    grid = torch.randint(0, 16, (8, 128), generator=torch.Generator().manual_seed(1))
    grid[:, ::64], grid[:, 1::64] = 0, 15  # each group reaches both ends
    weight = grid * 0.5 - 2.0
    assert torch.equal(quantize(weight, 4).dequantize(), weight)


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_without_a_range(bits: int) -> None:
    """Caught: 0 / 0 = NaN for rows of zeros or of one value (padding of the vocabulary)."""
    weight = torch.zeros(4, 64)
    weight[1], weight[2], weight[3, 5] = 0.3, -1e-30, 7.0
    restored = quantize(weight, bits).dequantize()
    assert restored.isfinite().all() and torch.equal(restored[0], weight[0])
    assert torch.allclose(restored, weight, atol=7.0 / 2**bits, rtol=0.01)


def test_an_outlier_costs_its_own_group_only() -> None:
    """Caught: one range for a whole row or for the same group of all rows."""
    weight = weights(4, 256)
    before = error(weight, quantize(weight, 4))
    weight[1, 70] = 100.0
    after = error(weight, quantize(weight, 4))
    hurt = torch.zeros(4, 4, dtype=torch.bool)
    hurt[1, 1] = True
    assert torch.equal(after[~hurt], before[~hurt]) and float(after[1, 1]) > 10 * float(before[1, 1])


def test_bf16_weights_and_rows_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: rows lost where a part ends; arithmetic in bf16."""
    weight = weights(50, 128).bfloat16()
    whole = quantize(weight, 4)
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 7)
    parts = quantize(weight, 4)
    for name in ("values", "scales", "minimums"):
        assert torch.equal(getattr(whole, name), getattr(parts, name))
    assert torch.equal(whole.dequantize(), quantize(weight.float(), 4).dequantize())
    assert whole.nbytes == 50 * 128 + 2 * 2 * 50 * 2


def test_groups_divide_the_inputs() -> None:
    """Caught: a last group that is shorter than the others (4864 = 76 x 64, but 896 / 128 = 7)."""
    assert [group_size(k) for k in (64, 4864, 896, 96, 48, 40)] == [64, 64, 64, 32, 16, 8]
    assert quantize(weights(2, 40), 4).group == 8
    with pytest.raises(ValueError, match=r"layers with 12 inputs cannot be quantised.*use bf16"):
        quantize(weights(2, 12), 4)


def test_other_numbers_of_bits_are_refused() -> None:
    """Caught: 3 or 16 bits taken for 8."""
    for bits in (2, 3, 16):
        with pytest.raises(ValueError, match="choose 4 or 8"):
            quantize(weights(), bits)
