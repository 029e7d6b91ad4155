"""JAX: CUDA, ROCm and TPU through its plugins, and the CPU with any number of virtual devices."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anydevice.core.device import Device
from anydevice.core.engine import Absent, Engine
from anydevice.engines.sight import not_seen

_BACKENDS = ("cuda", "rocm", "tpu", "cpu")
_NARROW = {"float64": "float32", "complex128": "complex64", "int64": "int32", "uint64": "uint32"}


class JaxEngine:
    """Arrays of JAX."""

    name = "jax"

    def devices(self) -> tuple[Device, ...]:
        return tuple(_places().values())

    def native(self, device: Device) -> Any:
        seen = _seen(device.backend)
        if device.index >= len(seen):
            raise not_seen("JAX", device, self.devices())
        return seen[device.index]

    def owns(self, x: object) -> bool:
        return isinstance(x, jax.Array)

    def devices_of(self, x: Any) -> tuple[Device, ...]:
        """Where the array lives, several where it is sharded; nowhere while it is traced."""
        if isinstance(x, jax.core.Tracer):
            return ()
        here = x.sharding.addressable_devices  # without those of other hosts
        return tuple(place for native, place in _places().items() if native in here)

    def from_host(self, x: Any, device: Device) -> Any:
        target = self.native(device)
        _refuse_narrowing(x)
        # A private copy: on the CPU, JAX may keep using the memory it is given.
        return jax.device_put(np.array(x), target)

    def to_host(self, x: Any) -> Any:
        return np.array(x)

    def move(self, x: Any, device: Device) -> Any:
        target = self.native(device)
        return x if x.devices() == {target} else jax.device_put(x, target)

    def matmul(self, a: Any, b: Any) -> Any:
        return jnp.matmul(a, b)

    def synchronize(self, device: Device) -> None:
        # JAX has no such call: what is under way is what some array there still waits for.
        target = self.native(device)
        for array in jax.live_arrays(target.platform):
            if target in array.devices():
                array.block_until_ready()

    def default_scope(self, device: Device) -> AbstractContextManager[Any]:
        scope: AbstractContextManager[Any] = jax.default_device(self.native(device))
        return scope


@cache
def _seen(backend: str) -> tuple[Any, ...]:
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
        for index, native in enumerate(_seen(backend))
    }


def _refuse_narrowing(x: Any) -> None:
    """Refuse what JAX, while its 64-bit numbers are off, would silently make less exact."""
    kind = str(x.dtype)
    if jax.config.jax_enable_x64 or kind not in _NARROW:
        return
    if x.dtype.kind in "iu" and np.array_equal(x, x.astype(_NARROW[kind])):
        return
    raise Absent(
        f"JAX would make this {kind} array {_NARROW[kind]}, because its 64-bit numbers are off",
        instead="call anydevice.configure(x64=True) first, or convert the array yourself",
    ).error()


ENGINE: Engine = JaxEngine()
