"""Text of kernels that walks through arrays by sizes and strides.

Sizes and strides are arguments of the kernels, so that a program serves every shape with the same
number of axes. Only a last stride of 0 or 1 is part of the text: compilers make vectors of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from anydevice.core.record import Record

Ints = tuple[int, ...]

most = 2**31 - 1
"""The largest index of 32 bits."""


class Walk(Record):
    """How a kernel walks through several arrays: the pieces of text, and the arguments for them.

    `sizes_text` and `strides_text` are parameters (with a comma before each), `offsets_text`
    computes `at_<name>` for each array from a variable. The arguments come in the same order.
    """

    sizes_text: str
    strides_text: str
    offsets_text: str
    sizes: Ints
    strides: Ints


@lru_cache(maxsize=4096)
def walk(
    shape: Ints, strides: tuple[Ints, ...], names: tuple[str, ...], item: str = "item"
) -> Walk:
    """The walk through a shape that `views.collapsed` gave, an array a name."""
    rank = len(shape)
    tag = item
    lines = [f"size_t rest_{tag} = {item};"]
    for axis in range(rank - 1, 0, -1):
        lines.append(
            f"const INDEX {tag}{axis} = (UNSIGNED)rest_{tag} % (UNSIGNED){tag}_size{axis};"
        )
        lines.append(f"rest_{tag} = (UNSIGNED)rest_{tag} / (UNSIGNED){tag}_size{axis};")
    lines.append(f"const INDEX {tag}0 = rest_{tag};")
    parameters: list[str] = []
    values: list[int] = []
    for name, steps in zip(names, strides, strict=True):
        terms: list[str] = []
        for axis, step in enumerate(steps):
            if axis == rank - 1 and step in (0, 1):
                terms += [f"{tag}{axis}"] if step else []
                continue
            parameters.append(f", const INDEX {name}_{tag}_stride{axis}")
            values.append(step)
            terms.append(f"{tag}{axis} * {name}_{tag}_stride{axis}")
        lines.append(f"const INDEX {tag}_at_{name} = {' + '.join(terms) or '0'};")
    return Walk(
        sizes_text="".join(f", const INDEX {tag}_size{axis}" for axis in range(1, rank)),
        strides_text="".join(parameters),
        offsets_text=" ".join(lines),
        sizes=tuple(shape[1:]),
        strides=tuple(values),
    )


def is_wide(*extents: int) -> bool:
    """Whether an index that goes so far needs 64 bits."""
    return max(extents) > most


def index_types(wide: bool) -> tuple[dict[str, object], Any]:
    """What kernels call the type of an index, and NumPy's."""
    if wide:
        return {"INDEX": "long", "UNSIGNED": "ulong"}, np.int64
    return {"INDEX": "int", "UNSIGNED": "uint"}, np.int32


def extent(start: int, shape: Sequence[int], strides: Sequence[int]) -> int:
    """One past the last element that a walk comes to."""
    return (
        start
        + sum((size - 1) * max(step, 0) for size, step in zip(shape, strides, strict=True))
        + 1
    )
