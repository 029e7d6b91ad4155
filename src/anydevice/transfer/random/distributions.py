"""Random words made into numbers, by operations that IEEE 754 fixes to the last bit.

Only `+ - * /`, square roots, shifts and conversions are used, one at a time: no logarithm or
cosine of a mathematical library, which differs from one processor to the next. So the numbers are
the same, bit for bit, wherever NumPy computes in IEEE 754 arithmetic.

The quantile of the normal distribution, by operations that IEEE 754 fixes to the last bit.

Each operation is one pass over the whole array, in memory that is used again. Their order is part
of the definition: another one would round differently.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from anydevice.errors import ConfigurationError
from anydevice.transfer.random.pieces import Scratch

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


Doubles = NDArray[np.float64]


def _columns(*polynomials: tuple[float, ...]) -> Doubles:
    """The terms of two polynomials as rows of columns, highest first: to be computed together."""
    return np.array(polynomials).T[::-1, :, None].copy()


_LOG_OF_TWO = 0.6931471805599453
_ROOT_OF_HALF = 0.7071067811865476

_LOGARITHM = tuple(1.0 / (2 * k + 1) for k in range(11, -1, -1))

# The rational approximations of algorithm AS 241 (PPND16), constant term first: M. J. Wichura,
# "The percentage points of the normal distribution", Applied Statistics 37 (1988), 477-484.
_CENTRE = _columns(
    (
        3.3871328727963666080,
        133.14166789178437745,
        1971.5909503065514427,
        13731.693765509461125,
        45921.953931549871457,
        67265.770927008700853,
        33430.575583588128105,
        2509.0809287301226727,
    ),
    (
        1.0,
        42.313330701600911252,
        687.18700749205790830,
        5394.1960214247511077,
        21213.794301586595867,
        39307.895800092710610,
        28729.085735721942674,
        5226.4952788528545610,
    ),
)
_TAIL = _columns(
    (
        1.42343711074968357734,
        4.63033784615654529590,
        5.76949722146069140550,
        3.64784832476320460504,
        1.27045825245236838258,
        0.241780725177450611770,
        0.0227238449892691845833,
        0.000774545014278341407640,
    ),
    (
        1.0,
        2.05319162663775882187,
        1.67638483018380384940,
        0.689767334985100004550,
        0.148103976427480074590,
        0.0151986665636164571966,
        0.000547593808499534494600,
        1.05075007164441684324e-9,
    ),
)
_FAR_TAIL = _columns(
    (
        6.65790464350110377720,
        5.46378491116411436990,
        1.78482653991729133580,
        0.296560571828504891230,
        0.0265321895265761230930,
        0.00124266094738807843860,
        2.71155556874348757815e-5,
        2.01033439929228813265e-7,
    ),
    (
        1.0,
        0.599832206555887937690,
        0.136929880922735805310,
        0.0148753612908506148525,
        0.000786869131145613259100,
        1.84631831751005468180e-5,
        1.42151175831644588870e-7,
        2.04426310338993978564e-15,
    ),
)


def normal_quantile(p: Doubles, scratch: Scratch | None = None) -> Doubles:
    """The number below which a standard normal one lies with probability `p`, for 0 < p < 1.

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
    outside = np.flatnonzero(np.greater(distance, 0.425, out=scratch("truth", count, dtype=bool)))
    quantiles[outside] = _outside(p, from_half, outside, scratch)
    return quantiles


def _outside(p: Doubles, from_half: Doubles, places: NDArray[np.intp], scratch: Scratch) -> Doubles:
    """The quantiles at those places, which are far from the middle."""
    count = len(places)
    side = np.take(p, places, out=scratch("side", count), mode="clip")
    other = np.subtract(1.0, side, out=scratch("other side", count))
    far = _logarithm(np.minimum(side, other, out=side), scratch)
    np.sqrt(np.negative(far, out=far), out=far)
    sizes = _ratio(_TAIL, np.subtract(far, 1.6, out=other), scratch("tail", 2, count))
    farther = np.flatnonzero(np.greater(far, 5.0, out=scratch("truth", count, dtype=bool)))
    if len(farther):
        beyond = far[farther] - 5.0
        sizes[farther] = _ratio(_FAR_TAIL, beyond, np.empty((2, len(beyond))))
    signs = np.take(from_half, places, out=other, mode="clip")
    np.copysign(sizes, signs, out=sizes)
    return sizes


def _ratio(terms: Doubles, x: Doubles, both: Doubles) -> Doubles:
    """The value of one polynomial over that of another; `both` is room for the two."""
    np.multiply(x, terms[0], out=both)
    for term in terms[1:-1]:
        np.add(both, term, out=both)
        np.multiply(both, x, out=both)
    np.add(both, terms[-1], out=both)
    ratio: Doubles = np.divide(both[0], both[1], out=both[0])
    return ratio


def _logarithm(x: Doubles, scratch: Scratch) -> Doubles:
    """The natural logarithm, to about one unit of the last place; it takes the place of `x`."""
    count = len(x)
    part, exponent = np.frexp(x, out=(x, scratch("exponent", count, dtype=np.int32)))
    low = np.less(part, _ROOT_OF_HALF, out=scratch("truth", count, dtype=bool))
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
