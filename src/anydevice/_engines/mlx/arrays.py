"""The MLX engine: Metal on Apple Silicon, and the CPU there and on Linux.

CPU and GPU share the memory of an MLX array, and each operation says where it runs: the array lives
on every device that MLX has.

MLX takes its memory limit for a guideline, and ends the process if the machine has no memory left.
So an array beyond the limit, or beyond the machine, is refused here before MLX makes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from math import inf, prod
from typing import Any

import mlx.core as mx
import numpy as np

from anydevice._core.device import Device
from anydevice._core.dtypes import DTYPES, DType
from anydevice._core.engine import Absent, Engine
from anydevice._core.text import format_size
from anydevice._engines.base import BaseEngine
from anydevice._engines.host import known_dtype, lacking, narrowed, plain
from anydevice._engines.mlx.decoder_layer import host_products
from anydevice._machine.engines.registry import BUILT_IN
from anydevice._machine.hardware.cpu import reader

_LACKS = BUILT_IN["mlx"].lacks
_TYPES = {"metal": mx.gpu, "cpu": mx.cpu}
NATIVE = {
    row: getattr(mx, "bool_" if row.name == "bool" else row.name)
    for row in DTYPES.values()
    if row.name == "bool" or isinstance(getattr(mx, row.name, None), mx.Dtype)
}
"""The dtypes of MLX by ours."""
_ONLY_CPU = ("float64",)
_limit: int | None = None
_guideline: int | None = None
"""MLX's own limit, from before ours."""


class LimitReachedError(MemoryError):
    """An array would have exceeded MLX's limit of memory; `asked` is its size in bytes."""

    def __init__(self, message: str, size: int) -> None:
        super().__init__(message)
        self.asked = size


class MlxEngine(BaseEngine):
    name = "mlx"
    shares_memory = True
    dlpack = Absent(
        "MLX takes over no array without a copy", instead="copy it with to_device", code="no_dlpack"
    )

    def devices(self) -> tuple[Device, ...]:
        metal = (Device("metal"),) if mx.metal.is_available() else ()
        return (*metal, Device("cpu"))

    def native(self, device: Device) -> Any:
        if device not in self.devices():
            raise self.not_seen(device)
        return mx.Device(_TYPES[device.backend], device.index)

    def owns(self, x: object) -> bool:
        return isinstance(x, mx.array)

    def devices_of(self, x: mx.array) -> tuple[Device, ...]:
        return self.devices()

    def empty(self, shape: tuple[int, ...], dtype: DType, device: Device) -> mx.array:
        """Return an array of its own, finished: MLX writes zeros into it."""
        target = self.native(device)
        if dtype.name in _missing(device):
            raise _LACKS[dtype.name].error()
        kind = native_dtype(dtype)
        refuse_beyond_limit(prod(shape) * dtype.itemsize)
        made = mx.zeros(shape, kind, stream=target)
        mx.eval(made)
        return made

    def place(self, x: Any, device: Device, *, narrow: bool = False) -> mx.array:
        self.native(device)
        wide = known_dtype(x.dtype).name
        lacks = _missing(device)
        why = _LACKS[wide].what if wide in lacks else ""
        remedy = "keep it on the CPU" if wide in _ONLY_CPU else "use torch, or jax with x64"
        host = narrowed(x, lacks, why=why, remedy=remedy, narrow=narrow)
        native_dtype(known_dtype(host.dtype))
        refuse_beyond_limit(host.nbytes)
        made = from_host(plain(host))  # MLX refuses negative strides
        mx.eval(made)
        return made

    def to_host(self, x: mx.array) -> Any:
        row = self.dtype_of(x)
        if row.module == "numpy":
            return np.array(x)
        return np.array(x.view(NATIVE[DTYPES[f"uint{row.bits}"]])).view(row.numpy())

    def export(self, x: mx.array) -> mx.array:
        mx.eval(x)
        return x

    def separate(self, stacked: mx.array) -> list[mx.array]:
        return [mx.contiguous(row) for row in stacked]

    def finish(self, arrays: Any) -> None:
        mx.eval(arrays)

    def launch(self, arrays: Sequence[mx.array]) -> None:
        mx.async_eval(*arrays)  # type: ignore[no-untyped-call]

    def synchronize(self, device: Device) -> None:
        mx.synchronize(mx.default_stream(self.native(device)))

    def default_scope(self, device: Device) -> AbstractContextManager[object]:
        return _default(self.native(device))

    def inference_scope(self, device: Device) -> AbstractContextManager[object]:
        """Use NumPy's float32 products on Linux, where MLX has the slow reference BLAS."""
        return host_products()


def native_dtype(dtype: DType) -> Any:
    """Return the dtype of MLX; raises `UnsupportedError` if it has none."""
    try:
        return NATIVE[dtype]
    except KeyError:
        raise lacking("MLX", dtype) from None


def from_host(x: Any) -> mx.array:
    """Return a NumPy array as one of MLX, which reads no dtype that NumPy itself does not have."""
    row = known_dtype(x.dtype)
    if row.module == "numpy":
        return mx.array(x, dtype=native_dtype(row))
    return mx.array(x.view(f"uint{row.bits}")).view(native_dtype(row))


def _missing(device: Device) -> tuple[str, ...]:
    """Return the 64-bit dtypes that MLX does not have on the device."""
    return ("complex128",) if device.backend == "cpu" else ("complex128", *_ONLY_CPU)


@contextmanager
def _default(native: mx.Device) -> Iterator[object]:
    before = mx.default_device()
    mx.set_default_device(native)
    try:
        yield native
    finally:
        mx.set_default_device(before)


def memory_limit() -> int | None:
    """Return the most bytes that MLX may hold; `None` if no limit is set."""
    return _limit


def set_memory_limit(limit: int | None) -> None:
    """Limit the bytes that MLX may hold; `None` removes the limit."""
    global _limit, _guideline
    _limit = limit
    if limit is not None:
        before = mx.set_memory_limit(limit)
        _guideline = before if _guideline is None else _guideline
    elif _guideline is not None:
        mx.set_memory_limit(_guideline)
        _guideline = None


def refuse_beyond_limit(size: int) -> None:
    """Raise `LimitReachedError` if MLX, the machine or the container has no room for `size`."""
    most = _machine() if _limit is None else _limit
    in_use = mx.get_active_memory()
    if in_use + size <= most:
        return
    whose = "the memory that this process can have" if _limit is None else "the limit of MLX"
    raise LimitReachedError(
        f"{format_size(size)} more, with {format_size(in_use)} in use, would exceed {whose}, "
        f"{format_size(int(most))}",
        size,
    )


@cache
def _machine() -> float:
    """Return the memory that this process can have; reading it is slower than a small array."""
    most = reader.look().devices[0].facts.obtainable_memory
    return inf if most is None else most


ENGINE: Engine = MlxEngine()
