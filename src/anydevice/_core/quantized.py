"""Quantized weights: packed integers with a scale, and maybe a minimum, for each block.

One value serves every format: GGUF's block types, GPTQ, AWQ, float8 and MXFP4. Its arrays may be
of any library. Packing and unpacking are in `_formats`, computing is in `_ops`.
"""

from __future__ import annotations

from math import prod

from anydevice._core.array import Array
from anydevice._core.record import Record


class QuantizedWeight(Record):
    """A matrix, or a stack of matrices, of small integers with scales along its last axis.

    The number at column c is `scale · (code − zero) + minimum`, with the scale and the minimum of
    block `c // block`; with a `table`, it is `scale · table[code] + minimum`. All is computed in
    float32, in this order.

    `codes` are uint8, (…, rows, columns · bits / 8), and hold 8 / bits codes each, the first one in
    the lowest bits. `scales` are float32 or float16, and `minimums` float32: (…, rows, blocks).

    >>> import numpy
    >>> codes, scales = numpy.zeros((3, 32), "uint8"), numpy.ones((3, 2), "float32")
    >>> weight = QuantizedWeight("q4_0", (3, 64), 4, 32, codes, scales, zero=8)
    >>> weight.shape, weight.nbytes
    ((3, 64), 120)
    """

    scheme: str
    shape: tuple[int, ...]
    bits: int
    block: int
    codes: Array
    scales: Array
    minimums: Array | None = None
    zero: int = 0
    table: tuple[float, ...] | None = None

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays, without minimums that it does not have."""
        few = (self.codes, self.scales)
        return few if self.minimums is None else (*few, self.minimums)

    @property
    def nbytes(self) -> int:
        """The bytes of its arrays."""
        width = 2 if "float16" in str(self.scales.dtype) else 4
        blocks = prod(self.scales.shape)
        return prod(self.codes.shape) + blocks * (width if self.minimums is None else width + 4)

    def with_arrays(self, arrays: tuple[Array, ...]) -> QuantizedWeight:
        """Return the weight with other arrays in the order of `arrays`."""
        names = ("codes", "scales", "minimums")
        return self.__replace__(**dict(zip(names, arrays, strict=False)))
