"""Random masks inside a computation: a function of a seed, a step and a path, without state.

Written in ops, so that every engine computes the same masks on its device, compiled or not: all
arithmetic is on 32-bit integers, which wrap around everywhere. Numbers are mixed by x · (2 x + 1),
which is a permutation where each bit affects all above it; the upper bits decide. Good enough for
dropout; not for secrets.
"""

from __future__ import annotations

import hashlib
import math

from anydevice import _ops as ops
from anydevice._core.array import Array
from anydevice._core.dtypes import DTYPES
from anydevice._nn.layer import Run
from anydevice._ops.dispatch import primitives

_INT32 = DTYPES["int32"]
ROUNDS = 3
# Odd numbers without a pattern, within 31 bits.
_BY_SEED, _BY_STEP, _BY_ROW, _BY_COLUMN = 0x5851F42D, 0x2C9277B5, 0x6A09E667, 0x3C6EF373
BETWEEN = 0x510E527F


def folded_seed(seed: int) -> int:
    """Return a seed of 32 bits: the seed itself below 2**31, or a hash of a larger one.

    >>> folded_seed(7), folded_seed(2**40) < 2**31
    (7, True)
    """
    return seed if 0 <= seed < 2**31 else _hash(f"seed {seed}")


def random_mask(run: Run, rate: float, like: Array) -> Array:
    """Return booleans with the shape and device of `like`, true with the probability `rate`."""
    shape = tuple(like.shape)
    first, whole = _within(run, shape)
    rows, columns = _balance_axes(whole)
    key = _key(run, like)
    if rows == 1:
        rows, columns, above, before = 1, math.prod(shape), 0, first
    else:
        rows, above, before = math.prod(shape) // columns, first // columns, 0
    down = _mix_positions(key, rows, (rows, 1), _BY_ROW, like, above)
    along = _mix_positions(key, columns, (1, columns), _BY_COLUMN, like, before)
    # An odd factor for each row. Without it, C compilers assume that x · x is not negative,
    # although it wraps around, and fold the comparison below.
    odd = ops.add(ops.multiply(down, 2), 1)
    numbers = ops.multiply(mixed(ops.add(down, along)), odd)
    return ops.reshape(ops.less(numbers, round(rate * 2**32) - 2**31), shape)


def _within(run: Run, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return the first element's index in the whole batch's array, and that array's shape."""
    if run.rows is None or not shape:
        return 0, shape
    first, count, every = run.rows
    times = shape[0] // count
    return first * times * math.prod(shape[1:]), (every * times, *shape[1:])


def _balance_axes(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return two sizes with the product of a shape, as equal as its axes allow."""
    rows, columns = 1, math.prod(shape)
    for at in range(1, len(shape) + 1):  # in a loop: PyTorch traces no `min` with a key
        parts = math.prod(shape[:at]), math.prod(shape[at:])
        if max(parts) < max(rows, columns):
            rows, columns = parts
    return rows, columns


def _key(run: Run, like: Array) -> Array:
    """Return a number for the path, the seed and the step, of shape (1, 1)."""
    key = primitives(like).full((1, 1), _path_number(run.path), _INT32, like)
    for number, factor in ((run.seed, _BY_SEED), (run.step, _BY_STEP)):
        key = mixed(ops.add(key, ops.multiply(_single(number, like), factor)))
    return key


def _single(number: int | Array, like: Array) -> Array:
    """Return an integer, or a 0-d integer array, as an array of shape (1, 1)."""
    if isinstance(number, int):
        return primitives(like).full((1, 1), folded_seed(number), _INT32, like)
    return ops.reshape(ops.astype(number, _INT32), (1, 1))


def _mix_positions(
    key: Array, size: int, shape: tuple[int, int], factor: int, like: Array, first: int
) -> Array:
    """Return a mixed number for each of `size` positions, starting with `first`."""
    places = ops.reshape(primitives(like).arange(size, _INT32, like), shape)
    if first:  # not added to the positions: C compilers would assume that they never wrap around
        key = ops.add(key, first)
    return mixed(ops.add(ops.multiply(places, factor), ops.multiply(key, factor)))


def mixed(x: Array) -> Array:
    """Mix 32-bit integers: equal ones stay equal, and the upper bits have no pattern."""
    for number in range(ROUNDS):
        x = ops.multiply(x, ops.add(ops.multiply(x, 2), 1))
        x = ops.add(x, BETWEEN + number)
    return x


def _path_number(path: str) -> int:
    return _hash(f"path {path}")


def _hash(text: str) -> int:
    digest = hashlib.sha256(f"anydevice.nn {text}".encode()).digest()
    return int.from_bytes(digest[:4], "little") // 2


# PyTorch's compiler calls these while it traces the caller, and keeps the results.
_path_number._dynamo_marked_constant = True  # type: ignore[attr-defined]
folded_seed._dynamo_marked_constant = True  # type: ignore[attr-defined]
