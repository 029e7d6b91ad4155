"""The search for counterexamples by gradients; each is confirmed in exact arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import lcm
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from anydevice._proofs.checking.network import Network, Query, outward
from anydevice._proofs.evaluation import FUNCTIONS

Floats = npt.NDArray[np.float64]
Exact = tuple[Fraction, ...]

_EXACT = ("", "relu", "square", "step")
"""Functions whose values at rationals are rational."""

_PROMISING, _NEAR_STEPS = 16, 5
"""The points of a batch that are moved, and the steps of each."""

_LONG, _LONG_AFTER, _LONG_WORK = 2000, (6, 24, 96), 5e7
"""Random points after these batches of a search, and the limit of points times weights."""

_FEW, _SURVIVING = 64, 0.6
"""Above `_FEW` points, each step continues with this share, which has the smallest margins."""

_ROUGH = 1e-3
"""The attack computes in float32 if margins are off by at most this part of the largest."""


class Violation(NamedTuple):
    """A point of the box, its outputs, and the amount by which all rows of a group are violated.

    `amount` is at least 0. All numbers are exact, unless the network has smooth functions.
    """

    x: Exact
    y: Exact
    amount: Fraction
    is_exact: bool


class Attack:
    """Looks for counterexamples by projected gradient descent (PGD; Madry et al., 2018).

    `pause` is called before each step, and may raise an error that ends it.
    """

    def __init__(self, network: Network, query: Query, pause: Callable[[], None]) -> None:
        self.network, self.query, self.pause = network, query, pause
        self.low, self.high = outward(query.low, query.high)
        self.coefficients = np.array([[float(c) for c in row] for row in query.coefficients])
        self.constants = np.array([float(d) for d in query.constants])
        self.group = np.array(query.group)
        self.groups = int(self.group.max()) + 1
        self._columns = [np.flatnonzero(self.group == g) for g in range(self.groups)]
        self.violation: Violation | None = None
        self._calls = 0
        self._network, self._off = network, 0.0

    def search(self, starts: int = 64, steps: int = 24, seed: int = 0) -> Violation | None:
        """Take PGD steps from random points, on each group in turn."""
        random = np.random.default_rng(seed)
        part = random.random((starts, len(self.low)))
        # Counterexamples are often on faces and corners: half of the points begin there.
        part[::2] = np.clip(part[::2] * 3 - 1, 0, 1)
        points = self.low + (self.high - self.low) * part
        points[0] = self.low + (self.high - self.low) / 2
        if self._calls <= 1:
            self._narrow(points)
        self._descend(points, steps, 0.25)
        return self.violation

    def near(self, points: Floats) -> Floats | None:
        """Return a counterexample among points, or near the most promising ones of them.

        The first call tries random points before, and so do the calls of `_LONG_AFTER`.
        """
        self._calls += 1
        if self._calls == 1:
            self.search()
        elif self._calls in _LONG_AFTER:
            weights = sum(w.size for node in self.network.nodes for w in node.weights)
            self.search(min(_LONG, max(64, int(_LONG_WORK / weights))), seed=self._calls)
        if self.violation is not None:
            return _as_floats(self.violation.x)
        margins = self._margins(self._values(points)[-1])
        point = self._first_violation(points, margins)
        if point is not None:
            return point
        best = np.argsort(np.nan_to_num(margins.min(1), nan=np.inf))[:_PROMISING]
        return self._descend(points[best], _NEAR_STEPS, 0.03, margins[best].argmin(1))

    def _descend(self, points: Floats, steps: int, far: float, goal: Any = None) -> Floats | None:
        """Take steps against the sign of the gradient, each shorter than the one before."""
        wide = self.high - self.low
        goal = np.arange(len(points)) // 2 % self.groups if goal is None else goal
        for i in range(steps):
            self.pause()
            margins, slopes = self._gradients(points, goal)
            point = self._first_violation(points, margins)
            if point is not None:
                return point
            if len(points) > _FEW:
                of_goal = np.nan_to_num(margins[np.arange(len(points)), goal], nan=np.inf)
                best = np.argsort(of_goal)[: max(_FEW, int(_SURVIVING * len(points)))]
                points, slopes, goal = points[best], slopes[best], goal[best]
            away = np.sign(slopes) * wide * far * 0.85**i
            points = np.clip(points - away, self.low, self.high)
        return self._first_violation(points, self._margins(self._values(points)[-1]))

    def _first_violation(self, points: Floats, margins: Floats) -> Floats | None:
        """Return a point that is exactly a counterexample, and store its violation."""
        worst = np.where(np.isnan(margins), np.inf, margins).min(1)
        some = np.argpartition(worst, 2)[:3] if len(worst) > 3 else np.arange(len(worst))
        some = some[worst[some] <= self._off]
        if not len(some):
            return None
        margins = self._margins(self._values(points[some], self.network)[-1])
        worst = np.where(np.isnan(margins), np.inf, margins).min(1)
        for i in np.argsort(worst):
            if worst[i] <= 0:
                self.violation = self._violation_at(points[some[i]])
                if self.violation is not None:
                    return _as_floats(self.violation.x)
        return None

    def _violation_at(self, point: Floats) -> Violation | None:
        """Return the violation at a point, moved into the exact box; `None` if there is none."""
        x = tuple(
            _inside(float(value), low, high)
            for value, low, high in zip(point, self.query.low, self.query.high, strict=True)
        )
        is_exact = all(node.function in _EXACT and not node.inexact for node in self.network.nodes)
        if is_exact:
            y = exact_outputs(self.network, x)
        else:
            values = self._values(_as_floats(x)[None], self.network)[-1][0]
            if not np.isfinite(values).all():
                return None
            y = tuple(Fraction(float(value)) for value in values)
        slack = Fraction(0) if is_exact else Fraction(1, 10**9)
        amount = violation_of(self.query, y, slack)
        return None if amount is None else Violation(x, y, amount, is_exact)

    def _narrow(self, points: Floats) -> None:
        """Compute in float32 from now on, if that is close enough at these points."""
        self._network, self._off = self.network, 0.0
        if any(node.function not in _EXACT for node in self.network.nodes):
            return
        exact = self._margins(self._values(points)[-1])
        with np.errstate(all="ignore"):
            self._network = self.network._replace(
                nodes=tuple(
                    node._replace(
                        weights=tuple(w.astype(np.float32) for w in node.weights),
                        bias=node.bias.astype(np.float32),
                    )
                    for node in self.network.nodes
                )
            )
            off = float(np.abs(self._margins(self._values(points)[-1]) - exact).max())
            is_close = off <= _ROUGH * float(np.abs(exact).max())
        if is_close:
            self._off = 8 * off
        else:
            self._network = self.network

    def _values(self, points: Floats, network: Network | None = None) -> list[Any]:
        """Return the values of all nodes, the points first."""
        network = self._network if network is None else network
        values, self._arguments = [points.astype(network.nodes[0].bias.dtype)], []
        with np.errstate(all="ignore"):
            for node in network.nodes:
                z: Any = None
                for i, weight in zip(node.inputs, node.weights, strict=True):
                    part = values[i] * weight if weight.ndim == 1 else values[i] @ weight.T
                    z = part if z is None else z + part
                z += node.bias
                self._arguments.append(z)
                values.append(FUNCTIONS[node.function](z))
        return values

    def _margins(self, outputs: Any) -> Floats:
        """Return the largest row of each group: the outputs are bad if it is <= 0."""
        rows = outputs @ self.coefficients.T + self.constants
        return np.stack([rows[:, columns].max(1) for columns in self._columns], 1)

    def _gradients(self, points: Floats, goal: Any) -> tuple[Floats, Floats]:
        """Return margins, and the gradient of the largest row of each point's goal."""
        values, nodes = self._values(points), self._network.nodes
        rows = values[-1] @ self.coefficients.T + self.constants
        of_goal = np.where(self.group == goal[:, None], rows, -np.inf)
        chosen = self.coefficients[of_goal.argmax(1)].astype(nodes[0].bias.dtype)
        slopes = {len(nodes): chosen}
        with np.errstate(all="ignore"):
            for number in range(len(nodes), 0, -1):
                node = nodes[number - 1]
                row = slopes.pop(number, None)
                if row is None:
                    continue
                if node.function:
                    row = row * _slope(node.function, self._arguments[number - 1])
                for i, weight in zip(node.inputs, node.weights, strict=True):
                    part = row * weight if weight.ndim == 1 else row @ weight
                    slopes[i] = slopes[i] + part if i in slopes else part
        return self._margins(values[-1]), np.nan_to_num(slopes[0])


def _slope(function: str, z: Floats) -> Any:
    """Return the derivative of a function, by central differences if it is smooth."""
    if function in ("relu", "step"):
        return z > 0
    away = 1e-6 * (1 + np.abs(z))
    return np.asarray((FUNCTIONS[function](z + away) - FUNCTIONS[function](z - away)) / (2 * away))


def _as_floats(numbers: Exact) -> Floats:
    return np.array([float(number) for number in numbers])


def _inside(value: float, low: Fraction, high: Fraction) -> Fraction:
    """Return a float32 near a number and between two rationals, else a float64, else `low`."""
    for kind in (np.float32, np.float64):
        with np.errstate(over="ignore"):
            near = kind(value)
            if np.isfinite(near) and not low <= Fraction(float(near)) <= high:
                is_above = Fraction(float(near)) > high
                end, inward = (float(high), -np.inf) if is_above else (float(low), np.inf)
                edge = kind(end)
                is_inside = low <= Fraction(float(edge)) <= high if np.isfinite(edge) else False
                near = edge if is_inside else np.nextafter(edge, kind(inward))
        if np.isfinite(near) and low <= Fraction(float(near)) <= high:
            return Fraction(float(near))
    return low


def violation_of(query: Query, y: Exact, slack: Fraction = Fraction(0)) -> Fraction | None:
    """Return the amount by which the worst group is below 0, or `None` if no group is bad."""
    largest: dict[int, Fraction] = {}
    bad: dict[int, bool] = {}
    for row, constant, group, strict in zip(
        query.coefficients, query.constants, query.group, query.strict, strict=True
    ):
        value = sum((c * v for c, v in zip(row, y, strict=True) if c), constant) + slack
        bad[group] = bad.get(group, True) and (value < 0 if strict else value <= 0)
        largest[group] = max(largest.get(group, value), value)
    amounts = [-largest[group] for group, is_bad in bad.items() if is_bad]
    return max(amounts) if amounts else None


def exact_outputs(network: Network, x: Exact) -> Exact:
    """Return the outputs of a network of affine nodes, ReLUs, squares and steps, exactly."""
    common = lcm(*(number.denominator for number in x))
    whole = [number.numerator * (common // number.denominator) for number in x]
    values: list[tuple[Any, Fraction]] = [(np.array(whole, object), Fraction(1, common))]
    for node in network.nodes:
        parts = []
        for i, weight in zip(node.inputs, node.weights, strict=True):
            numbers, unit = values[i]
            product, scale = _exact_product(weight, numbers)
            parts.append((product, unit * scale))
        parts.append(_as_integers(node.bias))
        unit = min(Fraction(1), *(scale for _, scale in parts))
        total = sum(numbers * int(scale / unit) for numbers, scale in parts)
        values.append(_function(node.function, total, unit))
    numbers, unit = values[-1]
    return tuple(int(number) * unit for number in numbers)


def _exact_product(weight: Floats, numbers: Any) -> tuple[Any, Fraction]:
    """Return a matrix, or the diagonal of one, times integers: integers and their unit.

    Most weights of a convolution are zero, and so are many values behind a ReLU.
    """
    if weight.ndim == 1:
        whole, scale = _as_integers(weight)
        return whole * numbers, scale
    rows, columns = np.nonzero(weight)
    used = (numbers != 0)[columns]
    rows, columns = rows[used], columns[used]
    whole, scale = _as_integers(weight[rows, columns])
    total = np.zeros(len(weight), object)
    if len(rows):
        starts = np.flatnonzero(np.diff(rows, prepend=-1))
        total[rows[starts]] = np.add.reduceat(whole * numbers[columns], starts)
    return total, scale


def _function(name: str, numbers: Any, unit: Fraction) -> tuple[Any, Fraction]:
    if name == "relu":
        return np.where(numbers > 0, numbers, 0), unit
    if name == "square":
        return numbers * numbers, unit * unit
    if name == "step":
        return np.where(numbers > 0, 1, 0).astype(object), Fraction(1)
    return numbers, unit


def _as_integers(weight: Floats) -> tuple[Any, Fraction]:
    """Return floats as integers and a power of two that they are multiplied by."""
    mantissa, exponent = np.frexp(weight)
    used = exponent[weight != 0]
    least = min(int(used.min()) - 53, 0) if used.size else 0
    whole = (mantissa * 2.0**53).astype(np.int64).astype(object)
    shifts = np.maximum(exponent - 53 - least, 0)
    powers = np.array([1 << k for k in range(int(shifts.max(initial=0)) + 1)], object)
    return whole * powers[shifts], Fraction(1, 1 << -least)
