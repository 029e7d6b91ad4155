"""The quantile of the normal distribution, by operations that IEEE 754 fixes to the last bit.

Each operation is one pass over the whole array, in memory that is used again. Their order is part
of the definition: another one would round differently.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from anydevice.transfer.pieces import Scratch

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
