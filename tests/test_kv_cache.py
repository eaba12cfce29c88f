"""The cache forgets what it is told to forget, refuses what does not fit, and never lets stale slots through."""

import pytest
import torch
from scripted import VOCAB, decoder, engine, run

from kv_cache import BLOCK, KVCache


def small(slots: int = 1) -> KVCache:
    cache = KVCache(2, 3, 4, torch.float32, "cpu")
    cache.reserve(slots)
    return cache


def test_crop_only_shortens() -> None:
    """Caught: a crop beyond the end that did nothing or grew the cache over stale slots (mlx-lm's silent trim)."""
    cache = small()
    cache.length = 9
    for wrong in (10, -1, BLOCK + 1):
        with pytest.raises(ValueError, match="only shortens"):
            cache.crop(wrong)
    cache.crop(9)
    cache.crop(0)
    assert cache.length == 0


def test_crop_moves_a_number_and_nothing_else() -> None:
    """Caught: a rollback that copies or clears the buffers, so that its cost grows with the context."""
    cache = small()
    cache.keys.fill_(7.0)
    cache.length = 300
    addresses, before = (cache.keys.data_ptr(), cache.values.data_ptr()), cache.keys.clone()
    cache.crop(5)
    assert (cache.keys.data_ptr(), cache.values.data_ptr()) == addresses and torch.equal(cache.keys, before)


def test_append_writes_the_slots_of_one_layer() -> None:
    """Caught: keys written at `length` of every layer, or in the order of the rows instead of that of the slots."""
    cache, keys = small(), torch.randn(3, 2, 4)
    cache.append(1, torch.tensor([5, 2]), keys, -keys)
    assert torch.equal(cache.keys[1, :, 5], keys[:, 0]) and torch.equal(cache.values[1, :, 2], -keys[:, 1])
    assert int(cache.keys.count_nonzero()) == keys.numel() and cache.length == 0


def test_capacity_grows_in_blocks_and_is_reported() -> None:
    """Caught: a buffer of exactly the length asked for (a new shape per prompt), or a size in elements, not bytes."""
    cache = small()
    for slots, capacity in ((1, BLOCK), (BLOCK, BLOCK), (BLOCK + 1, 2 * BLOCK), (3, 2 * BLOCK)):
        cache.length = 1
        cache.reserve(slots)
        assert (cache.capacity, cache.length) == (capacity, 0)
        assert cache.nbytes == 2 * (2 * 3 * capacity * 4) * 4
        assert cache.keys.shape == cache.values.shape == (2, 3, capacity, 4)
        assert cache.keys.data_ptr() != cache.values.data_ptr()


def test_visible_length_is_whole_blocks() -> None:
    """Caught: a visible length that follows the prompt, which changes the bits of PyTorch's attention."""
    cache = small(2 * BLOCK)
    for length, rows, visible in ((0, 1, 1), (BLOCK - 1, 1, 1), (BLOCK - 1, 2, 2), (BLOCK, 7, 2), (2 * BLOCK - 3, 3, 2)):
        cache.length = length
        assert cache.visible_length(rows) == visible * BLOCK


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_full_cache_is_an_error_before_anything_is_written(backend: str) -> None:
    """Caught: rows written past the end of the buffer by a kernel that does not look."""
    model = decoder("target", "fp32", backend)
    model.reserve(1)
    room = model.cache.capacity
    model.prefill(torch.arange(room - 3) % VOCAB)
    before = model.cache.keys.clone()
    with pytest.raises(ValueError, match=rf"holds {room - 3} of {room} slots and 4 more do not fit"):
        model.forward(torch.tensor([1, 2, 3, 4]))
    assert model.cache.length == room - 3 and torch.equal(model.cache.keys, before)
    assert model.forward(torch.tensor([1, 2, 3])).isfinite().all()


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_stale_slots_are_never_seen(backend: str) -> None:
    """Caught: rejected tokens or the generation before shining through; NaN left there by a model that overflowed."""
    model = decoder("target", "fp32", backend)
    model.reserve(40)
    fresh = model.prefill(torch.arange(20))
    model.reserve(40)
    with torch.inference_mode():  # as after a generation that ended in NaN
        model.cache.keys.fill_(torch.nan)
        model.cache.values.fill_(torch.nan)
    model.reserve(40)
    model.prefill(torch.arange(7))
    model.forward(torch.arange(200, 230))  # to be rejected
    model.cache.crop(7)
    again = model.prefill(torch.arange(7, 20))
    assert torch.allclose(again, fresh, atol=1e-5)
    assert run(engine(model, vocab_size=VOCAB), [1, 2, 3], 5, 0).emitted == 5
