"""Where bounds are computed: an engine on a device, in float64 or float32, probed before use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from anydevice import ops

Array = Any
Host = npt.NDArray[Any]


class Machine(NamedTuple):
    """How an array gets to a device and back, and the numbers it is computed with there.

    `xp` has the functions of `ops`, for arrays that know the operators of Python. `rows` is how
    many rows are substituted backward at once. `pads` asks for few different sizes, where each
    new one is compiled.
    """

    place: Callable[[Host], Array]
    indices: Callable[[Host], Array]
    host: Callable[[Array], Host]
    dtype: str = "float64"
    rows: int = 4096
    pads: bool = False
    xp: Any = ops
    dot: Callable[[Array, Array], Array] = lambda a, b: ops.einsum("ij,ij->i", a, b)
    name: str = ""

    def optimising(self) -> Machine:
        """Where slopes and multipliers are optimised, which need not be exact."""
        return numpy_machine("float32") if self.is_numpy else self

    @property
    def is_numpy(self) -> bool:
        return self.name == "numpy"

    @property
    def unit(self) -> float:
        return 2.0**-53 if self.dtype == "float64" else 2.0**-24

    @property
    def tiny(self) -> float:
        """Every smaller number may be taken for zero."""
        return 2.0**-1022 if self.dtype == "float64" else 2.0**-126


def numpy_machine(dtype: str = "float64", rows: int = 1024) -> Machine:
    """NumPy itself: what is placed there is where it was."""

    def place(x: Host) -> Host:
        return np.ascontiguousarray(x, dtype)

    def dot(a: Host, b: Host) -> Host:
        summed: Host = np.einsum("ij,ij->i", a, b)
        return summed

    return Machine(place, lambda x: x, lambda x: x, dtype, rows, dot=dot, name="numpy")


def machine_on(device: Any, engine: str | None) -> Machine:
    """The machine of an engine on a device, after a product whose result is known."""
    raise NotImplementedError
