"""Which widths may be used and what they cost: on a busy machine, with other kernels, where few of them agree."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scripted import decoder
from torch import Tensor

import assemble
import native
import shapes
from proven_widths import SLOW_CANDIDATES, Shape, largest_class, measure_shapes, proven_widths, verdict
from shapes import CANDIDATES, Widths, measure_seconds
from transformer import Decoder


class Clocked:
    """A decoder whose passes take as long as `cost` says, by a clock of its own."""

    def __init__(self, cost: Callable[[int], float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.cost, self.now, self.passes = cost, 0.0, list[int]()
        self.cache = SimpleNamespace(crop=lambda length: None)
        monkeypatch.setattr(shapes.time, "perf_counter", lambda: self.now)

    def reserve(self, slots: int) -> None: ...
    def prefill(self, token_ids: Tensor) -> None: ...

    def forward(self, token_ids: Tensor) -> Tensor:
        self.now += self.cost(len(token_ids))
        self.passes.append(len(token_ids))
        return torch.zeros(len(token_ids), 1)

    @classmethod
    def passes_of(cls, seconds: float, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """The passes that a measurement of three widths makes if each takes this long."""
        clocked = cls(lambda width: seconds, monkeypatch)
        measure_seconds(clocked, (1, 2, 4))
        return clocked.passes


def test_a_busy_machine_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: the median of three passes of which two met a busy moment: a width that then looked dear for good."""
    for seed in range(20):
        dice = random.Random(seed)
        busy = Clocked(lambda width: (0.1 + width / 100) * dice.choice([1, 1, 1.5, 3]), monkeypatch)  # noqa: B023
        assert measure_seconds(busy, (1, 4, 8)) == pytest.approx({1: 0.11, 4: 0.14, 8: 0.18}, rel=0.1)


def test_timing_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a minute of timing before the first token of a large model; or a single round where one pass is slow."""
    assert len(Clocked.passes_of(0.01, monkeypatch)) == 7 * 3
    assert len(Clocked.passes_of(0.9, monkeypatch)) == 4 * 3
    assert len(Clocked.passes_of(60.0, monkeypatch)) == 3 * 3


def test_a_disturbed_width_does_not_make_wider_ones_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: one slow width 4 that made 6 and 8 rows cost as much: a card at 73% of the bandwidth, and drafts cut short."""
    odd = Clocked({1: 1.0, 2: 0.9, 4: 1.6, 8: 1.1}.__getitem__, monkeypatch)
    assert measure_seconds(odd, (8, 4, 2, 1)) == pytest.approx({1: 0.9, 2: 0.9, 4: 1.1, 8: 1.1})


def test_other_kernels_are_timed_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Caught: the seconds of the kernels before a change, kept for ever."""
    monkeypatch.setattr(assemble, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(assemble, "measure_seconds", lambda target, widths: {1: next(seconds)})
    monkeypatch.setattr(assemble, "measured_busy", lambda target, widths: False)
    seconds = iter((1.0, 2.0, 3.0))
    target, other = decoder("target", "fp32", "native"), decoder("target", "fp32", "torch")
    assert [assemble.usable_widths(target, "d") for _ in range(2)] == [Widths({1: 1.0})] * 2
    plain = assemble.shapes_file(other, "d")
    changed = tmp_path / "kernels.c"
    changed.write_bytes(native.SOURCE.read_bytes() + b"// faster")
    monkeypatch.setattr(native, "SOURCE", changed)
    assert assemble.usable_widths(target, "d") == Widths({1: 2.0})
    monkeypatch.setattr(native, "compiler_flags", lambda: ["-O1"])
    assert assemble.usable_widths(target, "d") == Widths({1: 3.0})
    assert assemble.shapes_file(other, "d") == plain, "PyTorch's operators are the same"


def test_seconds_of_a_busy_machine_are_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Caught: a first start beside another program, whose seconds decided ever after how much is drafted."""
    monkeypatch.setattr(assemble, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(assemble, "measure_seconds", lambda target, widths, **quick: dict.fromkeys(widths, now))
    target = decoder("target", "fp32", "native")
    now = 7.0
    assert assemble.usable_widths(target, "d").seconds[8] == 7.0
    now = 6.0
    assert assemble.usable_widths(target, "d").seconds[8] == 7.0, "as it varies"
    now = 1.0
    assert assemble.usable_widths(target, "d").seconds[8] == 1.0
    now = 7.0
    assert assemble.usable_widths(target, "d").seconds[8] == 1.0, "a busy moment does not replace a quiet one"
    assemble.store_widths(assemble.shapes_file(target, "d"), proven := Widths({4: 9.0, 8: 9.0}, any_width=False))
    assert assemble.usable_widths(target, "d") == proven, "what was proven is not measured away"


# ---- which widths agree ----


def shape(width: int, digests: str, seconds: float) -> Shape:
    """A width whose rows agree; a letter per position."""
    return Shape(width, tuple(map(frozenset, digests)), seconds)


def test_two_passes_per_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """25 positions in passes of one width after the other: a minute and more on PyTorch's operators."""
    target, passes, honest = decoder("target", "fp32", "torch"), list[int](), Decoder.forward
    monkeypatch.setattr(Decoder, "forward", lambda self, ids, *a: passes.append(len(ids)) or honest(self, ids, *a))
    measure_shapes(target)
    assert passes == [1, *(width for width in SLOW_CANDIDATES for _ in range(2))]


def test_the_largest_class_decides() -> None:
    """Width 1 as the reference, the odd one out on many machines, left nothing proven."""
    found = [shape(1, "xx", 1.0), shape(2, "ab", 1.5), shape(3, "abc", 1.4), shape(4, "ABcd", 2.0)]
    agreeing = largest_class(found)
    assert [each.width for each in agreeing] == [2, 3]
    assert proven_widths(found, agreeing, native=False) == Widths({2: 1.4, 3: 1.4}, any_width=False)
    assert [each.num_equal(found[3]) for each in found] == [0, 0, 1, 4]


def test_no_two_widths_agree() -> None:
    """A width that agrees with itself alone was taken for proven."""
    found = [shape(width, chr(width + 65) * 24, width / 10) for width in CANDIDATES]
    assert proven_widths(found, largest_class(found), native=True) == Widths({8: 0.8}, any_width=False)


def test_rows_of_one_width_that_disagree() -> None:
    """A fixed width was taken to be exact, though a row's bits depended on its place in the pass."""
    uneven = Shape(8, (frozenset("a"), frozenset("bB"), *map(frozenset, "cdefgh")), 0.8)
    assert not uneven.agrees(uneven) and largest_class([uneven]) == []
    assert verdict(proven_widths([uneven], [], native=False), proven=False, native=False)[1] == 1
    found = [shape(4, "xyzw", 0.4), uneven]
    assert proven_widths(found, largest_class(found), native=False) == Widths({4: 0.4}, any_width=False)
