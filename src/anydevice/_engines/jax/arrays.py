"""The JAX engine: CUDA, ROCm and TPU through plugins, and the CPU with any number of devices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, lru_cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from anydevice._core.device import Device
from anydevice._core.dtypes import DType, as_dtype
from anydevice._core.engine import Absent, Engine
from anydevice._core.quantized import ARRAYS, QuantizedWeight
from anydevice._core.record import as_dict
from anydevice._engines.base import BaseEngine
from anydevice._engines.host import NARROWER, known_dtype, lacking, narrowed, plain, private

_BACKENDS = ("cuda", "rocm", "tpu", "cpu")
_WITH_POINTERS = ("cuda", "rocm", "cpu")
NO_64_BITS = Absent(
    "JAX's 64-bit numbers are off",
    instead="call anydevice.configure(x64=True) first, or write x64 = true in anydevice.toml",
    code="no_dtype",
)
_TRACED = Absent("a traced array has no numbers yet", instead="read it outside of the function")
_ELSEWHERE = Absent(
    "parts of this array are in other processes",
    instead="call parallel.gather in all of them first",
)
_WORTH_ASKING = 2**30
"""Bytes of an array beside which asking JAX for its limit takes no time."""
_ROWS = 500
"""Rows that are separated by one compiled call: more make compiling slow, and little else fast."""
_WORTH_COMPILING = 1500
_tried: set[tuple[DType, Any]] = set()


def _flatten(weight: QuantizedWeight) -> tuple[list[Any], tuple[Any, ...]]:
    """Return the arrays of a weight, and the rest, which is constant in compiled code."""
    fields = as_dict(weight)
    return [fields.pop(name) for name in ARRAYS], tuple(fields.items())


jax.tree_util.register_pytree_node(
    QuantizedWeight,
    _flatten,
    lambda rest, arrays: QuantizedWeight(**dict(rest), **dict(zip(ARRAYS, arrays, strict=True))),
)


class JaxEngine(BaseEngine):
    name = "jax"
    dlpack = None

    def devices(self) -> tuple[Device, ...]:
        return tuple(_places().values())

    def native(self, device: Device) -> Any:
        devices = _local_devices(device.backend)
        if device.index >= len(devices):
            raise self.not_seen(device)
        return devices[device.index]

    def owns(self, x: object) -> bool:
        return isinstance(x, Array)

    def is_traced(self, x: Array) -> bool:
        return isinstance(x, jax.core.Tracer)

    def devices_of(self, x: Array) -> tuple[Device, ...]:
        """Return the array's devices: several if it is sharded, none while it is traced."""
        if isinstance(x, jax.core.Tracer):
            return ()
        here = x.sharding.addressable_devices  # without those of other hosts
        return tuple(place for native, place in _places().items() if native in here)

    def address(self, x: Array) -> int | None:
        places = self.devices_of(x)
        if len(places) != 1 or places[0].backend not in _WITH_POINTERS or self.dtype_of(x).packed:
            return None
        # An older JAX does not tell the layout.
        layout = getattr(getattr(x, "format", None), "layout", None)
        if x.ndim > 1 and getattr(layout, "major_to_minor", None) != tuple(range(x.ndim)):
            return None
        return x.unsafe_buffer_pointer()

    def empty(self, shape: tuple[int, ...], dtype: DType, device: Device) -> Array:
        """Return an array of its own; JAX writes zeros into it, which is waited for."""
        target = self.native(device)
        if dtype.name in _lacking():
            raise NO_64_BITS.error()
        _refuse_unknown(dtype, target)
        _refuse_impossible(prod(shape) * dtype.itemsize, target)
        return _maker(shape, dtype.name, target)().block_until_ready()

    def place(self, x: Any, device: Device, *, narrow: bool = False) -> Array:
        target = self.native(device)
        why, remedy = NO_64_BITS.what, NO_64_BITS.instead
        host = narrowed(x, _lacking(), why=why, remedy=remedy, narrow=narrow)
        # On the CPU, JAX may keep using the memory it is given; elsewhere, it reads it later.
        host = private(host) if target.platform == "cpu" else plain(host)
        _refuse_unknown(known_dtype(host.dtype), target)
        _refuse_impossible(host.nbytes, target)
        return jax.device_put(host, target).block_until_ready()

    def to_host(self, x: Array) -> Any:
        known_dtype(x.dtype)
        if self.is_traced(x):
            raise _TRACED.error()
        if not (x.is_fully_addressable or x.is_fully_replicated):
            raise _ELSEWHERE.error()
        # JAX keeps the host copy beside the array that is read: here, a part that is dropped.
        return np.array(x.addressable_data(0) if x.is_fully_replicated else x)

    def from_dlpack(self, x: Any) -> Array:
        if known_dtype(x.dtype).name in _lacking():  # JAX would narrow it without a word
            raise BufferError(NO_64_BITS.what)
        return jax.dlpack.from_dlpack(x, copy=False)  # on the CPU, of aligned memory alone

    def move(self, x: Array, device: Device) -> Array:
        target = self.native(device)
        if isinstance(x, jax.core.Tracer):
            return jax.device_put(x, target)
        if not (x.is_fully_addressable or x.is_fully_replicated):
            raise _ELSEWHERE.error()
        if not x.is_fully_addressable:
            x = x.addressable_data(0)
        return x if x.devices() == {target} else jax.device_put(x, target)

    def separate(self, stacked: Array) -> list[Array]:
        if len(stacked) < _WORTH_COMPILING:
            return list(stacked)
        whole = len(stacked) - len(stacked) % _ROWS
        rows = [row for at in range(0, whole, _ROWS) for row in _separated(stacked, at)]
        return rows + list(stacked[whole:])

    def matmul(self, a: Array, b: Array) -> Array:
        return jnp.matmul(a, b)

    def finish(self, arrays: Any) -> None:
        jax.block_until_ready(arrays)

    def synchronize(self, device: Device) -> None:
        # JAX has no such call: wait for all arrays there, as they may be under way.
        target = self.native(device)
        for array in jax.live_arrays(target.platform):
            if target in array.devices():
                array.block_until_ready()

    def default_scope(self, device: Device) -> AbstractContextManager[object]:
        return jax.default_device(self.native(device))


@cache
def _local_devices(backend: str) -> tuple[jax.Device, ...]:
    # JAX starts its backends once for a process, so the answer stays the same.
    if backend not in _BACKENDS:
        return ()
    try:
        return tuple(jax.local_devices(backend=backend))
    except RuntimeError:  # JAX's way of saying that it has no such backend
        return ()


@cache
def _places() -> dict[Any, Device]:
    return {
        native: Device(backend, index)
        for backend in _BACKENDS
        for index, native in enumerate(_local_devices(backend))
    }


@lru_cache(maxsize=4096)
def _maker(shape: tuple[int, ...], dtype: str, target: Any) -> Callable[[], Any]:
    # Compiled once for a shape, this is forty times faster than calling `jnp.empty`.
    place = jax.sharding.SingleDeviceSharding(target)
    kind = as_dtype(dtype).numpy()
    return jax.jit(lambda: jnp.empty(shape, kind), out_shardings=place)


def _lacking() -> tuple[str, ...]:
    """Return the 64-bit dtypes, while JAX has none."""
    return () if jax.config.jax_enable_x64 else tuple(NARROWER)


def _refuse_unknown(dtype: DType, target: Any) -> None:
    """Refuse a dtype that only ml_dtypes has; which ones JAX has depends on its version."""
    if dtype.module == "numpy" or (dtype, target) in _tried:
        return
    if dtype.packed and dtype.kind == "float":
        raise lacking("JAX", dtype)  # releases that know it take the whole process down
    try:
        jax.device_put(np.zeros(0, dtype.numpy()), target)
    except (TypeError, ValueError, RuntimeError) as error:
        raise lacking("JAX", dtype) from error
    _tried.add((dtype, target))


def _refuse_impossible(size: int, target: Any) -> None:
    """Refuse more than JAX may ever hold there: XLA would first wait ten seconds for memory."""
    if size < _WORTH_ASKING:
        return
    most = (target.memory_stats() or {}).get("bytes_limit") or size  # nothing on the CPU
    if size > most:
        raise MemoryError(f"tried to allocate {size} bytes on {target}: JAX may hold {most} there")


def _rows_of(stacked: Array, at: int) -> list[Array]:
    some = jax.lax.dynamic_slice_in_dim(stacked, at, _ROWS)
    return [some[number] for number in range(_ROWS)]


_separated = jax.jit(_rows_of)


ENGINE: Engine = JaxEngine()
