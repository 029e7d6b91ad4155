"""Counterexamples: looked for by gradients, confirmed in exact arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import lcm
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from anydevice._proofs.checking.network import Network, Node, Query
from anydevice._proofs.evaluation import FUNCTIONS

Floats = npt.NDArray[np.float64]
Exact = tuple[Fraction, ...]

_EXACT = ("", "relu", "square", "step")
"""Functions whose values at rationals are rational."""


_PROMISING, _NEAR_STEPS = 16, 5
"""So many points that a search gives are moved by so many steps."""

_LONG, _LONG_AFTER, _LONG_WORK = 2000, (6, 24, 96), 5e7
"""So many random points are tried after so many batches of a search, fewer in large networks."""

_FEW, _KEPT = 64, 0.6
"""Of more than a few points, which part goes on with the next step: those with the least margin."""

_ROUGH = 1e-3
"""Points are looked for in float32 where margins are off by less than this part of the largest."""


class Violation(NamedTuple):
    """A point of the box, the outputs there, and by how much all rows of a group are violated.

    `amount` is at least 0. All are exact, but where the network has smooth functions.
    """

    x: Exact
    y: Exact
    amount: Fraction
    is_exact: bool


class Attack:
    """Looks for points of the box of a query at which the outputs are bad.

    `pause` is called before each step, and may raise an error that ends it.
    """

    def __init__(
        self,
        network: Network,
        query: Query,
        low: Floats,
        high: Floats,
        pause: Callable[[], None],
    ) -> None:
        self.network, self.query, self.pause = network, query, pause
        self.low, self.high = low, high
        self.coefficients = np.array([[float(c) for c in row] for row in query.coefficients])
        self.constants = np.array([float(d) for d in query.constants])
        self.group = np.array(query.group)
        self.groups = int(self.group.max()) + 1
        self._columns = [np.flatnonzero(self.group == g) for g in range(self.groups)]
        self.found: Violation | None = None
        self._searched, self._calls = False, 0
        self._network, self._off = network, 0.0

    def search(self, starts: int = 64, steps: int = 24, seed: int = 0) -> Violation | None:
        """Projected gradient steps from random points, on each group in turn."""
        self._searched = True
        random = np.random.default_rng(seed)
        part = random.random((starts, len(self.low)))
        # Counterexamples are often on faces and corners: half of the points begin there.
        part[::2] = np.clip(part[::2] * 3 - 1, 0, 1)
        points = self.low + (self.high - self.low) * part
        points[0] = self.low + (self.high - self.low) / 2
        if self._calls <= 1:
            self._narrow(points)
        self._descend(points, steps, 0.25)
        return self.found

    def near(self, points: Floats) -> Floats | None:
        """A counterexample among points or near the most promising ones of them.

        Random points come first where none were tried before, and more of them now and then.
        """
        self._calls += 1
        if not self._searched:
            self.search()
        elif self._calls in _LONG_AFTER:
            weights = sum(w.size for node in self.network.nodes for w in node.weights)
            self.search(min(_LONG, max(64, int(_LONG_WORK / weights))), seed=self._calls)
        if self.found is not None:
            return np.array([float(each) for each in self.found.x])
        margins = self._margins(self._values(points)[-1])
        found = self.refutes(points, margins)
        if found is not None:
            return found
        best = np.argsort(np.nan_to_num(margins.min(1), nan=np.inf))[:_PROMISING]
        return self._descend(points[best], _NEAR_STEPS, 0.03, margins[best].argmin(1))

    def _descend(self, points: Floats, steps: int, far: float, goal: Any = None) -> Floats | None:
        """Steps against the sign of the gradient, each shorter than the one before."""
        wide = self.high - self.low
        goal = np.arange(len(points)) // 2 % self.groups if goal is None else goal
        for i in range(steps):
            self.pause()
            margins, slopes = self._gradients(points, goal)
            found = self.refutes(points, margins)
            if found is not None:
                return found
            if len(points) > _FEW:
                own = np.nan_to_num(margins[np.arange(len(points)), goal], nan=np.inf)
                best = np.argsort(own)[: max(_FEW, int(_KEPT * len(points)))]
                points, slopes, goal = points[best], slopes[best], goal[best]
            away = np.sign(slopes) * wide * far * 0.85**i
            points = np.clip(points - away, self.low, self.high)
        return self.refutes(points)

    def refutes(self, points: Floats, margins: Floats | None = None) -> Floats | None:
        """The first of these points that is bad, exactly; it is kept in `found`."""
        if margins is None:
            margins = self._margins(self._values(points)[-1])
        worst = np.where(np.isnan(margins), np.inf, margins).min(1)
        some = np.argpartition(worst, 2)[:3] if len(worst) > 3 else np.arange(len(worst))
        some = some[worst[some] <= self._off]
        if not len(some):
            return None
        margins = self._margins(self._values(points[some], self.network)[-1])
        worst = np.where(np.isnan(margins), np.inf, margins).min(1)
        for i in np.argsort(worst):
            if worst[i] <= 0:
                violation = self.confirmed(points[some[i]])
                if violation is not None:
                    self.found = violation
                    return np.array([float(each) for each in violation.x])
        return None

    def confirmed(self, point: Floats) -> Violation | None:
        """The violation at a point, moved into the exact box; `None` if there is none."""
        x = tuple(
            _inside(float(value), low, high)
            for value, low, high in zip(point, self.query.low, self.query.high, strict=True)
        )
        is_exact = all(node.function in _EXACT and not node.inexact for node in self.network.nodes)
        if is_exact:
            y = exact_outputs(self.network, x)
        else:
            point = np.array([[float(each) for each in x]])
            values = self._values(point, self.network)[-1][0]
            if not np.isfinite(values).all():
                return None
            y = tuple(Fraction(float(each)) for each in values)
        slack = Fraction(0) if is_exact else Fraction(1, 10**9)
        amount = violation_of(self.query, y, slack)
        return None if amount is None else Violation(x, y, amount, is_exact)

    def _narrow(self, points: Floats) -> None:
        """Compute in float32 from here on, where that is close enough at some points."""
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
        """The values of all nodes, the points first."""
        network = self._network if network is None else network
        values, self._arguments = [points.astype(network.nodes[0].bias.dtype)], []
        with np.errstate(all="ignore"):
            for node in network.nodes:
                z = self._sum(node, values)
                self._arguments.append(z)
                values.append(FUNCTIONS[node.function](z))
        return values

    def _sum(self, node: Node, values: list[Any]) -> Any:
        total: Any = None
        for i, weight in zip(node.inputs, node.weights, strict=True):
            part = values[i] * weight if weight.ndim == 1 else values[i] @ weight.T
            total = part if total is None else total + part
        total += node.bias
        return total

    def _margins(self, outputs: Any) -> Floats:
        """For each group its largest row: the outputs are bad where it is <= 0."""
        rows = outputs @ self.coefficients.T + self.constants
        return np.stack([rows[:, its].max(1) for its in self._columns], 1)

    def _gradients(self, points: Floats, goal: Any) -> tuple[Floats, Floats]:
        """Margins, and the gradient of the largest row of each point's own group."""
        values, nodes = self._values(points), self._network.nodes
        rows = values[-1] @ self.coefficients.T + self.constants
        own = np.where(self.group == goal[:, None], rows, -np.inf)
        chosen = self.coefficients[own.argmax(1)].astype(nodes[0].bias.dtype)
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
        margins = np.stack([rows[:, its].max(1) for its in self._columns], 1)
        return margins, np.nan_to_num(slopes[0])


def _slope(function: str, z: Floats) -> Any:
    """The derivative of a function, by differences where it is smooth."""
    if function in ("relu", "step"):
        return z > 0
    away = 1e-6 * (1 + np.abs(z))
    return np.asarray((FUNCTIONS[function](z + away) - FUNCTIONS[function](z - away)) / (2 * away))


def _inside(value: float, low: Fraction, high: Fraction) -> Fraction:
    """The float32 next to a number that lies between two rationals, or float64, or one of them."""
    for kind in (np.float32, np.float64):
        with np.errstate(over="ignore"):
            near = kind(value)
            if np.isfinite(near) and Fraction(float(near)) > high:
                near = np.nextafter(kind(float(high)), kind(-np.inf))
                up = np.nextafter(near, kind(np.inf))
                near = up if Fraction(float(up)) <= high else near
            elif np.isfinite(near) and Fraction(float(near)) < low:
                near = np.nextafter(kind(float(low)), kind(np.inf))
                down = np.nextafter(near, kind(-np.inf))
                near = down if Fraction(float(down)) >= low else near
        if np.isfinite(near) and low <= Fraction(float(near)) <= high:
            return Fraction(float(near))
    return low


def violation_of(query: Query, y: Exact, slack: Fraction = Fraction(0)) -> Fraction | None:
    """By how much the rows of the worst group are below 0, or `None` where no group is bad."""
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
    """The outputs of a network of affine nodes, ReLUs, squares and steps at a rational point."""
    values: list[tuple[Any, Fraction]] = [_scaled(x)]
    for node in network.nodes:
        parts = []
        for i, weight in zip(node.inputs, node.weights, strict=True):
            numbers, unit = values[i]
            product, scale = _exact_product(weight, numbers)
            parts.append((product, unit * scale))
        parts.append(_whole(node.bias))
        unit = Fraction(1)
        for _, each in parts:
            unit = min(unit, each)
        total = sum(numbers * int(each / unit) for numbers, each in parts)
        values.append(_function(node.function, total, unit))
    numbers, unit = values[-1]
    return tuple(int(each) * unit for each in numbers)


def _exact_product(weight: Floats, numbers: Any) -> tuple[Any, Fraction]:
    """A matrix, or the diagonal of one, times integers: integers, and their unit.

    Most weights of a convolution are zero, and so are many values behind a ReLU.
    """
    if weight.ndim == 1:
        whole, scale = _whole(weight)
        return whole * numbers, scale
    rows, columns = np.nonzero(weight)
    used = (numbers != 0)[columns]
    rows, columns = rows[used], columns[used]
    whole, scale = _whole(weight[rows, columns])
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


def _scaled(x: Exact) -> tuple[Any, Fraction]:
    """Rationals as integers times one unit fraction."""
    common = lcm(*(each.denominator for each in x))
    whole = [each.numerator * (common // each.denominator) for each in x]
    return np.array(whole, object), Fraction(1, common)


def _whole(weight: Floats) -> tuple[Any, Fraction]:
    """Floats as integers times a power of two."""
    mantissa, exponent = np.frexp(weight)
    used = exponent[weight != 0]
    least = int(used.min()) - 53 if used.size else 0
    least = min(least, 0)
    whole = (mantissa * 2.0**53).astype(np.int64).astype(object)
    return whole * _powers(exponent - 53 - least), Fraction(1, 1 << -least)


def _powers(exponents: Any) -> Any:
    exponents = np.maximum(exponents, 0)
    table = [1 << k for k in range(int(exponents.max(initial=0)) + 1)]
    return np.array(table, object)[exponents]
