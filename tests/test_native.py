"""The CPU kernels: right, the same bits per row at any width and number of threads, and absent with a reason."""

from __future__ import annotations

import functools
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scripted import VOCAB, decoder, tiny
from torch import Tensor

import native
from assemble import load_decoder
from native import NativeLinear, NativeUnavailable
from quantize import QuantizedWeight, quantize

KINDS = ("bf16", "fp32", "int8", "int4")
SHAPES = ((33, 40), (16, 64), (100, 2112), (130, 192))  # odd numbers of channels, small groups, inputs beyond one piece
CACHE = native.cache_folder()  # of the user, where the kernels of this CPU are kept
GENERIC = ["-O3", "-mcpu=x86_64_v3", "-ffp-contract=fast", "-shared", "-fPIC"]  # AVX2 and FMA: no AVX-512, no VNNI


@functools.cache
def generic_library() -> Path:
    """The kernels for an older CPU, kept in the cache folder like the others."""
    return native.build(CACHE, GENERIC)


@pytest.fixture(params=["this CPU", "an older CPU"])
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Either build in turn; layers made in the test use it."""
    if request.param == "an older CPU":
        if platform.machine() not in ("x86_64", "AMD64"):
            pytest.skip("the generic build is for x86")
        kernels = native.bind(generic_library())
        monkeypatch.setattr(native, "load", lambda: kernels)
    native.set_threads(2)
    yield request.param
    native.set_threads(1)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight_of(kind: str, n: int, k: int) -> Tensor | QuantizedWeight:
    full = random(n, k) / k**0.5
    return quantize(full, int(kind[3])) if kind.startswith("int") else full.to(native_dtype(kind))


def native_dtype(kind: str) -> torch.dtype:
    return torch.bfloat16 if kind == "bf16" else torch.float32


def prologues(k: int, n: int, rows: int) -> dict[str, tuple[Tensor, dict[str, Any]]]:
    """Inputs and arguments by what happens before and after the product."""
    return {"plain": (random(rows, k, seed=3), {}),
            "norm": (random(rows, k, seed=4), {"norm": random(k, seed=5).abs() + 0.5, "eps": 1e-6}),
            "swiglu": (random(rows, 2 * k, seed=6), {"swiglu": True, "residual": random(rows, n, seed=7)})}


def cut(arguments: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    """The same arguments for some of the rows."""
    return {name: value[begin:end].contiguous() if name == "residual" else value for name, value in arguments.items()}


def expected_inputs(x: Tensor, arguments: dict[str, Any], group: int) -> Tensor:
    """What the product is taken of, in fp64; group: of the rounding to int8, 0 for float layers."""
    x = x.double()
    if "norm" in arguments:
        x = x / (x.square().mean(-1, keepdim=True) + arguments["eps"]).sqrt() * arguments["norm"].double()
    if arguments.get("swiglu"):
        gate, up = x.chunk(2, -1)
        x = F.silu(gate) * up
    if group:
        groups = x.view(len(x), -1, group)
        scale = groups.abs().amax(-1, keepdim=True) / 127
        x = ((groups / scale).round() * scale).view(x.shape)
    return x


# ---- linear layers ----


@pytest.mark.parametrize("kind", KINDS)
def test_the_product_is_right(kind: str, build: str) -> None:
    """Caught: channels exchanged by the packing, the last strip of an odd size, groups with another's scale."""
    for n, k in SHAPES:
        weight, bias = weight_of(kind, n, k), random(n, seed=2)
        layer = NativeLinear(weight, bias)
        exact, group = (weight.dequantize(), weight.group) if isinstance(weight, QuantizedWeight) else (weight.float(), 0)
        for name, (x, arguments) in prologues(k, n, 5).items():
            expected = expected_inputs(x, arguments, group) @ exact.double().T + bias + arguments.get("residual", 0)
            found = layer(x, **arguments)
            assert found.shape == (5, n) and found.dtype == torch.float32
            tolerance = 4e-3 if group else 1e-5  # where a value lies between two int8 steps, rounding may go either way
            assert float((found - expected).abs().max()) < tolerance * float(expected.abs().max()), (n, k, name)
        assert torch.equal(NativeLinear(weight)(x, **arguments) + bias, found) or torch.allclose(
            NativeLinear(weight)(x, **arguments) + bias, found, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_bits_do_not_depend_on_the_width(kind: str, build: str) -> None:
    """Caught: a tile height that sums in another order; the difference between plain and speculative output in bf16."""
    for n, k in SHAPES:
        layer = NativeLinear(weight_of(kind, n, k), random(n, seed=2))
        for name, (x, arguments) in prologues(k, n, 20).items():
            single = torch.cat([layer(x[i:i + 1].contiguous(), **cut(arguments, i, i + 1)) for i in range(20)])
            for width in range(1, 21):
                for begin in {0, 20 - width, (20 - width) // 2}:
                    end = begin + width
                    found = layer(x[begin:end].contiguous(), **cut(arguments, begin, end))
                    assert torch.equal(found, single[begin:end]), (n, k, name, width)


@pytest.mark.parametrize("kind", ["bf16", "fp32"])
def test_inputs_and_rows_of_any_number(kind: str, build: str) -> None:
    """Caught: what is left of a piece after its steps of four, and a last row tile much lower than the others."""
    n, k = 70, 519
    layer, x = NativeLinear(weight_of(kind, n, k)), random(49, k)
    single = torch.cat([layer(row) for row in x.split(1)])
    assert torch.allclose(single, x @ weight_of(kind, n, k).float().T, atol=1e-4)
    for width in (13, 24, 25, 37, 49):
        assert torch.equal(layer(x[:width].contiguous()), single[:width]), width


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_damaged_inputs_stay_visible(kind: str, value: float, build: str) -> None:
    """Caught: integer layers took a NaN for a large number, and the damage came out as a fluent wrong text."""
    x = random(3, 64)
    x[1, 40] = value
    finite = NativeLinear(weight_of(kind, 16, 64))(x).isfinite()
    assert finite[[0, 2]].all() and not finite[1].any()


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_the_threads(kind: str, build: str) -> None:
    """Caught: sums split between threads, or a unit of work that is done twice or never."""
    n, k = 1100, 256
    layer, (x, arguments) = NativeLinear(weight_of(kind, n, k)), prologues(k, n, 7)["norm"]
    found = []
    for threads in (1, 2, 3, 1, 3):
        native.set_threads(threads)
        found += [layer(x, **arguments) for _ in range(5)]
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the generic build is for x86")
@pytest.mark.parametrize("kind", KINDS)
def test_an_older_cpu_agrees_within_rounding(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: the emulated byte product (no VNNI) losing a sign or a carry."""
    weight, x = weight_of(kind, 100, 2112), random(9, 2112)
    here = NativeLinear(weight)(x)
    older_kernels = native.bind(generic_library())
    monkeypatch.setattr(native, "load", lambda: older_kernels)
    older = NativeLinear(weight)(x)
    assert float((here - older).abs().max()) < 1e-5 * float(here.abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_a_tied_head(dtype: torch.dtype) -> None:
    """Caught: the two halves of a strip exchanged when a row is taken out of the packed weight."""
    weight = random(70, 48).to(dtype)
    index = torch.tensor([0, 15, 16, 31, 32, 47, 63, 64, 69, 5])
    assert torch.equal(NativeLinear(weight).rows(index), weight[index].float())


@pytest.mark.parametrize("kind", KINDS)
def test_gates_of_any_size(kind: str, build: str) -> None:
    """Caught: e^100 beyond the exponent's range came out as a tiny negative number: silu(-100) was -100."""
    gates = torch.tensor([-1e5, -1000, -200, -100, -89, -88.5, -88, -80, -20, -1, 0, 1, 20, 88, 89, 100, 1000, 1e30, 3e38])
    layer = NativeLinear(quantize(torch.ones(16, 64), int(kind[3])) if kind.startswith("int") else torch.ones(16, 64).to(
        native_dtype(kind)))
    x = torch.zeros(len(gates), 128)
    x[:, 0], x[:, 64] = gates, 1.0  # one gate, whose up is 1
    found, expected = layer(x, swiglu=True)[:, 0], F.silu(gates)
    assert torch.allclose(found, expected, rtol=0.01, atol=1e-30), dict(zip(gates.tolist(), found.tolist(), strict=True))


def test_integer_layers_of_extreme_inputs() -> None:
    """Caught: a row of zeros divided by its peak; 127 rounded up to 128, which is -128 in a byte."""
    layer = NativeLinear(quantize(torch.ones(16, 64), 8))
    assert torch.equal(layer(torch.zeros(2, 64)), torch.zeros(2, 16))
    for value in (1e-30, 1.0, -1.0, 3e30):
        found = layer(torch.full((1, 64), value))
        assert torch.allclose(found, torch.full((1, 16), 64 * value), rtol=0.01)


# ---- threads ----


def test_concurrent_calls_are_right(build: str) -> None:
    """Caught: two Python threads in one working buffer."""
    layers = [NativeLinear(weight_of(kind, 200, 256)) for kind in KINDS]
    inputs = [random(rows, 256, seed=rows) for rows in (1, 3, 7, 12)]
    expected = [[layer(x) for x in inputs] for layer in layers]

    def work(job: int) -> bool:
        return all(torch.equal(layer(x), wanted) for _ in range(5) for layer, row in zip(layers, expected, strict=True)
                   for x, wanted in zip(inputs[job % 4:], row[job % 4:], strict=True))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))


def test_concurrent_decoders_are_right() -> None:
    """Caught: attention's working memory or its description of the pass shared by two models."""
    def work(seed: int) -> list[Tensor]:
        made = load_decoder(tiny().target, "bf16")
        found = []
        for turn in range(6):
            made.reserve(64)
            found.append(made.prefill((torch.arange(40 + turn) * (seed + 3)) % VOCAB, num_logits=9))
        return found

    alone = [work(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(work, range(4)))
    assert all(torch.equal(a, b) for ours, theirs in zip(alone, together, strict=True) for a, b in zip(ours, theirs, strict=True))


def test_impossible_numbers_of_threads_are_refused() -> None:
    """Caught: 0 threads that never finish, or more than there is room for."""
    for threads in (0, -1, 65, 1000):
        with pytest.raises(ValueError, match="choose 1 to 64"):
            native.set_threads(threads)


# ---- where the kernels are not to be had ----


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Kernels not loaded yet, and an empty cache folder."""
    monkeypatch.setattr(native, "cache_folder", lambda: tmp_path)
    native.load.cache_clear()
    yield tmp_path
    native.load.cache_clear()


def falls_back(reason: str) -> None:
    """'auto' runs on PyTorch's operators and says why; 'native' is an error that says why."""
    made = load_decoder(tiny().target, "fp32")
    assert made.backend == "torch" and reason in made.backend_note and "\n" not in made.backend_note
    made.reserve(20)
    there = decoder("target", "fp32", "torch")
    there.reserve(20)
    assert torch.equal(made.prefill(torch.arange(9)), there.prefill(torch.arange(9)))
    with pytest.raises(ValueError, match=r"the native kernels are not available .*choose --backend torch"):
        load_decoder(tiny().target, "fp32", backend="native")


def test_without_a_compiler(unloaded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: an import error instead of a slower run."""
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(native.metadata, "version", missing)
    falls_back("the package ziglang is not installed")


def test_a_compiler_that_refuses(unloaded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a page of compiler output in the user's face, or a half-written library that is trusted next time."""
    monkeypatch.setattr(native, "compiler_flags", lambda: ["--no-such-flag"])
    falls_back("the compiler refused kernels.c: error: ")
    assert list(unloaded.iterdir()) == []


def test_a_compiler_that_cannot_run(unloaded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: an OSError from the start of the compiler (no permission, no memory) that ended the program."""
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(native.subprocess, "run", refuse)
    falls_back("Permission denied")


def test_a_library_that_does_not_load(unloaded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a library of another system, or cut short by a full disk, that ends the program."""
    def pretend(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        Path(command[command.index("-o") + 1]).write_bytes(b"\x7fELF, but not really")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(native.subprocess, "run", pretend)
    falls_back("the compiled kernels do not load")


def test_a_cache_folder_that_cannot_be_written(unloaded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: a read-only home directory that ended the program."""
    (unloaded / "file").write_text("in the way")
    monkeypatch.setattr(native, "cache_folder", lambda: unloaded / "file" / "folder")
    falls_back("the kernels cannot be written")


def test_the_library_is_built_once(unloaded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught: the compiler run at each start; a library for other flags or another CPU taken for this one's."""
    commands: list[list[str]] = []

    def pretend(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        Path(command[command.index("-o") + 1]).write_bytes(b"library")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(native.subprocess, "run", pretend)
    first = native.build(unloaded)
    assert native.build(unloaded) == first and len(commands) == 1
    assert native.build(unloaded, GENERIC) != first and len(commands) == 2
    assert commands[0][:4] == [sys.executable, "-m", "ziglang", "cc"]
    assert sorted(path.name for path in unloaded.iterdir()) == sorted({first.name, native.build(unloaded, GENERIC).name})
    with pytest.raises(NativeUnavailable, match="do not load"):
        native.bind(first)


@pytest.mark.parametrize("damage", [lambda content: content[:len(content) // 2], lambda content: b"", lambda content: b"garbage"])
def test_a_damaged_library_is_built_again(unloaded: Path, monkeypatch: pytest.MonkeyPatch,
                                          damage: Callable[[bytes], bytes]) -> None:
    """Caught: a library cut short in the cache folder: PyTorch's operators in every later run, or a crash in the loader."""
    compiled, commands = native.build(CACHE).read_bytes(), list[list[str]]()

    def compile_again(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        Path(command[command.index("-o") + 1]).write_bytes(compiled)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(native.subprocess, "run", compile_again)
    library = native.build(unloaded)
    library.write_bytes(damage(compiled))
    assert load_decoder(tiny().target, "fp32", backend="native").backend == "native"
    assert library.read_bytes() == compiled and list(unloaded.iterdir()) == [library]
    native.build(unloaded)
    assert len(commands) == 2, "built once, mended once"
