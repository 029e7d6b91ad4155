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
from anydevice.transfer.philox import Words

Numbers = NDArray[Any]
Doubles = NDArray[np.float64]

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

_LOG_OF_TWO = 0.6931471805599453
_ROOT_OF_HALF = 0.7071067811865476

# The rational approximations of algorithm AS 241 (PPND16), constant term first: M. J. Wichura,
# "The percentage points of the normal distribution", Applied Statistics 37 (1988), 477-484.
_CENTRE = (
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
_TAIL = (
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
_FAR_TAIL = (
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


def words_each(dtype: np.dtype[Any]) -> int:
    """How many words one number of that kind is made of: two for 64 bits, else one."""
    return 2 if dtype.itemsize == 8 else 1


def joined(words: Words) -> NDArray[np.uint64]:
    """Pairs of words as 64-bit numbers, the first of each pair in the upper half."""
    pairs = words.reshape(-1, 2).astype(np.uint64)
    return (pairs[:, 0] << np.uint64(32)) | pairs[:, 1]


def unit(words: Words, dtype: np.dtype[Any]) -> Doubles:
    """Numbers from 0 up to but never 1: of 53 bits for float64, of 24 bits for all others."""
    if words_each(dtype) == 2:
        return (joined(words) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return (words >> np.uint32(8)).astype(np.float64) * 2.0**-24


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
        first, last = _rounded_down(bounds, self._dtype)
        if float(first) < self._low:
            first = np.nextafter(first, self._dtype.type(np.inf))
        if float(last) == self._high:
            last = np.nextafter(last, self._dtype.type(-np.inf))
        return first, last

    def __call__(self, words: Words) -> Numbers:
        if (self._low, self._high) == (0.0, 1.0) and self._dtype == np.float32:
            return (words >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
        exact = self._low + (self._high - self._low) * unit(words, self._dtype)
        return np.clip(_rounded_down(exact, self._dtype), self._first, self._last)


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

    def __call__(self, words: Words) -> Numbers:
        if words_each(self._dtype) == 2:
            # 52 bits and a half: with 53, the last would round to 1, whose quantile is infinite.
            inside = ((joined(words) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
            return self._mean + self._std * normal_quantile(inside)
        inside = (words.astype(np.float64) + 0.5) * 2.0**-32
        single = (self._mean + self._std * normal_quantile(inside)).astype(np.float32)
        return single.astype(self._dtype, copy=False)


def normal_quantile(p: Doubles) -> Doubles:
    """The number below which a standard normal one lies with probability `p`, for 0 < p < 1.

    >>> normal_quantile(np.array([0.5, 0.975])).round(6).tolist()
    [0.0, 1.959964]
    """
    from_half = p - 0.5
    quantiles = from_half * _ratio(_CENTRE, 0.180625 - from_half * from_half)
    outside = np.flatnonzero(np.abs(from_half) > 0.425)
    far = np.sqrt(-_logarithm(np.minimum(p[outside], 1.0 - p[outside])))
    sizes = _ratio(_TAIL, far - 1.6)
    farther = np.flatnonzero(far > 5.0)
    sizes[farther] = _ratio(_FAR_TAIL, far[farther] - 5.0)
    quantiles[outside] = np.copysign(sizes, from_half[outside])
    return quantiles


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


def _rounded_down(x: Doubles, dtype: np.dtype[Any]) -> Numbers:
    near = x.astype(dtype)
    above = np.flatnonzero(near.astype(np.float64) > x)
    near[above] = np.nextafter(near[above], dtype.type(-np.inf))
    return near


def _ratio(terms: tuple[tuple[float, ...], tuple[float, ...]], x: Doubles) -> Doubles:
    above, below = (_polynomial(each, x) for each in terms)
    return np.divide(above, below, out=above)


def _polynomial(terms: tuple[float, ...], x: Doubles) -> Doubles:
    total = np.full_like(x, terms[-1])
    for term in terms[-2::-1]:
        np.multiply(total, x, out=total)
        np.add(total, term, out=total)
    return total


def _logarithm(x: Doubles) -> Doubles:
    """The natural logarithm, to about one unit of the last place, the same on every machine."""
    part, exponent = np.frexp(x)
    low = part < _ROOT_OF_HALF
    part = np.where(low, part * 2.0, part)
    exponent = exponent - low
    ratio = (part - 1.0) / (part + 1.0)  # log(part) = 2 artanh(ratio), and |ratio| < 0.172
    series = _polynomial(tuple(1.0 / (2 * k + 1) for k in range(12)), ratio * ratio)
    return exponent * _LOG_OF_TWO + 2.0 * ratio * series
