"""NumPy's memory, which comes from the operating system and is not counted."""

from __future__ import annotations

from math import prod

from anydevice._core.engine import Memory
from anydevice._engines.base import BaseMemory
from anydevice._engines.numpy.arrays import ENGINE


class NumpyMemory(BaseMemory):
    """NumPy takes memory from the system and gives it back array by array."""

    def ran_out(self, error: BaseException) -> bool:
        if type(error) is ValueError:  # for more than any machine could have
            return str(error).startswith("array is too big")
        # A private subclass of NumPy's, or Python's own class.
        ours = type(error).__module__.partition(".")[0] in ("numpy", "builtins")
        return isinstance(error, MemoryError) and ours

    def asked(self, error: BaseException) -> int | None:
        # NumPy's own error carries the shape and dtype of the array.
        shape, dtype = getattr(error, "shape", None), getattr(error, "dtype", None)
        return None if shape is None or dtype is None else int(prod(shape) * dtype.itemsize)


MEMORY: Memory = NumpyMemory(ENGINE)
