"""Lines below and above smooth functions on intervals: tangents and chords, moved outward.

A slope is chosen freely, and the offset that makes its line a bound is computed. A convex function
lies above its tangents; the least distance of a concave function from a line is at an end.

NumPy's exp, tanh and sqrt and Python's erf are assumed to have a relative error of at most 2**-46
in float64, and an execution of the function in float32 one of 2**-20, for GELU, SiLU and Mish of
2**-20 of the argument; for exp, and the sigmoid left of 0, 1 + |z| / 16 times as much. A sigmoid
may have an absolute error too, by executor, and ELU and softplus one of 2**-22. A certificate
states all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from math import erf, pi, sqrt
from typing import Any, NamedTuple

import numpy as np

from anydevice._proofs.checking.network import SMOOTH, Floats

EPSILON, FLOAT32, FLUSH, LARGEST = 2.0**-46, 2.0**-20, 2.0**-100, 2.0**100
"""The last two are 2**26 from what float32 flushes, or overflows: steps of a sum may be so far."""
EXECUTORS = dict.fromkeys(("CUDA", "JAX", "MLX", "NumPy", "PyTorch"), 0.0)
EXECUTORS["onnxruntime"] = 2.0**-22
"""The executors that were measured, by the absolute error of their sigmoid beside the relative."""
_SIGMOID, _NOT_ON_CUDA = "sigmoid, absolute", {"elu", "softplus", "mish"}
_ALWAYS = {"elu, absolute": 2.0**-22, "softplus, absolute": 2.0**-22}
"""Absolute errors of every executor: some compute exp(z) - 1, and log(1 + exp(z))."""
WIDEST = {_SIGMOID: max(EXECUTORS.values()), **_ALWAYS}
_STEPS = 26
"""Halvings towards the point where a tangent touches; any point gives a sound bound."""
_K, _C, _A4, _A5 = sqrt(2 / pi), 0.044715, -1.453152027, 1.061405429
_erf = np.frompyfunc(erf, 1, 1)
_MISH_BENDS = (-2.256376396360793, 1.4905711794854285)


class LinePair(NamedTuple):
    """below * z + floor <= f(z) <= above * z + ceiling in the interval of z; |f(z)| <= size.

    If the floor is None, it is 0 and no slope is negative.
    """

    below: Floats
    floor: Floats | None
    above: Floats
    ceiling: Floats
    size: Floats

    def through(self, row: Floats, of: Any) -> tuple[Floats, Floats, Floats]:
        """Turn coefficients of values into coefficients of arguments, a shift and a size."""
        positive, negative = np.maximum(row, 0), np.minimum(row, 0)
        shift = dot(negative, self.ceiling[of])
        size = np.abs(shift)
        if self.floor is not None:
            size = dot(positive, np.abs(self.floor)[of]) - dot(negative, np.abs(self.ceiling)[of])
            shift = shift + dot(positive, self.floor[of])
        positive *= self.below[of]
        negative *= self.above[of]
        positive += negative  # one of the two is 0, so nothing is rounded
        return positive, shift, size

    def on_forms(
        self, lower: Floats, upper: Floats, least: Floats, most: Floats
    ) -> tuple[Floats, Floats]:
        """Return affine functions below and above the values, from functions of the arguments.

        Constant functions are replaced by the bounds of the arguments, which are tighter.
        """
        below, above = self.below[:, None], self.above[:, None]
        if lower.shape[1] == 1:
            lower, upper = least[:, None], most[:, None]
            if self.floor is None:
                return np.maximum(lower, 0), np.maximum(upper, 0)
        if self.floor is None:
            low, high = lower * below, upper * above
        else:
            low = np.where(below < 0, upper, lower) * below
            high = np.where(above < 0, lower, upper) * above
            low[:, -1] += self.floor - 4 * EPSILON * (np.abs(low[:, -1]) + np.abs(self.floor))
        high[:, -1] += self.ceiling + 2.0**-50 * (np.abs(high[:, -1]) + np.abs(self.ceiling))
        return low, high


def dot(a: Floats, b: Floats) -> Floats:
    """Return the sum of products in each row."""
    total: Floats = np.einsum("pn,pn->p", a, b)
    return total


class SmoothCurve(NamedTuple):
    """A function, its derivative, and its inflection points (`bends`).

    `convex` is whether it is convex left of the first one. The value and the derivative have errors
    of at most EPSILON times `scale`, which is largest at one of the ends of an interval. `rough` is
    a quicker derivative, to find points with.
    """

    value: Callable[[Floats], Floats]
    slope: Callable[[Floats], Floats]
    scale: Callable[[Floats], Floats]
    bends: tuple[float, ...] = ()
    convex: bool = True
    rough: Callable[[Floats], Floats] | None = None

    def negative(self) -> SmoothCurve:
        return SmoothCurve(
            lambda z: -self.value(z),
            lambda z: -self.slope(z),
            self.scale,
            self.bends,
            not self.convex,
            lambda z: -(self.rough or self.slope)(z),
        )


def assumptions(
    functions: Collection[str], float32: bool, given: Mapping[str, float] = WIDEST
) -> dict[str, float]:
    """Return the errors that bounds of these functions assume, by name."""
    names = sorted(name for name in functions if name in SMOOTH)
    assumed = dict.fromkeys(names, FLOAT32) if float32 else {}
    if "sigmoid" in assumed and given.get(_SIGMOID, 0.0) > 0:
        assumed[_SIGMOID] = given[_SIGMOID]
    assumed |= {key: error for key, error in _ALWAYS.items() if key.split(",")[0] in assumed}
    return assumed | ({"float64": EPSILON} if names else {})


def executors_of(assumed: Mapping[str, float]) -> list[str]:
    """Return the executors for which assumptions hold; none if nothing is assumed of executions."""
    if not set(SMOOTH).intersection(assumed):
        return []
    absolute = (assumed if "sigmoid" in assumed else WIDEST).get(_SIGMOID, 0.0)
    unknown = {"CUDA"} if not _NOT_ON_CUDA.isdisjoint(assumed) else set()
    return [name for name, e in EXECUTORS.items() if e <= absolute and name not in unknown]


def execution_error(
    name: str, low: Floats, high: Floats, size: Floats, assumed: Mapping[str, float] = WIDEST
) -> Floats:
    """Return the assumed error of an execution in float32, where |f(z)| <= size on an interval."""
    reach = np.maximum(np.abs(low), np.abs(high))
    far = {"exp": size * reach}
    far["sigmoid"] = np.minimum(size * np.maximum(-low, 0), 0.28)  # |z| sigmoid(z) for z < 0
    argument = reach if name in _BY_ARGUMENT else 0.0
    error = FLOAT32 * (size + argument + far.get(name, 0.0) / 16) + FLUSH
    error = error + assumed.get(f"{name}, absolute", 0.0)
    return np.where(size + error > LARGEST, np.inf, error)  # it may overflow


def lines(
    name: str, low: Floats, high: Floats, float32: bool, assumed: Mapping[str, float] = WIDEST
) -> LinePair:
    """Return lines for a function on each interval; they are NaN if it has a pole."""
    if name == "square":
        return _square(low, high)
    if name == "step":
        zeros, one = np.zeros_like(low), np.where(high >= 0, 1.0, 0.0)
        return LinePair(zeros, np.where(low > 0, 1.0, 0.0), zeros, one, one)
    mirrored = (high < 0) & (name == "reciprocal")
    if name in ("reciprocal", "rsqrt"):
        low, high = np.where(mirrored, -high, low), np.where(mirrored, -low, high)
        low = np.where(low > 0, low, np.nan)
    curve = _CURVES[name]
    below, floor, least = _below(curve, low, high)
    above, ceiling, most = (-part for part in _below(curve.negative(), low, high))
    size = np.maximum(np.abs(least), np.abs(most))
    if float32:
        error = execution_error(name, low, high, size, assumed)
        floor, ceiling, size = floor - error, ceiling + error, size + error
    if mirrored.any():  # 1 / z = -(1 / -z)
        below, above = np.where(mirrored, above, below), np.where(mirrored, below, above)
        floor, ceiling = np.where(mirrored, -ceiling, floor), np.where(mirrored, -floor, ceiling)
    return LinePair(below, floor, above, ceiling, size)


def _square(low: Floats, high: Floats) -> LinePair:
    middle = low / 2 + high / 2
    size = np.maximum(low * low, high * high) * (1 + EPSILON)
    slack = 4 * EPSILON * size + 1e-290
    floor, ceiling = -middle * middle - slack, -low * high + slack
    return LinePair(2 * middle, floor, low + high, ceiling, size + slack)


def _below(curve: SmoothCurve, low: Floats, high: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the slope and the offset of a line below a curve, and the curve's least value."""
    middle, width = low / 2 + high / 2, high - low
    least = _offset(curve, np.zeros_like(low), low, high)
    slope, offset, best = np.zeros_like(low), least, least
    chord = (curve.value(high) - curve.value(low)) / width
    candidates = [chord, curve.slope(middle)]
    candidates += [curve.slope(_touching(curve, low, high, end)) for end in (low, high)]
    for candidate in candidates:
        new = np.where(np.isfinite(candidate), candidate, 0.0)
        shift = _offset(curve, new, low, high)
        better = new * middle + shift > best
        slope, offset = np.where(better, new, slope), np.where(better, shift, offset)
        best = np.where(better, new * middle + shift, best)
    return slope, offset, least


def _offset(curve: SmoothCurve, slope: Floats, low: Floats, high: Floats) -> Floats:
    """Return a lower bound of curve - slope * z on an interval."""
    least = np.minimum(curve.value(low) - slope * low, curve.value(high) - slope * high)
    edges = (-np.inf, *curve.bends, np.inf)
    for k in range(len(edges) - 1):
        if curve.convex == (k % 2 == 0):
            first, last = np.clip(edges[k], low, high), np.clip(edges[k + 1], low, high)
            left, right = first, last
            for _ in range(_STEPS):
                point = left / 2 + right / 2
                falling = (curve.rough or curve.slope)(point) < slope
                left, right = np.where(falling, point, left), np.where(falling, right, point)
            point = left / 2 + right / 2
            rest = curve.slope(point) - slope
            tangent = np.minimum(np.minimum(rest * (first - point), rest * (last - point)), 0.0)
            least = np.minimum(least, curve.value(point) - slope * point + tangent)
    scale = (curve.scale(low) + curve.scale(high)) * (1 + high - low)
    reach = np.abs(slope) * np.maximum(np.abs(low), np.abs(high))
    offset: Floats = least - 4 * EPSILON * (scale + reach) - 1e-290
    return offset


def _touching(curve: SmoothCurve, low: Floats, high: Floats, end: Floats) -> Floats:
    """Return roughly the point at which a line through an end touches the convex part."""
    edges = (-np.inf, *curve.bends, np.inf)
    k = 0 if curve.convex else min(1, len(edges) - 2)
    left, right = np.clip(edges[k], low, high), np.clip(edges[k + 1], low, high)
    goal, to_right, steepness = curve.value(end), end >= high, curve.rough or curve.slope
    for _ in range(_STEPS // 2):
        point = left / 2 + right / 2
        reached = curve.value(point) + steepness(point) * (end - point)
        further = (reached < goal) == to_right
        left, right = np.where(further, point, left), np.where(further, right, point)
    touching: Floats = left / 2 + right / 2
    return touching


def _sigmoid(z: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(-z))


def _normal(z: Floats) -> Floats:
    return 0.5 * (1.0 + np.asarray(_erf(z / sqrt(2.0)), np.float64))


def _gelu_slope(z: Floats) -> Floats:
    return _normal(z) + z * np.exp(-z * z / 2) / sqrt(2 * pi)


def _gelu_rough(z: Floats) -> Floats:
    """Return the slope by formula 7.1.26 of Abramowitz and Stegun for erf, right to 1.5e-7."""
    t, bell = 1.0 / (1.0 + 0.3275911 / sqrt(2.0) * np.abs(z)), np.exp(-z * z / 2)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (_A4 + t * _A5))))
    tail = 0.5 * series * bell
    return np.where(z < 0, tail, 1.0 - tail) + z * bell / sqrt(2 * pi)


def _gelu_tanh(z: Floats) -> Floats:
    return 0.5 * z * (1.0 + np.tanh(_K * (z + _C * z * z * z)))


def _gelu_tanh_slope(z: Floats) -> Floats:
    inner = np.tanh(_K * (z + _C * z * z * z))
    return 0.5 * (1.0 + inner) + 0.5 * z * (1.0 - inner**2) * _K * (1.0 + 3.0 * _C * z * z)


def _mish_slope(z: Floats) -> Floats:
    gate = np.tanh(np.logaddexp(0.0, z))
    return gate + z * (1.0 - gate**2) * _sigmoid(z)


def _one(z: Floats) -> Floats:
    return np.where(np.isnan(z), z, 1.0)


def _linear(z: Floats) -> Floats:
    return 1.0 + np.abs(z)


def _poles(z: Floats) -> Floats:
    return 1.0 / z + 1.0 / (z * z)


_BY_ARGUMENT = ("gelu", "gelu_tanh", "silu", "mish")
_CURVES = {
    "sigmoid": SmoothCurve(_sigmoid, lambda z: _sigmoid(z) * _sigmoid(-z), _one, (0.0,)),
    "tanh": SmoothCurve(np.tanh, lambda z: 1.0 - np.tanh(z) ** 2, _one, (0.0,)),
    "gelu": SmoothCurve(
        lambda z: z * _normal(z), _gelu_slope, _linear, (-sqrt(2.0), sqrt(2.0)), False, _gelu_rough
    ),
    "gelu_tanh": SmoothCurve(
        _gelu_tanh,
        _gelu_tanh_slope,
        lambda z: (1.0 + np.abs(z)) ** 3,
        (-1.41850400879083, 1.41850400879083),
        False,
    ),
    "silu": SmoothCurve(
        lambda z: z * _sigmoid(z),
        lambda z: _sigmoid(z) * (1.0 + z * _sigmoid(-z)),
        _linear,
        (-2.399357280515467, 2.399357280515467),
        False,
    ),
    "exp": SmoothCurve(np.exp, np.exp, np.exp),
    "elu": SmoothCurve(
        lambda z: np.where(z > 0, z, np.expm1(np.minimum(z, 0))),
        lambda z: np.exp(np.minimum(z, 0)),
        _linear,
    ),
    "softplus": SmoothCurve(lambda z: np.logaddexp(0.0, z), _sigmoid, _linear),
    "mish": SmoothCurve(
        lambda z: z * np.tanh(np.logaddexp(0.0, z)), _mish_slope, _linear, _MISH_BENDS, False
    ),
    "reciprocal": SmoothCurve(lambda z: 1.0 / z, lambda z: -1.0 / (z * z), _poles),
    "rsqrt": SmoothCurve(lambda z: 1.0 / np.sqrt(z), lambda z: -0.5 / (z * np.sqrt(z)), _poles),
}
