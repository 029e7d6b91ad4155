"""Distributions: random words converted to numbers, exact to the last bit on every machine.

Only `+ - * /`, square roots, shifts and conversions are used, one at a time: no logarithm or
cosine of a mathematical library, which differs from one processor to the next. So the numbers are
the same, bit for bit, wherever NumPy computes in IEEE 754 arithmetic. The order of operations is
part of the definition: another one would round differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from anydevice.errors import ConfigurationError

Numbers = NDArray[Any]
Doubles = NDArray[np.float64]
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


class Scratch:
    """Memory for intermediate results, used again for each piece of an array.

    Allocating it each time, and having it cleared, would take as long as computing.

    >>> scratch = Scratch()
    >>> first = scratch("squares", 2, 3)
    >>> first.shape, np.shares_memory(first, scratch("squares", 4))
    ((2, 3), True)
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, Any], NDArray[Any]] = {}

    def __call__(self, name: str, *shape: int, dtype: Any = np.float64) -> NDArray[Any]:
        """Return an uninitialized array; it overwrites the one given out by this name before."""
        size = math.prod(shape)
        buffer = self._held.get((name, dtype))
        if buffer is None or len(buffer) < size:
            buffer = np.empty(1 << max(0, size - 1).bit_length(), dtype)
            self._held[name, dtype] = buffer
        return buffer[:size].reshape(shape)


Transform = Callable[[Words, Scratch], Numbers]
"""Makes words into numbers. They lie in the scratch memory, until the next call with it."""


def words_each(dtype: np.dtype[Any]) -> int:
    """Words that one number of this dtype is made of: two for 64 bits, else one."""
    return 2 if dtype.itemsize == 8 else 1


def joined(words: Words) -> NDArray[np.uint64]:
    """Pairs of words as 64-bit integers, the first of each pair in the lower half."""
    return words.view("<u8")


def uniform(low: float, high: float, dtype: np.dtype[Any]) -> Transform:
    """Return the transform to numbers of `dtype` from `low` up to but never `high`.

    Numbers that `dtype` cannot hold exactly are rounded down, so that as many lie below any of its
    values as should, and rounding never arrives at `high`. Raises `ConfigurationError` if nothing
    lies between, or a bound is outside of the range of `dtype`.
    """
    reach = _reach(dtype)
    if not (-reach <= low < high <= reach and math.isfinite(high - low)):
        raise ConfigurationError(
            f"uniform(low={low!r}, high={high!r}): low must be less than high, and both, and "
            f"their difference, must be in the range of {dtype}, ±{reach:.6g}"
        )
    first, last = _rounded_down(np.array([low, high]), dtype, Scratch())
    if float(first) < low:
        first = np.nextafter(first, dtype.type(np.inf))
    if float(last) == high:
        last = np.nextafter(last, dtype.type(-np.inf))
    if first > last:
        raise ConfigurationError(
            f"uniform(low={low!r}, high={high!r}): no {dtype} lies between; move them further "
            f"apart, or use a dtype with more bits"
        )
    plain = (low, high) == (0.0, 1.0) and dtype == np.float32  # all 24 bits fit: exact as it is

    def transform(words: Words, scratch: Scratch) -> Numbers:
        exact = _unit(words, dtype, scratch)
        if plain:
            return _convert(exact, dtype, scratch)
        np.multiply(exact, high - low, out=exact)
        np.add(exact, low, out=exact)
        rounded = _rounded_down(exact, dtype, scratch)
        return np.clip(rounded, first, last, out=rounded)

    return transform


def normal(mean: float, std: float, dtype: np.dtype[Any]) -> Transform:
    """Return the transform to normal numbers: each the quantile of a uniform number.

    A 16-bit number is the float32 of the same words, rounded. Raises `ConfigurationError` for a
    negative `std`, and if numbers would be outside of the range of `dtype`.
    """
    reach = _reach(dtype)
    if not (std >= 0 and abs(mean) + LARGEST_NORMAL * std <= reach):
        raise ConfigurationError(
            f"normal(mean={mean!r}, std={std!r}): std must be 0 or more, and the numbers must "
            f"be in the range of {dtype}, ±{reach:.6g}"
        )
    double = words_each(dtype) == 2

    def transform(words: Words, scratch: Scratch) -> Numbers:
        # 52 bits and a half: with 53, the last would round to 1, whose quantile is infinite.
        whole = joined(words) >> np.uint64(12) if double else words
        inside = np.add(whole, 0.5, out=scratch("inside", len(whole)))
        np.multiply(inside, 2.0**-52 if double else 2.0**-32, out=inside)
        numbers = normal_quantile(inside, scratch)
        np.multiply(numbers, std, out=numbers)
        np.add(numbers, mean, out=numbers)
        if double:
            return numbers
        single = _convert(numbers, np.dtype(np.float32), scratch)
        return single.astype(dtype, copy=False)

    return transform


def integers(words: Words, span: int, bits: int) -> tuple[NDArray[np.uint64], NDArray[np.intp]]:
    """Integers from 0 up to but not `span`, and the positions of those to be drawn again.

    Of the 2**`bits` words, those above the last multiple of `span` would make small integers more
    likely than large ones.
    """
    drawn = joined(words) if bits == 64 else words.astype(np.uint64)
    if span == 2**bits:
        return drawn, np.empty(0, dtype=np.intp)
    last = 2**bits - 2**bits % span - 1
    return drawn % np.uint64(span), np.flatnonzero(drawn > np.uint64(last))


def _unit(words: Words, dtype: np.dtype[Any], scratch: Scratch) -> Doubles:
    """Numbers from 0 up to but never 1: of 53 bits for float64, of 24 bits for all others."""
    if words_each(dtype) == 2:
        whole: NDArray[Any] = joined(words) >> np.uint64(11)
        size = 2.0**-53
    else:
        shifted = scratch("shifted", len(words), dtype=np.uint32)
        whole, size = np.right_shift(words, np.uint32(8), out=shifted), 2.0**-24
    numbers: Doubles = np.multiply(whole, size, out=scratch("unit", len(whole)))
    return numbers


def _reach(dtype: np.dtype[Any]) -> float:
    return float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]


def _convert(x: Doubles, dtype: np.dtype[Any], scratch: Scratch) -> Numbers:
    numbers = scratch("converted", len(x), dtype=dtype)
    np.copyto(numbers, x, casting="same_kind")
    return numbers


def _rounded_down(x: Doubles, dtype: np.dtype[Any], scratch: Scratch) -> Numbers:
    near = _convert(x, dtype, scratch)
    again = scratch("rounded and back", len(x))
    np.copyto(again, near)
    above = np.flatnonzero(np.greater(again, x, out=scratch("mask", len(x), dtype=bool)))
    near[above] = np.nextafter(near[above], dtype.type(-np.inf))
    return near


def _columns(*polynomials: str) -> Doubles:
    """Return the terms of two polynomials as rows of columns, highest first: to be computed
    together.
    """
    terms = [[float(term) for term in polynomial.split()] for polynomial in polynomials]
    return np.array(terms).T[::-1, :, None].copy()


_LOG_OF_TWO = 0.6931471805599453
_ROOT_OF_HALF = 0.7071067811865476

_LOGARITHM = tuple(1.0 / (2 * k + 1) for k in range(11, -1, -1))

# The rational approximations of algorithm AS 241 (PPND16), constant term first: M. J. Wichura,
# "The percentage points of the normal distribution", Applied Statistics 37 (1988), 477-484.
_CENTRE = _columns(
    "3.3871328727963666080 133.14166789178437745 1971.5909503065514427 "
    "13731.693765509461125 45921.953931549871457 67265.770927008700853 "
    "33430.575583588128105 2509.0809287301226727",
    "1.0 42.313330701600911252 687.18700749205790830 "
    "5394.1960214247511077 21213.794301586595867 39307.895800092710610 "
    "28729.085735721942674 5226.4952788528545610",
)
_TAIL = _columns(
    "1.42343711074968357734 4.63033784615654529590 5.76949722146069140550 "
    "3.64784832476320460504 1.27045825245236838258 0.241780725177450611770 "
    "0.0227238449892691845833 0.000774545014278341407640",
    "1.0 2.05319162663775882187 1.67638483018380384940 "
    "0.689767334985100004550 0.148103976427480074590 0.0151986665636164571966 "
    "0.000547593808499534494600 1.05075007164441684324e-9",
)
_FAR_TAIL = _columns(
    "6.65790464350110377720 5.46378491116411436990 1.78482653991729133580 "
    "0.296560571828504891230 0.0265321895265761230930 0.00124266094738807843860 "
    "2.71155556874348757815e-5 2.01033439929228813265e-7",
    "1.0 0.599832206555887937690 0.136929880922735805310 "
    "0.0148753612908506148525 0.000786869131145613259100 1.84631831751005468180e-5 "
    "1.42151175831644588870e-7 2.04426310338993978564e-15",
)


def normal_quantile(p: Doubles, scratch: Scratch | None = None) -> Doubles:
    """Return the quantile of the standard normal distribution at `p`, for 0 < p < 1.

    `p` has one axis. With a `scratch`, the result lies in it, until the next call with it.

    >>> normal_quantile(np.array([0.5, 0.975])).round(6).tolist()
    [0.0, 1.959964]
    """
    scratch = scratch or Scratch()
    count = len(p)
    from_half = np.subtract(p, 0.5, out=scratch("from half", count))
    argument = np.multiply(from_half, from_half, out=scratch("argument", count))
    np.subtract(0.180625, argument, out=argument)
    quantiles = _ratio(_CENTRE, argument, scratch("centre", 2, count))
    np.multiply(from_half, quantiles, out=quantiles)
    distance = np.abs(from_half, out=argument)
    outside = np.flatnonzero(np.greater(distance, 0.425, out=scratch("mask", count, dtype=bool)))
    quantiles[outside] = _outside(p, from_half, outside, scratch)
    return quantiles


def _outside(
    p: Doubles, from_half: Doubles, positions: NDArray[np.intp], scratch: Scratch
) -> Doubles:
    """Return the quantiles at those positions, which are far from the middle."""
    count = len(positions)
    side = np.take(p, positions, out=scratch("side", count), mode="clip")
    other = np.subtract(1.0, side, out=scratch("other side", count))
    far = _logarithm(np.minimum(side, other, out=side), scratch)
    np.sqrt(np.negative(far, out=far), out=far)
    sizes = _ratio(_TAIL, np.subtract(far, 1.6, out=other), scratch("tail", 2, count))
    farther = np.flatnonzero(np.greater(far, 5.0, out=scratch("mask", count, dtype=bool)))
    if len(farther):
        beyond = far[farther] - 5.0
        sizes[farther] = _ratio(_FAR_TAIL, beyond, np.empty((2, len(beyond))))
    signs = np.take(from_half, positions, out=other, mode="clip")
    np.copysign(sizes, signs, out=sizes)
    return sizes


def _ratio(terms: Doubles, x: Doubles, both: Doubles) -> Doubles:
    """Return the value of one polynomial over that of another; `both` is memory for the two."""
    np.multiply(x, terms[0], out=both)
    for term in terms[1:-1]:
        np.add(both, term, out=both)
        np.multiply(both, x, out=both)
    np.add(both, terms[-1], out=both)
    ratio: Doubles = np.divide(both[0], both[1], out=both[0])
    return ratio


def _logarithm(x: Doubles, scratch: Scratch) -> Doubles:
    """Get the natural logarithm, to about one unit of the last place; it takes the place of `x`."""
    count = len(x)
    part, exponent = np.frexp(x, out=(x, scratch("exponent", count, dtype=np.int32)))
    low = np.less(part, _ROOT_OF_HALF, out=scratch("mask", count, dtype=bool))
    one_or_two = np.add(low, 1.0, out=scratch("factor", count))
    np.multiply(part, one_or_two, out=part)
    np.subtract(exponent, low, out=exponent)
    above = np.add(part, 1.0, out=one_or_two)
    np.subtract(part, 1.0, out=part)
    ratio = np.divide(part, above, out=part)  # log(part) = 2 artanh(ratio), and |ratio| < 0.172
    square = np.multiply(ratio, ratio, out=above)
    series = np.multiply(square, _LOGARITHM[0], out=scratch("series", count))
    for term in _LOGARITHM[1:-1]:
        np.add(series, term, out=series)
        np.multiply(series, square, out=series)
    np.add(series, _LOGARITHM[-1], out=series)
    np.multiply(ratio, 2.0, out=ratio)
    np.multiply(ratio, series, out=ratio)
    whole = np.multiply(exponent, _LOG_OF_TWO, out=series)
    logarithm: Doubles = np.add(whole, ratio, out=ratio)
    return logarithm
