"""Memory of NumPy: the operating system's, which nobody counts for it."""

from __future__ import annotations

from math import prod

from anydevice.core.device import Device
from anydevice.core.engine import Memory
from anydevice.engines.numpy.arrays import ENGINE


class NumpyMemory:
    """NumPy takes memory from the system and gives it back array by array."""

    def use(self, device: Device) -> None:
        """Nothing: NumPy does not count."""
        ENGINE.native(device)

    def reset_peak(self, device: Device) -> None:
        ENGINE.native(device)

    def set_limit(self, device: Device, limit: int | None) -> str | None:
        ENGINE.native(device)
        if limit is None:
            return None
        return (
            "NumPy takes its memory from the system, which a limit of anydevice does not reach; "
            "use the system's own: ulimit -v, or a cgroup"
        )

    def release(self, device: Device) -> None:
        """Return at once: memory of arrays that are gone has gone back already."""
        ENGINE.native(device)

    def ran_out(self, error: BaseException) -> bool:
        if type(error) is ValueError:  # for more than any machine could have
            return str(error).startswith("array is too big")
        # A subclass of NumPy's own, which is private, or what Python itself raises.
        ours = type(error).__module__.partition(".")[0] in ("numpy", "builtins")
        return isinstance(error, MemoryError) and ours

    def asked(self, error: BaseException) -> int | None:
        # NumPy's own carries what was to be made.
        shape, dtype = getattr(error, "shape", None), getattr(error, "dtype", None)
        if shape is None or dtype is None:
            return None
        return int(prod(shape) * dtype.itemsize)


MEMORY: Memory = NumpyMemory()
