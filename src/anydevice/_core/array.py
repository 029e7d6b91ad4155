"""The type of an array of any library, for annotations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np

    HostArray = np.ndarray[Any, Any]
    """A NumPy array of any shape and dtype."""


class Array(Protocol):
    """An array of NumPy, torch, JAX, MLX, CuPy or OpenCL, or of an engine that someone adds.

    It promises three attributes, which traced and meta arrays have too, and nothing else: no
    operators, no indexing and no methods. To compute with an array, use its engine's primitives or
    `anydevice.ops`; for its dtype as a `DType`, use the engine's `dtype_of`. Code of a single
    library names that library's own type.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each axis."""

    @property
    def dtype(self) -> object:
        """The library's own dtype: equal for arrays of one library and dtype, and hashable."""

    @property
    def ndim(self) -> int:
        """The number of axes."""


class ScalarArray(Array, Protocol):
    """An array of one number, such as a loss; `float(loss)` waits for it."""

    def __float__(self) -> float: ...

    def item(self) -> Any:
        """Return the number as Python's own."""


ArrayT = TypeVar("ArrayT", bound=Array)
"""The array type of a caller: a function that takes and returns it keeps the library."""
