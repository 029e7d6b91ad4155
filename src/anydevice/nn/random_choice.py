"""Random choices inside a computation: a function of a seed, a step and a place, and of no state.

Written in ops, so every engine makes them where the data is, compiled or not, and makes the same:
all arithmetic is on whole numbers of 32 bits, which wrap around everywhere. The numbers are stirred
by x · (2 x + 1), which takes each to another one and lets every bit act on all above it; the
choice is made by the upper bits. Good for leaving out elements; not for secrets.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

from anydevice import ops
from anydevice.core.dtypes import DTYPES
from anydevice.nn.layer import Run
from anydevice.ops.dispatch import primitives

Array = Any

_INT32 = DTYPES["int32"]
_TURNS = 3
# Odd numbers without a pattern, within 31 bits.
_BY_SEED, _BY_STEP, _BY_ROW, _BY_COLUMN = 0x5851F42D, 0x2C9277B5, 0x6A09E667, 0x3C6EF373
_BETWEEN = 0x510E527F


def folded_seed(seed: int) -> int:
    """A seed that fits into an array of 32 bits: itself below 2**31, or a hash where it is larger.

    >>> folded_seed(7), folded_seed(2**40) < 2**31
    (7, True)
    """
    return seed if 0 <= seed < 2**31 else _hashed(f"seed {seed}")


def chosen(run: Run, rate: float, like: Array) -> Array:
    """Truth values in the shape and on the device of `like`, of which a share of `rate` is true.

    They depend on the seed, the step and the path of `run`, and on the place in the array.
    """
    shape = tuple(like.shape)
    rows, columns = _balanced(shape)
    key = _key(run, like)
    down = _placed(key, rows, (rows, 1), _BY_ROW, like)
    along = _placed(key, columns, (1, columns), _BY_COLUMN, like)
    # An odd factor of its own for each row. Without it, compilers of C take a product of x with
    # itself for no less than 0, although it wraps around, and answer the question below so.
    odd = ops.add(ops.multiply(down, 2), 1)
    numbers = ops.multiply(_stirred(ops.add(down, along)), odd)
    return ops.reshape(ops.less(numbers, round(rate * 2**32) - 2**31), shape)


def _balanced(shape: tuple[int, ...]) -> tuple[int, int]:
    """Two sizes with the elements of a shape as their product, as equal as its axes allow."""
    parts = [(math.prod(shape[:at]), math.prod(shape[at:])) for at in range(len(shape) + 1)]
    return min(parts, key=max)


def _key(run: Run, like: Array) -> Array:
    """A number for the path, the seed and the step, of shape (1, 1)."""
    key = primitives(like).full((1, 1), _of_path(run.path), _INT32, like)
    for number, factor in ((run.seed, _BY_SEED), (run.step, _BY_STEP)):
        key = _stirred(ops.add(key, ops.multiply(_single(number, like), factor)))
    return key


def _single(number: int | Array, like: Array) -> Array:
    """A whole number, or an array without axes that holds one, as an array of shape (1, 1)."""
    if isinstance(number, int):
        return primitives(like).full((1, 1), folded_seed(number), _INT32, like)
    return ops.reshape(ops.astype(number, _INT32), (1, 1))


def _placed(key: Array, size: int, shape: tuple[int, int], factor: int, like: Array) -> Array:
    """A number for each of so many places."""
    places = ops.reshape(primitives(like).arange(size, _INT32, like), shape)
    return _stirred(ops.add(ops.multiply(places, factor), ops.multiply(key, factor)))


def _stirred(x: Array) -> Array:
    for turn in range(_TURNS):
        x = ops.multiply(x, ops.add(ops.multiply(x, 2), 1))
        x = ops.add(x, _BETWEEN + turn)
    return x


def _of_path(path: str) -> int:
    return _hashed(f"path {path}")


def _hashed(text: str) -> int:
    digest = hashlib.sha256(f"anydevice.nn {text}".encode()).digest()
    return int.from_bytes(digest[:4], "little") // 2


# PyTorch's compiler runs these while it looks through the caller, and keeps the answers.
_of_path._dynamo_marked_constant = True  # type: ignore[attr-defined]
folded_seed._dynamo_marked_constant = True  # type: ignore[attr-defined]
