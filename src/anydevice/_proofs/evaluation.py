"""The outputs of networks at points, in float64, with bounds of the error of float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from math import erf

import numpy as np

from anydevice._proofs.checking.network import SMOOTH, Floats, Network, Node
from anydevice._proofs.checking.smooth import FLUSH, LARGEST, execution_error


def evaluate(network: Network, x: Floats) -> tuple[Floats, Floats]:
    """Return the outputs for rows of x in float64, and a bound of the error of float32 executions.

    >>> network = Network(2, (Node((0,), (np.ones((1, 2)),), np.zeros(1), "", 3),))
    >>> y, off = evaluate(network, np.ones((1, 2)))
    >>> y.shape, bool(0 < off[0, 0] < 1e-5)
    ((1, 1), True)
    """
    values, errors = evaluate_nodes(network, x)
    return values[-1], errors[-1]


@np.errstate(all="ignore")
def evaluate_nodes(network: Network, x: Floats) -> tuple[list[Floats], list[Floats]]:
    """Return the values of the input and of each node, and bounds of their errors in float32.

    This is a running error bound (Higham, 2002, section 3.3) of all roundings that the nodes state,
    with the errors that proofs assume of functions, of flushes to zero, and infinity if an
    execution may overflow.
    """
    unit = 2.0**-24
    values, errors = [np.asarray(x, np.float64)], [np.full(x.shape, FLUSH)]
    for node in network.nodes:
        z = np.broadcast_to(node.bias, (len(x), node.size))
        size, error = np.abs(z), np.zeros(z.shape)
        for number, weight in zip(node.inputs, node.weights, strict=True):
            size = size + _times(np.abs(values[number]) + errors[number], np.abs(weight))
        for number, weight in _sum_matrices(node):
            z = z + _times(values[number], weight)
            error = error + _times(errors[number], np.abs(weight))
        rounded = node.roundings * unit / (1 - node.roundings * unit)
        error = error + (rounded + node.inexact + 1e-13) * size + FLUSH * (node.roundings + 1)
        error = np.where(size > LARGEST, np.inf, error)
        value, off = _apply_function(node.function, z, error)
        values.append(value)
        errors.append(off)
    return values, errors


def points(
    boxes: Iterable[tuple[Sequence[Fraction], Sequence[Fraction]]], inputs: int, reach: float = 2.0
) -> Floats:
    """Return corners, the centre and random points of boxes, and, with a reach > 0.5, beyond."""
    generator = np.random.default_rng(0)
    rows = [*generator.normal(0, 1, (3, inputs))]
    for ends in boxes:
        low, high = (np.array([float(number) for number in end]) for end in ends)
        centre = low / 2 + high / 2
        corners = np.where(generator.random((3, inputs)) < 0.5, low, high)
        inner = generator.uniform(low, high, (3, inputs))
        beyond = centre + generator.uniform(-reach, reach, (3, inputs)) * (high - low)
        rows += [low, high, centre, *corners, *inner, *beyond]
    return np.array(rows)[(np.abs(rows) < LARGEST).all(1)]


def _sum_matrices(node: Node) -> list[tuple[int, Floats]]:
    """Return one matrix for each node that is summed; those of one node may cancel."""
    total: dict[int, Floats] = {}
    for number, weight in zip(node.inputs, node.weights, strict=True):
        if number not in total:
            total[number] = weight
            continue
        before = total[number]
        if weight.ndim != before.ndim:
            weight, before = [np.diag(x) if x.ndim == 1 else x for x in (weight, before)]
        total[number] = before + weight
    return list(total.items())


def _times(h: Floats, weight: Floats) -> Floats:
    with np.errstate(all="ignore"):
        product: Floats = h * weight if weight.ndim == 1 else h @ weight.T
    return np.where(np.isnan(product), np.inf, product)


def _apply_function(name: str, z: Floats, error: Floats) -> tuple[Floats, Floats]:
    """Return a function of z, and its error: the largest change within `error`, and its own."""
    function = FUNCTIONS[name]
    value = function(z)
    if not name:
        return value, error
    with np.errstate(all="ignore"):
        ends = [np.abs(function(z + sign * error) - value) for sign in (1.0, -1.0)]
        change = np.nan_to_num(np.maximum(*ends), nan=np.inf, posinf=np.inf)
        pole = (np.abs(z) <= error) & (name in ("reciprocal", "rsqrt"))
        change = np.where(pole | np.isinf(error), np.inf, change)
    own = execution_error(name, z, z, np.abs(value)) if name in SMOOTH else 0.0
    return value, change * 1.01 + own


def _sigmoid(z: Floats) -> Floats:
    small = np.exp(-np.abs(z))
    result: Floats = np.where(z >= 0, 1.0, small) / (1 + small)
    return result


FUNCTIONS: dict[str, Callable[[Floats], Floats]] = {
    "": lambda z: z,
    "relu": lambda z: np.maximum(z, 0),
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "gelu": lambda z: z * 0.5 * (1 + np.vectorize(erf, otypes=[float])(z / np.sqrt(2))),
    "gelu_tanh": lambda z: z * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
    "silu": lambda z: z * _sigmoid(z),
    "exp": np.exp,
    "elu": lambda z: np.where(z > 0, z, np.expm1(np.minimum(z, 0))),
    "softplus": lambda z: np.maximum(z, 0) + np.log1p(np.exp(-np.abs(z))),
    "mish": lambda z: z * np.tanh(FUNCTIONS["softplus"](z)),
    "reciprocal": lambda z: 1 / z,
    "rsqrt": lambda z: 1 / np.sqrt(z),
    "square": np.square,
    "step": lambda z: (z > 0).astype(np.float64),
}
"""The functions of nodes, in float64."""
