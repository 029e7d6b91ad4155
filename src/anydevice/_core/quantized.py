"""Quantized weights: packed integers with a scale, and maybe a minimum, for each block."""

from __future__ import annotations

from collections.abc import Mapping

from anydevice._core.array import Array
from anydevice._core.record import Record, replace

SUPER_BLOCK = 256
"""Columns that share a super-scale, as in GGUF's K-quants."""

ARRAYS = ("codes", "high", "scales", "minimums", "super_scales", "super_minimums")
"""The fields that are arrays; all but `codes` and `scales` may be None."""

IQ4_NL_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The 16 levels of IQ4_NL and IQ4_XS (ggml's `kvalues_iq4nl`)."""
FP4_TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""The numbers of e2m1, doubled, so that they are integers; scales are halved."""


class BlockType(Record):
    """A block type of GGUF: its number there, and the columns and bytes of a block.

    `scaled` is the number of columns that share a scale, `block` of a `QuantizedWeight`; the fields
    after it have the names that they have there.
    """

    number: int
    columns: int
    bytes: int
    bits: int
    scaled: int
    zero: int = 0
    minimums: bool = False
    table: tuple[float, ...] | None = None

    @property
    def memory_bits(self) -> float:
        """The bits of a number in memory, scales included."""
        integers = self.columns == SUPER_BLOCK
        scale_bits = (8 if integers else 16) / self.scaled + (16 / SUPER_BLOCK if integers else 0)
        return self.bits + scale_bits * (1 + self.minimums)


BLOCK_TYPES = {
    "Q4_0": BlockType(2, 32, 18, 4, 32, zero=8),
    "Q4_1": BlockType(3, 32, 20, 4, 32, minimums=True),
    "Q5_0": BlockType(6, 32, 22, 5, 32, zero=16),
    "Q5_1": BlockType(7, 32, 24, 5, 32, minimums=True),
    "Q8_0": BlockType(8, 32, 34, 8, 32, zero=128),
    "Q2_K": BlockType(10, SUPER_BLOCK, 84, 2, 16, minimums=True),
    "Q3_K": BlockType(11, SUPER_BLOCK, 110, 3, 16, zero=4),
    "Q4_K": BlockType(12, SUPER_BLOCK, 144, 4, 32, minimums=True),
    "Q5_K": BlockType(13, SUPER_BLOCK, 176, 5, 32, minimums=True),
    "Q6_K": BlockType(14, SUPER_BLOCK, 210, 6, 16, zero=32),
    "IQ4_NL": BlockType(20, 32, 18, 4, 32, table=IQ4_NL_TABLE),
    "IQ4_XS": BlockType(23, SUPER_BLOCK, 136, 4, 32, table=IQ4_NL_TABLE),
    "MXFP4": BlockType(39, 32, 17, 4, 32, table=FP4_TABLE),
}
"""GGUF's block types whose codes and scales are kept as stored, by their names there."""


class QuantizedWeight(Record):
    """A matrix, or a stack of matrices, of small integers with scales along its last axis.

    The number at column c is `scale · (code - zero) + minimum`, with the scale and the minimum of
    block `c // block`. With a `table` it is `scale · table[code] + minimum`. All is computed in
    float32, in this order.

    `codes` are uint8 and hold `low_bits` of each code, the first code in the lowest bits of a byte.
    Codes of 3, 5 and 6 bits keep their other bits in `high`, packed in the same way:
    (…, rows, columns · bits / 8) each. `scales` and `minimums` are (…, rows, blocks). As floats
    they are used as they are. As int8 they are multiplied by `super_scales` and `super_minimums`,
    float16 of (…, rows, columns / 256).
    """

    scheme: str
    shape: tuple[int, ...]
    bits: int
    block: int
    codes: Array
    scales: Array
    high: Array | None = None
    minimums: Array | None = None
    super_scales: Array | None = None
    super_minimums: Array | None = None
    zero: int = 0
    table: tuple[float, ...] | None = None

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def dtype(self) -> str:
        """The scheme, in the place of an array's dtype."""
        return self.scheme

    @property
    def low_bits(self) -> int:
        """The bits of each code in `codes`; `high` holds the rest."""
        return low_bits(self.bits)

    @property
    def arrays(self) -> dict[str, Array]:
        """The arrays by the names of their fields, without those that the scheme does not have."""
        values = ((name, getattr(self, name)) for name in ARRAYS)
        return {name: value for name, value in values if value is not None}

    def array_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape that each array must have, if there is one."""
        *rows, columns = self.shape
        low, blocks, groups = self.low_bits, columns // self.block, columns // SUPER_BLOCK
        sizes = (columns * low // 8, columns * (self.bits - low) // 8, blocks, blocks)
        return {n: (*rows, x) for n, x in zip(ARRAYS, (*sizes, groups, groups), strict=True)}

    # Arrays have no single answer to ==, so that weights are equal only if they are the same.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"QuantizedWeight({self.scheme}, {self.shape})"

    def with_arrays(
        self, arrays: Mapping[str, Array], shape: tuple[int, ...] | None = None
    ) -> QuantizedWeight:
        """Return the weight with other arrays, and maybe another number of rows or matrices."""
        return replace(self, shape=self.shape if shape is None else shape, **arrays)


def low_bits(bits: int) -> int:
    """Return the bits of a code that `codes` holds, so that a byte holds whole codes.

    >>> [low_bits(bits) for bits in (2, 3, 4, 5, 6, 8)]
    [2, 2, 4, 4, 4, 8]
    """
    return {2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 8: 8}[bits]
