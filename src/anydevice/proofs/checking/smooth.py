"""Lines below and above smooth functions on intervals: tangents and chords, moved outward.

NumPy's exp, tanh and sqrt and Python's erf are assumed to have a relative error of at most 2**-46
in float64, and what executes a network in float32 one of 2**-20: a certificate states both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import erf
from typing import NamedTuple

import numpy as np

from anydevice.proofs.checking.network import SMOOTH, Floats

EPSILON = 2.0**-46
FLOAT32 = 2.0**-20
_EXACT = ("square", "step")
_TWO = 2.0**0.5
_erf = np.frompyfunc(erf, 1, 1)


class Lines(NamedTuple):
    """below * z + floor <= f(z) <= above * z + ceiling in the interval of z; |f(z)| <= size.

    Without a floor it is 0 and no slope is negative.
    """

    below: Floats
    floor: Floats | None
    above: Floats
    ceiling: Floats
    size: Floats


class _Function(NamedTuple):
    """A function, its derivative, and between which points it is convex and concave in turn."""

    value: Callable[[Floats], Floats]
    slope: Callable[[Floats], Floats]
    bends: tuple[float, ...]
    convex: bool  # left of the first bend
    scale: Callable[[Floats], Floats]  # the error of both is at most EPSILON times this


def assumptions(functions: Collection[str], float32: bool) -> dict[str, float]:
    """The relative errors that bounds of these functions assume, by name."""
    assumed = {name: FLOAT32 for name in sorted(functions) if name in SMOOTH and float32}
    assumed = {name: error for name, error in assumed.items() if name not in _EXACT}
    inexact = any(name in SMOOTH and name not in _EXACT for name in functions)
    return assumed | ({"float64": EPSILON} if inexact else {})


def _cdf(z: Floats) -> Floats:
    return 0.5 * (1.0 + np.asarray(_erf(z / _TWO), np.float64))


def _sigmoid(z: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-z))


def _linear(z: Floats) -> Floats:
    return 1.0 + np.abs(z)


_FUNCTIONS = {
    "sigmoid": _Function(
        _sigmoid, lambda z: _sigmoid(z) * _sigmoid(-z), (0.0,), True, lambda z: np.ones_like(z)
    ),
    "tanh": _Function(
        np.tanh, lambda z: 1.0 - np.tanh(z) ** 2, (0.0,), True, lambda z: np.ones_like(z)
    ),
    "gelu": _Function(
        lambda z: z * _cdf(z),
        lambda z: _cdf(z) + z * np.exp(-z * z / 2) / np.sqrt(2 * np.pi),
        (-_TWO, _TWO),
        False,
        _linear,
    ),
    "silu": _Function(
        lambda z: z * _sigmoid(z),
        lambda z: _sigmoid(z) * (1.0 + z * _sigmoid(-z)),
        (-2.3993572805154, 2.3993572805154),
        False,
        _linear,
    ),
    "exp": _Function(np.exp, np.exp, (), True, np.exp),
    "square": _Function(lambda z: z * z, lambda z: 2.0 * z, (), True, lambda z: z * z + np.abs(z)),
    "reciprocal": _Function(
        lambda z: 1.0 / z, lambda z: -1.0 / z**2, (), True, lambda z: 1 / z + 1 / z**2
    ),
    "rsqrt": _Function(
        lambda z: z**-0.5, lambda z: -0.5 * z**-1.5, (), True, lambda z: z**-0.5 + z**-1.5
    ),
}


def lines(name: str, low: Floats, high: Floats, float32: bool) -> Lines:
    raise NotImplementedError
