"""The CPU kernels of kernels.c as Python callables: compiled once, kept in the cache folder, called through ctypes.

The compiler comes from PyPI (ziglang, pinned in requirements.txt), so no toolchain has to be installed. Where it is
missing or refuses, `load` raises NativeUnavailable and transformer.py runs on PyTorch's operators instead.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import mmap
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cache import cache_folder
from quantize import QuantizedWeight

SOURCE = Path(__file__).with_name("kernels.c")
KINDS = {torch.bfloat16: 0, torch.float32: 1, 8: 2, 4: 3}  # by dtype, or by bits; the enum of kernels.c
PLAIN, RMS_NORM, SWIGLU = range(3)
ROWS_AT_ONCE = 4096  # packed at a time


class NativeUnavailable(RuntimeError):
    """The kernels cannot be built or loaded here; the message says why."""


class _Linear(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("kind", "n", "k", "group")]
    _fields_ += [(name, ctypes.c_void_p) for name in ("weights", "bias")]


class _Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in
                ("layers", "heads", "kv_heads", "head_dim", "kv_kind", "capacity", "start", "rows")]
    _fields_ += [("eps", ctypes.c_float)] + [(name, ctypes.c_void_p) for name in ("cos", "sin", "keys", "values")]


class _Layer(ctypes.Structure):
    _fields_ = [(name, ctypes.POINTER(_Linear)) for name in ("qkv", "out", "gate_up", "down")]
    _fields_ += [(name, ctypes.c_void_p) for name in ("input_norm", "mlp_norm", "q_norm", "k_norm")]


def compiler_flags() -> list[str]:
    flags = ["-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC"]
    if platform.machine() in ("x86_64", "AMD64"):
        flags.append("-mprefer-vector-width=512")  # else the compiler halves our 16-float vectors
    return flags


def identity(flags: list[str] | None = None) -> str:
    """16 hex digits of this source, compiler, CPU and set of flags. Raises NativeUnavailable without the compiler."""
    try:
        compiler = metadata.version("ziglang")
    except metadata.PackageNotFoundError:
        raise NativeUnavailable("the package ziglang is not installed") from None
    flags = flags or compiler_flags()
    parts = (SOURCE.read_bytes(), compiler, flags, platform.machine(), sorted(torch.cpu.get_capabilities().items()))
    return short_hash(repr(parts).encode())


def short_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def build(folder: Path, flags: list[str] | None = None) -> Path:
    """Compile kernels.c into `folder` unless its library is there undamaged; return the library.

    A library's name ends in the hash of its content: loading one that was cut short could kill the process.
    """
    prefix = f"kernels-{identity(flags)}-"
    for library in folder.glob(f"{prefix}*.so"):
        if library.name == f"{prefix}{short_hash(library.read_bytes())}.so":
            return library
        library.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:  # removed with the compiler's own cache
        built = Path(scratch) / "kernels.so"
        environment = os.environ | {"ZIG_GLOBAL_CACHE_DIR": scratch, "ZIG_LOCAL_CACHE_DIR": scratch}
        command = [sys.executable, "-m", "ziglang", "cc", *(flags or compiler_flags()), "-o", str(built), str(SOURCE),
                   "-lpthread", "-lm"]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        if result.returncode:
            raise NativeUnavailable(f"the compiler refused kernels.c: {(result.stderr.strip() or '?').splitlines()[0]}")
        library = folder / f"{prefix}{short_hash(built.read_bytes())}.so"
        os.replace(built, library)
    return library


def bind(library: Path) -> ctypes.CDLL:
    """Load a compiled library and declare its functions."""
    try:
        kernels = ctypes.CDLL(str(library))
    except OSError as error:
        raise NativeUnavailable(f"the compiled kernels do not load: {error}") from None
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    kernels.linear.argtypes = [ctypes.POINTER(_Linear), pointer, pointer, integer, integer, pointer, ctypes.c_float, pointer]
    kernels.decode.argtypes = [ctypes.POINTER(_Shape), ctypes.POINTER(_Layer), pointer, pointer, pointer, pointer]
    kernels.set_threads.argtypes = [integer]
    kernels.use_openmp.argtypes = [pointer]
    return kernels


def openmp_parallel() -> int | None:
    """The address of GOMP_parallel in the OpenMP library that PyTorch has loaded, if it has one of that kind."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError, TypeError):
        return None


@functools.cache
def load() -> ctypes.CDLL:
    """The kernels, built on first use. Raises NativeUnavailable."""
    try:
        kernels = bind(build(cache_folder()))
    except OSError as error:
        raise NativeUnavailable(f"the kernels cannot be written: {error}") from None
    kernels.use_openmp(openmp_parallel())
    return kernels


def set_threads(threads: int) -> None:
    """Use this many threads in all later operations; the results do not depend on it."""
    if load().set_threads(threads):
        raise ValueError(f"{threads} threads are not possible; choose 1 to 64")


def pack_float(weight: Tensor) -> Tensor:
    """(n, k) bf16 or fp32 -> strips of 32 channels, as kernels.c reads them; in parts, as the working memory is a multiple."""
    n, k = weight.shape
    wide = weight.dtype == torch.float32
    packed = empty_on_huge_pages((-(-n // 32), k, 32) if wide else (-(-n // 32), k, 16), weight.dtype if wide else torch.int32)
    for rows, strips in zip(weight.split(ROWS_AT_ONCE), packed.split(ROWS_AT_ONCE // 32), strict=True):
        if len(rows) % 32:
            rows = torch.cat([rows, rows.new_zeros(32 - len(rows) % 32, k)])
        if wide:
            strips.copy_(rows.view(-1, 32, k).transpose(1, 2))
            continue
        halves = rows.contiguous().view(torch.int16).view(-1, 2, 16, k).to(torch.int32)  # pairs j, j + 16 share a 32-bit lane
        strips.copy_(((halves[:, 0] & 0xFFFF) | (halves[:, 1] << 16)).transpose(1, 2))
    return packed


def pack_quantized(weight: QuantizedWeight) -> Tensor:
    """A quantised weight in strips of 16 channels and blocks of a group, as kernels.c reads them: (n/16, k/group, lines, 16)
    int32, the last line of a block holding scales and minimums."""
    values, scales, minimums = weight.values, weight.scales, weight.minimums
    missing = -values.shape[0] % 16
    if missing:
        values, scales, minimums = (torch.cat([t, t.new_zeros(missing, t.shape[1])]) for t in (values, scales, minimums))
    strips, groups = values.shape[0] // 16, scales.shape[1]
    if weight.bits == 4:
        nibbles = values.view(strips, 16, groups, -1, 2, 4)
        words = nibbles[:, :, :, :, 0] | (nibbles[:, :, :, :, 1] << 4)
    else:
        words = values.view(strips, 16, groups, -1, 4)
    pairs = torch.stack([scales, minimums], -1).view(strips, 16, groups, 1, 2)
    lines = torch.cat([words.contiguous().view(torch.int32), pairs.view(torch.int32)], 3).squeeze(-1)  # (strips, 16, groups, lines)
    return lines.permute(0, 2, 3, 1).contiguous()


def empty_on_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An empty tensor in memory for which 2 MiB pages are asked (8% of a pass here) where that is possible."""
    page, size = 1 << 21, math.prod(shape) * dtype.itemsize
    if not hasattr(mmap, "MADV_HUGEPAGE") or size < page:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % page:][:size].view(dtype).view(shape)


class NativeLinear:
    """y = prologue(x) @ weight.T + bias + residual with fp32 activations; every row's bits are independent of the others.

    The prologue is nothing, RMSNorm (`norm` given) or SwiGLU (x holds gate and up side by side).
    """

    def __init__(self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        if isinstance(weight, QuantizedWeight):
            kind, group, packed = KINDS[weight.bits], weight.group, pack_quantized(weight)
            packed = empty_on_huge_pages(tuple(packed.shape), packed.dtype).copy_(packed)
        else:
            kind, group, packed = KINDS[weight.dtype], 0, pack_float(weight)
        bias = bias.float().contiguous() if bias is not None else None
        self.tensors = [packed] if bias is None else [packed, bias]
        self.struct = _Linear(kind, self.out_features, self.in_features, group, *(t.data_ptr() for t in self.tensors))
        self._reference = ctypes.byref(self.struct)
        self._linear = load().linear

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def rows(self, index: Tensor) -> Tensor:
        """Rows of a float layer's weight, (W,) -> (W, k) fp32: a tied head serves as the embedding too."""
        strip, channel = index // 32, index % 32
        packed = self.tensors[0]
        if packed.dtype == torch.float32:
            return packed[strip, :, channel]
        pairs = packed[strip, :, channel % 16]
        return torch.where(channel[:, None] < 16, pairs << 16, pairs & -65536).view(torch.float32)

    def __call__(self, x: Tensor, norm: Tensor | None = None, eps: float = 0.0, swiglu: bool = False,
                 residual: Tensor | None = None) -> Tensor:
        rows, width = x.shape  # (W, k), or (W, 2k) before SwiGLU
        assert width == self.in_features * (1 + swiglu) and x.is_contiguous() and x.dtype == torch.float32
        out = torch.empty(rows, self.out_features)
        prologue = SWIGLU if swiglu else RMS_NORM if norm is not None else PLAIN
        failed = self._linear(self._reference, x.data_ptr(), out.data_ptr(), rows, prologue,
                              None if norm is None else norm.data_ptr(), eps,
                              None if residual is None else residual.data_ptr())
        if failed:
            raise MemoryError("no memory left for the working buffer of a linear layer")
        return out  # (W, n)


class NativeLayers:
    """The decoder layers of a model as one call: per layer, attention with rotary positions and the append to the KV cache,
    and the gated MLP."""

    def __init__(self, layers: Sequence[Any], heads: int, kv_heads: int, head_dim: int, eps: float) -> None:
        """layers: with the fields of transformer.Layer, whose linear layers are NativeLinear."""
        self._shape = _Shape(len(layers), heads, kv_heads, head_dim, eps=eps)
        self._layers = (_Layer * len(layers))()
        for struct, layer in zip(self._layers, layers, strict=True):
            for name in ("qkv", "out", "gate_up", "down"):
                setattr(struct, name, ctypes.pointer(getattr(layer, name).struct))
            for name in ("input_norm", "mlp_norm", "q_norm", "k_norm"):
                norm = getattr(layer, name)
                setattr(struct, name, None if norm is None else norm.data_ptr())
        self._scratch = layers[0].qkv.out_features + heads * head_dim + layers[0].gate_up.out_features  # floats per row
        self._keep = list(layers)  # their memory is pointed to
        self._decode = load().decode

    def __call__(self, x: Tensor, keys: Tensor, values: Tensor, start: int, positions: Tensor, visible: Tensor | None,
                 cos: Tensor, sin: Tensor) -> Tensor:
        """x (W, hidden) fp32, overwritten -> the last layer's output. keys, values (layers, kv_heads, capacity, head_dim):
        W slots from `start` on are written. positions (W,) int64; visible (W, W) uint8, or None for a chain."""
        shape, rows = self._shape, x.shape[0]
        assert keys.is_contiguous() and values.is_contiguous() and start + rows <= keys.shape[2]
        assert x.is_contiguous() and x.dtype == torch.float32 and int(positions.max()) < cos.shape[0]
        shape.kv_kind, shape.capacity, shape.start, shape.rows = KINDS[keys.dtype], keys.shape[2], start, rows
        shape.cos, shape.sin = cos.data_ptr(), sin.data_ptr()
        shape.keys, shape.values = keys.data_ptr(), values.data_ptr()
        scratch = torch.empty(rows, self._scratch)
        failed = self._decode(ctypes.byref(shape), self._layers, x.data_ptr(), positions.data_ptr(),
                              None if visible is None else visible.data_ptr(), scratch.data_ptr())
        if failed:
            raise MemoryError("no memory left for the working buffer of a pass")
        return x
