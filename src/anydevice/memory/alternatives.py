"""What could be asked instead: the context, batch or element type with which a model would fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from anydevice.core.dtypes import DTYPES
from anydevice.core.record import Record
from anydevice.memory.arrangements import Group, arrange, pieces_of
from anydevice.memory.estimates import MemoryEstimate, estimate_inference
from anydevice.memory.placements import Alternative, Change
from anydevice.memory.quantization import QUANTIZED, quantized
from anydevice.memory.shapes import ModelShape

_HALF = "bfloat16"
_SMALL_CACHE = "float8_e4m3fn"


class Asked(Record):
    """What was asked for, and what it would need."""

    shape: ModelShape
    estimate: MemoryEstimate
    in_half: Callable[[], ModelShape] | None
    """The same model with its weights in 16 bits, where it can be had so."""


def alternatives(asked: Asked, groups: Sequence[Group]) -> Iterator[Alternative]:
    """The changes with which the model would fit one of the groups, each by itself.

    The largest context and the largest batch below those asked for; a smaller element type for
    the cache; 16 bits for the weights, else the layers quantized as little as it takes.
    """
    if not groups:
        return
    estimate = asked.estimate
    yield from _fewer(asked, "context", estimate.context, groups)
    yield from _fewer(asked, "batch", estimate.batch, groups)
    if estimate.kv_cache and DTYPES[estimate.kv_dtype].bits > DTYPES[_SMALL_CACHE].bits:
        yield from _found(asked.shape, estimate, "kv_dtype", _SMALL_CACHE, groups)
    for change, value, shape in _narrower(asked):
        found = list(_found(shape, estimate, change, value, groups))
        if found:
            yield from found
            return


def _narrower(asked: Asked) -> Iterator[tuple[Change, str, ModelShape]]:
    """The model with narrower weights, the widest first; a quantized one stays as it is."""
    shape = asked.shape
    if shape.quantization is not None:
        return
    now = DTYPES[shape.dtype].bits
    if asked.in_half is not None and now > DTYPES[_HALF].bits:
        yield "dtype", _HALF, asked.in_half()
    for name, bits in QUANTIZED.items():
        if bits < now:
            yield "quantization", name, quantized(shape, name)


def _fewer(
    asked: Asked, change: Change, most: int, groups: Sequence[Group]
) -> Iterator[Alternative]:
    def found(number: int) -> list[Alternative]:
        return list(_found(asked.shape, asked.estimate, change, number, groups))

    number = largest(most - 1, lambda number: bool(found(number)))
    if number:
        yield from found(number)


def _found(
    shape: ModelShape,
    estimate: MemoryEstimate,
    change: Change,
    value: int | str,
    groups: Sequence[Group],
) -> Iterator[Alternative]:
    numbers: dict[str, Any] = {
        "context": estimate.context,
        "batch": estimate.batch,
        "kv_dtype": estimate.kv_dtype,
    }
    if change in numbers:
        numbers[change] = value
    changed = estimate_inference(shape, **numbers)
    arrangement = arrange(pieces_of(shape, changed), groups, evenly=False)
    if arrangement is not None:
        total = (changed.on_cpu() if arrangement.only_cpu else changed).total
        yield Alternative(change, value, arrangement.devices, total)


def largest(most: int, works: Callable[[int], bool]) -> int:
    """The largest number from 1 to `most` that works, where all smaller ones do; 0 for none.

    >>> largest(1000, lambda number: number * number < 500), largest(5, lambda number: False)
    (22, 0)
    """
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if works(middle) else (low, middle - 1)
    return low
