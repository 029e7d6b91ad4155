"""Random words made into numbers, by operations that IEEE 754 fixes to the last bit.

Only `+ - * /`, square roots, shifts and conversions are used, one at a time: no logarithm or
cosine of a mathematical library, which differs from one processor to the next. So the numbers are
the same, bit for bit, wherever NumPy computes in IEEE 754 arithmetic.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from anydevice.errors import ConfigurationError
from anydevice.transfer.pieces import Scratch
from anydevice.transfer.quantiles import Doubles, normal_quantile

Numbers = NDArray[Any]
Words = NDArray[np.uint32]
"""32-bit words in little-endian order, on every machine."""

FLOATS: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
INTEGERS: dict[str, np.dtype[Any]] = {
    f"{sign}int{bits}": np.dtype(f"{sign}int{bits}")
    for sign in ("", "u")
    for bits in (8, 16, 32, 64)
}

LARGEST_NORMAL = 8.3
"""No standard normal number made here is further from zero: the words do not reach further."""


def words_each(dtype: np.dtype[Any]) -> int:
    """How many words one number of that kind is made of: two for 64 bits, else one."""
    return 2 if dtype.itemsize == 8 else 1


def joined(words: Words) -> NDArray[np.uint64]:
    """Pairs of words as 64-bit numbers, the first of each pair in the lower half."""
    return words.view("<u8")


def unit(words: Words, dtype: np.dtype[Any], scratch: Scratch) -> Doubles:
    """Numbers from 0 up to but never 1: of 53 bits for float64, of 24 bits for all others."""
    if words_each(dtype) == 2:
        whole: NDArray[Any] = joined(words) >> np.uint64(11)
        size = 2.0**-53
    else:
        shifted = scratch("shifted", len(words), dtype=np.uint32)
        whole, size = np.right_shift(words, np.uint32(8), out=shifted), 2.0**-24
    numbers: Doubles = np.multiply(whole, size, out=scratch("unit", len(whole)))
    return numbers


class Uniform:
    """Makes words into numbers of `dtype` from `low` up to but never `high`.

    What `dtype` cannot hold exactly is rounded down, so that as many numbers lie below any of its
    values as should, and rounding never arrives at `high`. Raises `ConfigurationError` where no
    number lies between, or `dtype` does not reach so far.
    """

    def __init__(self, low: float, high: float, dtype: np.dtype[Any]) -> None:
        reach = _reach(dtype)
        if not (-reach <= low < high <= reach and math.isfinite(high - low)):
            raise ConfigurationError(
                f"uniform(low={low!r}, high={high!r}): low must be less than high, and both, and "
                f"their difference, must be within what {dtype} reaches, which is {reach:.6g}"
            )
        self._low, self._high, self._dtype = low, high, dtype
        self._first, self._last = self._ends()
        if self._first > self._last:
            raise ConfigurationError(
                f"uniform(low={low!r}, high={high!r}): no {dtype} lies between; take them further "
                f"apart, or a dtype with more bits"
            )

    def _ends(self) -> tuple[Any, Any]:
        """The smallest number of the dtype from `low` on, and the largest below `high`."""
        bounds = np.array([self._low, self._high], dtype=np.float64)
        first, last = _rounded_down(bounds, self._dtype, Scratch())
        if float(first) < self._low:
            first = np.nextafter(first, self._dtype.type(np.inf))
        if float(last) == self._high:
            last = np.nextafter(last, self._dtype.type(-np.inf))
        return first, last

    def __call__(self, words: Words, scratch: Scratch | None = None) -> Numbers:
        """With a `scratch`, the numbers lie in it, until the next call with it."""
        scratch = scratch or Scratch()
        exact = unit(words, self._dtype, scratch)
        if (self._low, self._high) == (0.0, 1.0) and self._dtype == np.float32:
            single = scratch("rounded", len(exact), dtype=np.float32)
            np.copyto(single, exact, casting="same_kind")
            return single
        np.multiply(exact, self._high - self._low, out=exact)
        np.add(exact, self._low, out=exact)
        rounded = _rounded_down(exact, self._dtype, scratch)
        return np.clip(rounded, self._first, self._last, out=rounded)


class Normal:
    """Makes words into normal numbers, each the quantile of one uniform number.

    A 16-bit number is the float32 of the same words, rounded. Raises `ConfigurationError` for a
    negative `std`, and where numbers would come out that `dtype` does not reach.
    """

    def __init__(self, mean: float, std: float, dtype: np.dtype[Any]) -> None:
        reach = _reach(dtype)
        if not (std >= 0 and abs(mean) + LARGEST_NORMAL * std <= reach):
            raise ConfigurationError(
                f"normal(mean={mean!r}, std={std!r}): std must be 0 or more, and the numbers must "
                f"be within what {dtype} reaches, which is {reach:.6g}"
            )
        self._mean, self._std, self._dtype = mean, std, dtype

    def __call__(self, words: Words, scratch: Scratch | None = None) -> Numbers:
        """With a `scratch`, the numbers lie in it, until the next call with it."""
        scratch = scratch or Scratch()
        double = words_each(self._dtype) == 2
        # 52 bits and a half: with 53, the last would round to 1, whose quantile is infinite.
        whole = joined(words) >> np.uint64(12) if double else words
        inside = np.add(whole, 0.5, out=scratch("inside", len(whole)))
        np.multiply(inside, 2.0**-52 if double else 2.0**-32, out=inside)
        numbers = normal_quantile(inside, scratch)
        np.multiply(numbers, self._std, out=numbers)
        np.add(numbers, self._mean, out=numbers)
        if double:
            return numbers
        single = scratch("single", len(numbers), dtype=np.float32)
        np.copyto(single, numbers, casting="same_kind")
        return single.astype(self._dtype, copy=False)


def integers(words: Words, span: int, bits: int) -> tuple[NDArray[np.uint64], NDArray[np.intp]]:
    """Numbers from 0 up to but not `span`, and the places of those that must be drawn again.

    Of the 2**`bits` words, those above the last multiple of `span` would make small numbers more
    likely than large ones.
    """
    drawn = joined(words) if bits == 64 else words.astype(np.uint64)
    if span == 2**bits:
        return drawn, np.empty(0, dtype=np.intp)
    last = 2**bits - 2**bits % span - 1
    return drawn % np.uint64(span), np.flatnonzero(drawn > np.uint64(last))


def _reach(dtype: np.dtype[Any]) -> float:
    return float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]


def _rounded_down(x: Doubles, dtype: np.dtype[Any], scratch: Scratch) -> Numbers:
    near = scratch("rounded", len(x), dtype=dtype)
    np.copyto(near, x, casting="same_kind")
    again = scratch("rounded and back", len(x))
    np.copyto(again, near)
    above = np.flatnonzero(np.greater(again, x, out=scratch("truth", len(x), dtype=bool)))
    near[above] = np.nextafter(near[above], dtype.type(-np.inf))
    return near
