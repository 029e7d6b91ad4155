"""A model as a table: each layer with the shape it gives, its parameters and their bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from anydevice.core.sizes import format_size
from anydevice.nn.chain import Chain
from anydevice.nn.layer import Layer, Parameters, Shape
from anydevice.nn.tied_layers import TiedEmbedding
from anydevice.nn.trees import leaves
from anydevice.ops.dispatch import primitives

_HEADINGS = ("model", "", "output", "parameters", "bytes")
_TO_THE_RIGHT = (3, 4)

Row = tuple[str, ...]


def table_of(layer: Layer, shape: Shape, parameters: Parameters) -> str:
    """The table of a layer that takes examples of this shape, with these parameters.

    Every layer of a chain has a row, also of one inside another; what is inside a block is counted
    with the block.
    """
    rows = [_HEADINGS, *_rows(layer, shape, parameters, "")]
    output = layer.output(shape)
    rows.append(_row(type(layer).__name__, f"{_sizes(shape)} → {_sizes(output)}", "", parameters))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_line(row, widths) for row in rows)


def _rows(layer: Layer, shape: Shape, parameters: Parameters, path: str) -> Iterator[Row]:
    if isinstance(layer, TiedEmbedding):
        yield _row(path, layer.label, _sizes(layer.output(shape)), parameters["weight"])
        inner = (*shape, layer.size)
        yield from _rows(layer.inside, inner, parameters["inside"], f"{path}.inside")
        return
    if not isinstance(layer, Chain):
        yield _row(path, layer.label, _sizes(layer.output(shape)), parameters)
        return
    for (step, part), own in zip(layer.parts, parameters, strict=True):
        yield from _rows(part, shape, own, path + step)
        shape = part.output(shape)


def _row(path: str, label: str, output: str, parameters: Parameters) -> Row:
    arrays = leaves(parameters)
    count = sum(math.prod(array.shape) for array in arrays)
    size = sum(math.prod(array.shape) * primitives(array).dtype(array).itemsize for array in arrays)
    return path, label, output, f"{count:,}", format_size(size)


def _sizes(shape: Shape) -> str:
    return "×".join(map(str, shape)) or "1"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [
        cell.rjust(width) if at in _TO_THE_RIGHT else cell.ljust(width)
        for at, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()
