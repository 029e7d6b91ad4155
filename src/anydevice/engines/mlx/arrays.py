"""MLX: Metal on Apple Silicon, and the CPU there and on Linux.

An MLX array lies in memory that CPU and GPU share; where it is worked on is decided by each
operation, so it lives on every device that MLX has.

How much memory MLX may hold, watched over here: MLX itself goes on beyond its limit.

What MLX calls its memory limit is a guideline, beyond which it gives back what it keeps for later
and then allocates all the same. Where the machine has no room on a CPU it does not say so either,
but takes the process down. So an array is refused here before MLX makes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from math import inf, prod
from typing import Any

import mlx.core as mx
import numpy as np

from anydevice.core.device import Device
from anydevice.core.dtypes import DTYPES, DType
from anydevice.core.engine import Absent, Engine
from anydevice.core.text import format_size
from anydevice.engines.base import Facets
from anydevice.engines.host import known_dtype, lacking, narrowed, plain
from anydevice.engines.lookup import not_seen
from anydevice.engines.registry import BUILT_IN
from anydevice.hardware.cpu import reader as cpu

_LACKS = BUILT_IN["mlx"].lacks
_NO_VIEWS = Absent("MLX has no views", instead="take a part of the array, which is a copy")
_TYPES = {"metal": mx.gpu, "cpu": mx.cpu}
_OURS = {
    row: getattr(mx, "bool_" if row.name == "bool" else row.name)
    for row in DTYPES.values()
    if row.name == "bool" or isinstance(getattr(mx, row.name, None), mx.Dtype)
}
_ONLY_CPU = ("float64",)


class MlxEngine(Facets):
    """Arrays of MLX."""

    name = "mlx"
    shares_memory = True
    has_views = False
    dlpack = Absent("MLX takes over no array without a copy", instead="copy it with to_device")

    def devices(self) -> tuple[Device, ...]:
        metal = (Device("metal"),) if mx.metal.is_available() else ()
        return (*metal, Device("cpu"))

    def native(self, device: Device) -> Any:
        if device not in self.devices():
            raise not_seen("MLX", device, self.devices())
        return mx.Device(_TYPES[device.backend], device.index)

    def owns(self, x: object) -> bool:
        return isinstance(x, mx.array)

    def is_traced(self, x: Any) -> bool:
        return False

    def devices_of(self, x: Any) -> tuple[Device, ...]:
        return self.devices()

    def dtype_of(self, x: Any) -> DType:
        return known_dtype(x.dtype)

    def storage(self, x: Any) -> None:
        """Nothing: MLX does not say where an array lies."""

    def address(self, x: Any) -> None:
        """Nothing: MLX does not say where an array lies."""

    def view(
        self, x: Any, dtype: DType, offset: int, strides: tuple[int, ...], shape: tuple[int, ...]
    ) -> Any:
        raise _NO_VIEWS.error()

    def empty(self, shape: tuple[int, ...], dtype: DType, device: Device) -> Any:
        """An array of its own, finished: MLX writes zeros into it."""
        target = self.native(device)
        if dtype.name in _missing(device):
            raise _LACKS[dtype.name].error()
        if dtype not in _OURS:
            raise lacking("MLX", dtype)
        refuse_beyond_limit(size_of(shape, _OURS[dtype]))
        made = mx.zeros(shape, _OURS[dtype], stream=target)
        mx.eval(made)
        return made

    def place(self, x: Any, device: Device, *, narrow: bool = False) -> Any:
        self.native(device)
        wide = known_dtype(x.dtype).name
        lacks = _missing(device)
        why = _LACKS[wide].what if wide in lacks else ""
        remedy = "keep it on the CPU" if wide in _ONLY_CPU else "use torch, or jax with x64"
        host = narrowed(x, lacks, why=why, remedy=remedy, narrow=narrow)
        row = known_dtype(host.dtype)
        if row not in _OURS:
            raise lacking("MLX", row)
        refuse_beyond_limit(host.nbytes)
        host = plain(host)  # MLX refuses negative strides
        if row.module == "numpy":
            made = mx.array(host, dtype=_OURS[row])
        else:  # MLX reads no type that NumPy itself does not have
            made = mx.array(host.view(f"uint{row.bits}")).view(_OURS[row])
        mx.eval(made)
        return made

    def to_host(self, x: Any) -> Any:
        row = self.dtype_of(x)
        if row.module == "numpy":
            return np.array(x)
        return np.array(x.view(_OURS[DTYPES[f"uint{row.bits}"]])).view(row.numpy())

    def adopt(self, x: Any) -> Any:
        raise self.dlpack.error()

    def export(self, x: Any) -> Any:
        mx.eval(x)
        return x

    def move(self, x: Any, device: Device) -> Any:
        self.native(device)
        return x

    def separate(self, stacked: Any) -> list[Any]:
        return [mx.contiguous(row) for row in stacked]

    def matmul(self, a: Any, b: Any) -> Any:
        """The product, on MLX's default device: `default_scope` sets another one."""
        return mx.matmul(a, b)

    def finish(self, arrays: Any) -> None:
        mx.eval(arrays)

    def receive(self, arrays: Sequence[Any]) -> None:
        """Return at once: what `finish` has computed may be used by any thread."""

    def synchronize(self, device: Device) -> None:
        mx.synchronize(mx.default_stream(self.native(device)))

    def default_scope(self, device: Device) -> AbstractContextManager[Any]:
        return _default(self.native(device))


def _missing(device: Device) -> tuple[str, ...]:
    """The 64-bit types that there are none of on the device."""
    return ("complex128",) if device.backend == "cpu" else ("complex128", *_ONLY_CPU)


@contextmanager
def _default(native: Any) -> Iterator[Any]:
    before = mx.default_device()
    mx.set_default_device(native)
    try:
        yield native
    finally:
        mx.set_default_device(before)


ENGINE: Engine = MlxEngine()


_limit: int | None = None
_guideline: int | None = None
"""MLX's own limit, from before ours."""


class LimitReachedError(MemoryError):
    """An array would have gone beyond what MLX may hold; `asked` is its size in bytes."""

    def __init__(self, message: str, asked: int) -> None:
        super().__init__(message)
        self.asked = asked


def limit() -> int | None:
    """The most bytes that MLX may hold; `None` where nobody has set a limit."""
    return _limit


def set_limit(limit: int | None) -> None:
    """Let MLX hold at most so many bytes; `None` lifts the limit."""
    global _limit, _guideline
    _limit = limit
    if limit is not None:
        before = mx.set_memory_limit(limit)
        _guideline = before if _guideline is None else _guideline
    elif _guideline is not None:
        mx.set_memory_limit(_guideline)
        _guideline = None


def refuse_beyond_limit(size: int) -> None:
    """Raise `LimitReachedError` where so many bytes more are too many, for MLX or the machine.

    A container counts as a machine of its size.
    """
    most = _machine() if _limit is None else _limit
    held = mx.get_active_memory()
    if held + size <= most:
        return
    whose = "the memory that this process can have" if _limit is None else "the limit of MLX"
    raise LimitReachedError(
        f"{format_size(size)} more than the {format_size(held)} in use are beyond {whose}, "
        f"{format_size(int(most))}",
        size,
    )


def size_of(shape: tuple[int, ...], dtype: Any) -> int:
    """The bytes of an array."""
    return prod(shape) * int(dtype.size)


@cache
def _machine() -> float:
    """The memory that this process can have; reading it takes longer than making a small array."""
    most = cpu.look().devices[0].facts.obtainable_memory
    return inf if most is None else most
