"""Error budgets: the error that an op may add to the rounding of its result.

Each function gives, for every element of the result, an error in units of the dtype that is
computed in: float64 for float64, float32 for all else. It is the magnitude of what was added up,
times a growth that holds for every order of adding. See `_check/compare.py` for the rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from anydevice._check import reference
from anydevice._check.reference import halves, rotary_angles, seen_keys
from anydevice._core.quantized import QuantizedWeight

Array = np.ndarray[Any, Any]
Budget = Callable[..., Any]
"""From the float64 result, `coarse`, and the op's arguments to the allowed error of each element.

`coarse` is how many units of the computing dtype the result's own unit is: 1 for float32, 65536
for bfloat16. Results that are lists or tuples have budgets of the same form.
"""


def growth(length: int) -> float:
    """Return the error, in units, of adding up `length` numbers in any order.

    Roundings of either sign leave about a third of the square root. Where small numbers are added
    to a large sum, all round one way: a part of the length comes on top, up to 4096 numbers that
    are added one by one. Pairwise sums stay far below.

    >>> growth(4096), growth(1_000_000)
    (392.0, 2264.0)
    """
    return 8.0 + 2 * math.sqrt(length) + min(length, 4096) / 16


def one_by_one(length: Any) -> Any:
    """Return the error of adding up exponentials: those after the largest are rounded to its units.

    >>> one_by_one(4096)
    328.0
    """
    return 8.0 + length**0.5 + length / 16


def _in_sum(logarithms: Array, axis: Any) -> Array:
    """Count the terms of each sum of exponentials that are large enough to change it."""
    return np.asarray((logarithms > -52).sum(axis, keepdims=True))


def exact(want: Any, coarse: float, *arguments: Any, **options: Any) -> float:
    """Allow nothing beyond the rounding of the result."""
    return 0.0


def relative(units: float, *, once: bool = False) -> Budget:
    """Return a budget of units of the result itself, for functions of one element.

    In 16 bits they may round once on the way, such as for a square before a cube: no error grows
    from that, as it would in a sum. With `once`, they round at the end alone.
    """

    def budget(want: Array, coarse: float, *arguments: Any, **options: Any) -> Array:
        return (units + (coarse if coarse > 1 and not once else 0.0)) * np.abs(want)

    return budget


def of_exponential(units: float, size: Callable[[Array], Array] = np.abs) -> Budget:
    """Scale the rounding of the exponent by the exponent's magnitude."""

    def budget(want: Array, coarse: float, x: Array, *others: Array) -> Array:
        return relative(units)(want, coarse) + 2 * size(x) * np.abs(want)

    return budget


def of_sigmoid(units: float) -> Budget:
    """Return the budget of a function that divides by `1 + exp(-x)`."""
    return of_exponential(units, lambda x: np.maximum(-x, 0))


def absolute(units: float) -> Budget:
    """Return a budget of units of 1, for functions of one element with terms as large as 1."""

    def budget(want: Array, coarse: float, *arguments: Any, **options: Any) -> Array:
        return units + (coarse if coarse > 1 else 0.0) * np.abs(want)

    return budget


def of_linspace(want: Array, coarse: float, *ends: float, **options: Any) -> float:
    """Allow units of the larger end, from which all are computed."""
    return 4 * max(map(abs, ends[:2]))


def of_tan(want: Array, coarse: float, x: Array) -> Array:
    """Scale the rounding of the angle by the slope, which grows towards the poles."""
    return relative(16)(want, coarse) + 4 * (1 + np.square(want))


def of_gelu(want: Array, coarse: float, x: Array, approximate: bool = False) -> Array:
    """Allow units of x: where x is negative, 1 + erf cancels."""
    return 48 * np.where(np.abs(x) < 40, np.abs(x), np.abs(want))


def of_magnitudes(op: str, length: Callable[..., int]) -> Budget:
    """Apply the same op to the absolute values: that is how much was added up."""

    def budget(want: Array, coarse: float, *arguments: Any, **options: Any) -> Array:
        sizes = [np.abs(a) if isinstance(a, np.ndarray) else a for a in arguments]
        return growth(length(*arguments, **options)) * reference.call(op, *sizes, **options)

    return budget


def of_reduction(op: str) -> Budget:
    """Return the budget of a sum or mean, whose length follows from the size of the result."""

    def budget(want: Array, coarse: float, x: Array, **how: Any) -> Array:
        return growth(x.size // max(1, np.size(want))) * reference.call(op, np.abs(x), **how)

    return budget


def of_var(
    want: Array, coarse: float, x: Array, axis: Any = None, keepdims: bool = False, **how: Any
) -> Array:
    """Allow roundings of the mean, times the difference, and small squares lost in a large sum."""
    if not x.size:
        return np.zeros(np.shape(want))
    count = x.size // max(1, np.size(want))
    off = np.abs(x - x.mean(axis, keepdims=True))
    rounded = off * (np.abs(x) + np.abs(x).mean(axis, keepdims=True))
    share = count / (count - how.get("correction", 0.0)) if count > how.get("correction", 0) else 1
    return 4 * growth(count) * want + 8 * share * rounded.mean(axis, keepdims=keepdims)


def of_std(want: Array, coarse: float, x: Array, **how: Any) -> Array:
    """Allow half the relative error of the variance."""
    of_square = of_var(np.square(want), coarse, x, **how)
    return 4 * want + of_square / np.where(np.asarray(want) > 0, 2 * want, 1)


def of_softmax(want: Array, coarse: float, x: Array, axis: int = -1) -> Array:
    """Scale the rounding of the exponent by the exponent's magnitude."""
    if not x.size:
        return np.zeros(x.shape)
    below = np.abs(x - x.max(axis, keepdims=True))
    return want * (one_by_one(_in_sum(-below, axis)) + 16 + 2 * below)


def of_log_softmax(want: Array, coarse: float, x: Array, axis: int = -1) -> Array:
    if not x.size:
        return np.zeros(x.shape)
    largest = np.where(np.isfinite(x), np.abs(x), 0).max(axis, keepdims=True)
    return one_by_one(_in_sum(want, axis)) + 16 + 4 * (np.abs(want) + largest)


def of_logsumexp(want: Array, coarse: float, x: Array, *how: Any, **named: Any) -> Array:
    """Allow the error of the sum, and the roundings of subtracting and adding the maximum."""
    length = one_by_one(x.size // max(1, np.size(want)))
    return length + 16 + 4 * np.where(np.isfinite(want), np.abs(want), 0)


def of_norm(want: Array, coarse: float, x: Array, *how: Any, **named: Any) -> Array:
    """Return the budget of a sum, and 64 units of the result for powers of any kind."""
    return (64 + growth(x.size // max(1, np.size(want)))) * np.abs(want)


def of_diff(want: Array, coarse: float, x: Array, axis: int = -1, n: int = 1) -> float:
    """Return 0 for one difference; for several, units of the largest element."""
    return 0.0 if n < 2 else 4.0**n * float(np.abs(x[np.isfinite(x)]).max(initial=0))


def of_rmsnorm(want: Array, coarse: float, x: Array, weight: Array, eps: float = 1e-6) -> Array:
    return (16 + growth(x.shape[-1])) * np.abs(want)


def of_layernorm(
    want: Array, coarse: float, x: Array, weight: Any, bias: Any, eps: float = 1e-5
) -> Array:
    """Subtracting the mean leaves roundings as large as those of the mean."""
    middle = np.abs(x).mean(-1, keepdims=True)
    spread = np.sqrt(x.var(-1, keepdims=True) + eps)
    scale = 1.0 if weight is None else np.abs(weight)
    normed = (np.abs(x) + middle) / spread * scale
    return (16 + growth(x.shape[-1])) * normed + (0.0 if bias is None else 4 * np.abs(bias))


def of_rope(want: Array, coarse: float, x: Array, positions: Array, **how: Any) -> Array:
    """Errors of float32 angles grow with the position, and by the powers that scale them."""
    given = (how.get("theta", 10000.0), how.get("scaling"), how.get("length"))
    turned, factor = rotary_angles(x, positions, *given)
    size, angles = np.empty(x.shape), np.empty(x.shape)
    first, second = halves(x.shape[-1], how.get("interleaved", False))
    for half in (first, second):
        size[..., half] = np.abs(x[..., first]) + np.abs(x[..., second])
        angles[..., half] = np.abs(turned)
    return factor * size * (16 + (16 if how.get("scaling") else 8) * angles)


def of_attention(
    want: Array,
    coarse: float,
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,
    **visible: Any,
) -> Array:
    """Weights may be rounded to the dtype of the values before they are multiplied with them.

    Scores have the error of their sums, and that of tanh where they are capped.
    """
    factor = abs(q.shape[-1] ** -0.5 if scale is None else scale)
    rows = np.abs(q).reshape(*k.shape[:2], -1, q.shape[-1])  # of all heads that share their keys
    sizes = (rows @ np.abs(k).swapaxes(-1, -2) * factor).reshape(*q.shape[:3], -1)
    score = np.where(seen_keys(q, k, **visible), sizes, 0).max(-1, keepdims=True, initial=0)
    options = {"scale": scale, "soft_cap": soft_cap, "sinks": sinks}
    averaged = reference.call("attention", q, k, np.abs(v), **options, **visible)
    inside: Array | float = coarse if coarse > 1 else 0.0
    if soft_cap is not None:
        inside += 32 * soft_cap
    if sinks is not None:
        inside = inside + 2 * np.abs(sinks)[:, None, None]
    budget = averaged * (one_by_one(k.shape[2]) + 16 + growth(q.shape[-1]) * score + inside)
    if coarse == 2.0**13:  # float16, whose small weights are subnormal
        sums = np.nansum(np.abs(v), 2, keepdims=True)
        budget = budget + sums.repeat(q.shape[1] // k.shape[1], 1)
    return np.asarray(budget)


def of_experts(
    want: Array,
    coarse: float,
    x: Array,
    gate_up: Array,
    down: Array,
    chosen: Array,
    weights: Array,
    *,
    gate_up_bias: Array | None = None,
    down_bias: Array | None = None,
    **options: Any,
) -> Array:
    """Add the errors of two sums; the first passes through the activation and the second sum.

    In 16 bits the sums, biases and the activation are rounded on the way.
    """
    rough, result = coarse if coarse > 1 else 0.0, np.zeros(x.shape)
    (_, hidden, inner), k = down.shape, chosen.shape[1]
    for token, place in np.ndindex(chosen.shape):
        expert = chosen[token, place]
        if not 0 <= expert < len(down):
            continue
        bias = np.zeros(2 * inner) if gate_up_bias is None else gate_up_bias[expert]
        last_bias = np.zeros(hidden) if down_bias is None else down_bias[expert]
        product = gate_up[expert] @ x[token]
        size = np.abs(gate_up[expert]) @ np.abs(x[token]) + np.abs(bias)
        off = growth(hidden) * size + rough * (np.abs(product) + np.abs(product + bias))
        gate, up = np.split(product + bias, 2)
        between = reference.gated(gate, up, **options)
        wide = np.abs(up) + 1
        off_between = 1.2 * wide * (off[:inner] + 64 * np.abs(gate)) + np.abs(gate) * off[inner:]
        off_between = off_between + rough * np.abs(between)
        product = down[expert] @ between
        last_size = np.abs(down[expert]) @ np.abs(between) + np.abs(last_bias)
        off = np.abs(down[expert]) @ off_between + (growth(inner) + growth(k)) * last_size
        off = off + rough * (np.abs(product) + np.abs(product + last_bias))
        result[token] += np.abs(weights[token, place]) * off
    return result


def of_cross_entropy(want: Array, coarse: float, logits: Array, targets: Array) -> Array:
    classes = logits.shape[-1]
    finite = np.where(np.isfinite(logits), np.abs(logits), 0)
    size = finite.max(-1).mean() + np.log(classes)
    return np.asarray((one_by_one(classes) + growth(targets.size)) * (size + 1))


def of_mean_squared_error(want: Array, coarse: float, x: Array, y: Array) -> Array:
    return np.asarray((8 + growth(x.size)) * ((np.abs(x) + np.abs(y)) ** 2).mean())


def _quantized_sizes(weight: QuantizedWeight) -> Array:
    """Return how much is added up for each number: the code and the zero point may come apart."""
    numbers, scales, minimums = reference.quantized_parts(weight)
    return np.abs(scales) * (np.abs(numbers) + 2 * weight.zero) + np.abs(minimums)


def of_dequantize(
    want: Array, coarse: float, weight: QuantizedWeight, dtype: str, rows: Array | None = None
) -> Array:
    sizes = 4 * _quantized_sizes(weight)
    return sizes if rows is None else reference.call("take", sizes, rows)


def of_quantized_linear(
    want: Array, coarse: float, x: Array, weight: QuantizedWeight, bias: Array | None = None
) -> Array:
    sizes = np.abs(x) @ _quantized_sizes(weight).T + (0 if bias is None else np.abs(bias))
    return growth(x.shape[-1]) * sizes


def of_update(want: Any, coarse: float, *arguments: Any, **options: Any) -> Any:
    """Allow units of the old value, of the new one, and of the gradient."""
    parameters, gradients, *states = arguments
    rate, decay = options["rate"], options.get("decay", 0.0)
    correction = 16.0
    if len(states) == 3:  # Adam: in the first steps, 1 - beta ** step cancels
        step = float(states.pop())
        betas = options.get("beta1", 0.9), options.get("beta2", 0.999)
        correction += 4 * sum(1 / (1 - beta**step) for beta in betas)
    pairs = zip(parameters, want[0], strict=True)
    moved = [8 * np.abs(old) + correction * (np.abs(new - old) + rate) for old, new in pairs]
    forces = [np.abs(g) + decay * np.abs(p) for p, g in zip(parameters, gradients, strict=True)]
    bounds = []
    for place, (before, after) in enumerate(zip(states, want[1:], strict=True)):
        if before is not None:  # there are no velocities without momentum
            squared = place == 1
            three = zip(before, after, forces, strict=True)
            bounds.append([8 * (abs(a) + abs(b) + (c**2 if squared else c)) for a, b, c in three])
    return (moved, *bounds)
