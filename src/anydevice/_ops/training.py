"""Losses, and optimizer steps over lists of arrays: pure functions that return new lists.

Optimizers compute in float64 for parameters of that dtype, in float32 for all others. Every result
has the dtype of the array it replaces, so the means of 16-bit parameters may be float32. A rate,
and the step count, may be a number or a 0-d array: compiled code is not compiled again when it
changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Generic

from anydevice._core.array import Array, ArrayT
from anydevice._core.primitives import PrimitivesOf
from anydevice._ops.arguments import (
    NUMBERS,
    different_shapes,
    finite_numbers,
    in_words,
    number_or_array,
    require_integers,
    require_one_dtype,
    reshape_advice,
    wide,
    widened,
    wrong,
    wrong_shapes,
)
from anydevice._ops.dispatch import float_version, own_version, primitives, run, run2


def cross_entropy(logits: ArrayT, targets: ArrayT) -> ArrayT:
    """Return the mean over all targets of -log(softmax(logits)[target]); one number.

    logits is (…, classes), before any softmax, and targets (…) holds integers. The result is
    float32, or float64 for such logits. A target outside of the classes makes it NaN.

    >>> cross_entropy(numpy.array([[0.0, 0.0], [9.0, 9.0]]), numpy.array([0, 1])).round(4).tolist()
    0.6931
    """
    own = float_version(logits, "cross_entropy", _cross_entropy)
    shape = tuple(logits.shape)
    if shape and shape == tuple(getattr(targets, "shape", ())):
        raise wrong(
            "cross_entropy",
            f"targets has the same shape as logits, {shape}, like one-hot rows; it must hold the "
            "class number of each row: use targets.argmax(-1)",
        )
    require_integers("cross_entropy", "targets", targets, logits, "logits")
    if not shape or not shape[-1] or shape[:-1] != tuple(targets.shape):
        rule = "logits must be (…, classes) and targets (…)"
        advice = reshape_advice("targets", targets, shape[:-1]) if shape else ""
        raise wrong_shapes("cross_entropy", rule, advice, logits=logits, targets=targets)
    return run2(own, _cross_entropy, logits, targets)


def mean_squared_error(x: ArrayT, y: ArrayT) -> ArrayT:
    """Return the mean of (x - y)² over two arrays of one shape; one number.

    The result is float32, or float64 for such arrays.

    >>> mean_squared_error(numpy.array([1.0, 2.0]), numpy.array([1.0, 4.0])).tolist()
    2.0
    """
    own = float_version(x, "mean_squared_error", _mean_squared_error)
    if type(y) is not type(x) or y.dtype != x.dtype:
        require_one_dtype("mean_squared_error", x=x, y=y)
    if x.shape != y.shape:
        raise different_shapes("mean_squared_error", x=x, y=y)
    return run2(own, _mean_squared_error, x, y)


def _cross_entropy(logits: ArrayT, targets: ArrayT) -> ArrayT:
    xp = primitives(logits)
    count, classes = math.prod(tuple(targets.shape)), logits.shape[-1]
    rows = widened(xp, xp.reshape(logits, (count, classes)))
    rows = xp.subtract(rows, xp.max(rows, 1, True))
    total = xp.log(xp.sum(xp.exp(rows), 1, True))
    chosen = xp.take_along_axis(rows, xp.reshape(targets, (count, 1)), 1)
    return xp.divide(xp.sum(xp.subtract(total, chosen), (0, 1)), float(count))


def _mean_squared_error(x: ArrayT, y: ArrayT) -> ArrayT:
    xp = primitives(x)
    off = xp.subtract(widened(xp, x), widened(xp, y))
    total = xp.multiply(off, off)
    axes = tuple(range(len(x.shape)))
    return xp.divide(xp.sum(total, axes), float(math.prod(x.shape))) if axes else total


def update_sgd(
    parameters: Sequence[ArrayT],
    gradients: Sequence[ArrayT],
    velocities: Sequence[ArrayT] | None,
    *,
    rate: float | ArrayT,
    momentum: float = 0.0,
    decay: float = 0.0,
    nesterov: bool = False,
) -> tuple[list[ArrayT], list[ArrayT] | None]:
    """Apply one step of SGD with momentum: the new parameters and velocities.

    The velocities begin as zeros, or are always `None` without momentum. `decay` is added to the
    gradients as a multiple of the parameters.

    >>> update_sgd([numpy.array([1.0])], [numpy.array([2.0])], None, rate=0.25)
    ([array([0.5])], None)
    """
    rate = number_or_array("update_sgd", "rate", rate, ("float",))
    momentum, decay = _not_negative("update_sgd", momentum=momentum, decay=decay)
    if velocities is None and momentum:
        raise wrong("update_sgd", "momentum needs velocities; start with zeros like the parameters")
    others = {} if velocities is None else {"velocities": velocities}
    if not _alike("update_sgd", parameters, gradients=gradients, **others):
        return [], None if velocities is None else []
    arguments = parameters, gradients, velocities, rate, momentum, decay, nesterov
    return run(own_version(parameters[0], "update_sgd", _update_sgd), _update_sgd, *arguments)


def update_adam(
    parameters: Sequence[ArrayT],
    gradients: Sequence[ArrayT],
    means: Sequence[ArrayT],
    squares: Sequence[ArrayT],
    step: int | ArrayT,
    *,
    rate: float | ArrayT,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    decay: float = 0.0,
    decoupled: bool = True,
) -> tuple[list[ArrayT], list[ArrayT], list[ArrayT]]:
    """Apply one step of Adam: the new parameters, means and mean squares of the gradients.

    Means and squares begin as zeros, and `step` counts from 1. `decay` shrinks the parameters
    themselves (AdamW) or, not `decoupled`, is added to the gradients (Adam).

    >>> one, zero = [numpy.array([1.0])], [numpy.array([0.0])]
    >>> parameters, means, squares = update_adam(one, one, zero, zero, 1, rate=0.5)
    >>> parameters[0].round(4).tolist(), means[0].round(4).tolist()
    ([0.5], [0.1])
    """
    rate = number_or_array("update_adam", "rate", rate, ("float",))
    count = number_or_array("update_adam", "step", step, ("int", "uint", "float"))
    # A count on the device is not validated.
    if type(count) in NUMBERS and (type(count) is not int or count < 1):
        raise wrong("update_adam", f"step must be an integer of 1 or more, not {count!r}")
    beta1, beta2 = _shares("update_adam", beta1=beta1, beta2=beta2)
    eps, decay = _not_negative("update_adam", eps=eps, decay=decay)
    if not _alike("update_adam", parameters, gradients=gradients, means=means, squares=squares):
        return [], [], []
    arrays, numbers = (parameters, gradients, means, squares), (rate, beta1, beta2, eps, decay)
    own = own_version(parameters[0], "update_adam", _update_adam)
    return run(own, _update_adam, *arrays, count, *numbers, decoupled)


def update_lion(
    parameters: Sequence[ArrayT],
    gradients: Sequence[ArrayT],
    means: Sequence[ArrayT],
    *,
    rate: float | ArrayT,
    beta1: float = 0.9,
    beta2: float = 0.99,
    decay: float = 0.0,
) -> tuple[list[ArrayT], list[ArrayT]]:
    """Apply one step of Lion, which is sign-based: the new parameters and means.

    The means begin as zeros. `decay` shrinks the parameters themselves.

    >>> one, zero = [numpy.array([1.0])], [numpy.array([0.0])]
    >>> update_lion(one, one, zero, rate=0.25)[0]
    [array([0.75])]
    """
    rate = number_or_array("update_lion", "rate", rate, ("float",))
    beta1, beta2 = _shares("update_lion", beta1=beta1, beta2=beta2)
    (decay,) = _not_negative("update_lion", decay=decay)
    if not _alike("update_lion", parameters, gradients=gradients, means=means):
        return [], []
    arguments = parameters, gradients, means, rate, beta1, beta2, decay
    return run(own_version(parameters[0], "update_lion", _update_lion), _update_lion, *arguments)


def _shares(op: str, **shares: Any) -> tuple[Any, ...]:
    return finite_numbers(op, "from 0 to below 1", lambda one: 0 <= one < 1, **shares)


def _not_negative(op: str, **numbers: Any) -> tuple[Any, ...]:
    return finite_numbers(op, "of 0 or more", lambda number: number >= 0, **numbers)


def _alike(op: str, parameters: Sequence[Array], **lists: Sequence[Array]) -> bool:
    """Whether there are any parameters; raise an error for lists that do not fit them."""
    for name, others in {"parameters": parameters, **lists}.items():
        if not isinstance(others, list | tuple):
            raise wrong(op, f"{name} must be a list of arrays, not {in_words(others)}")
    for name, others in lists.items():
        if len(others) != len(parameters):
            count = f"{len(parameters)} parameters and {len(others)} {name}"
            raise wrong(op, f"there must be as many {name} as parameters, but there are {count}")
        for at, (parameter, other) in enumerate(zip(parameters, others, strict=True)):
            primitives(parameter)
            primitives(other)
            if parameter.shape != other.shape:
                rule = f"{name}[{at}] must have the shape of its parameter"
                raise wrong_shapes(op, rule, **{"the parameter": parameter, "it": other})
    return bool(len(parameters))


class WideParameter(Generic[ArrayT]):
    """One parameter in the dtype that its update is computed in, and the steps of an update."""

    def __init__(self, parameter: ArrayT) -> None:
        self.xp: PrimitivesOf[ArrayT] = primitives(parameter)
        self.dtype = wide(self.xp.dtype(parameter))
        self.given, self.parameter = parameter, self.of(parameter)

    def of(self, x: Any) -> Any:
        return x if type(x) in NUMBERS else self.xp.astype(x, self.dtype)

    def back(self, x: ArrayT, like: ArrayT) -> ArrayT:
        return self.xp.astype(x, self.xp.dtype(like))

    def decayed(self, gradient: ArrayT, decay: float) -> ArrayT:
        """Return the gradient with `decay` times the parameter added."""
        xp, gradient = self.xp, self.of(gradient)
        return xp.add(gradient, xp.multiply(self.parameter, decay)) if decay else gradient

    def blend(self, mean: ArrayT, new: ArrayT, share: float) -> ArrayT:
        """Return `share` of the old mean and the rest of the new."""
        return self.xp.add(self.xp.multiply(mean, share), self.xp.multiply(new, 1 - share))

    def moved(self, change: ArrayT, rate: Any, decay: float = 0.0) -> ArrayT:
        """Shrink the parameter by the decay, subtract `rate` times the change, and round it."""
        xp, p, rate = self.xp, self.parameter, self.of(rate)
        if decay:
            shrinking = rate * decay if type(rate) in NUMBERS else xp.multiply(rate, decay)
            p = xp.subtract(p, xp.multiply(p, shrinking))
        return self.back(xp.subtract(p, xp.multiply(change, rate)), self.given)

    def grown(self, share: float, step: Any) -> ArrayT | float:
        """Return 1 - share ** step without the cancellation that the formula has near 0."""
        if not share:
            return 1.0
        if type(step) in NUMBERS:
            return -math.expm1(step * math.log(share))
        xp = self.xp
        half = xp.tanh(xp.multiply(self.of(step), math.log(share) / 2))
        return xp.divide(xp.multiply(half, -2.0), xp.add(xp.negative(half), 1.0))

    def root(self, x: Any) -> ArrayT | float:
        return math.sqrt(x) if type(x) in NUMBERS else self.xp.sqrt(x)


def _update_sgd(
    parameters: Sequence[ArrayT],
    gradients: Sequence[ArrayT],
    velocities: Sequence[ArrayT] | None,
    rate: ArrayT | float,
    momentum: float,
    decay: float,
    nesterov: bool,
) -> tuple[list[ArrayT], list[ArrayT] | None]:
    moved, new_velocities = [], []
    for at, parameter in enumerate(parameters):
        wider = WideParameter(parameter)
        xp, step = wider.xp, wider.decayed(gradients[at], decay)
        if velocities is not None:
            velocity = xp.add(xp.multiply(wider.of(velocities[at]), momentum), step)
            new_velocities.append(wider.back(velocity, velocities[at]))
            step = xp.add(step, xp.multiply(velocity, momentum)) if nesterov else velocity
        moved.append(wider.moved(step, rate))
    return moved, None if velocities is None else new_velocities


def _update_adam(
    parameters: Sequence[ArrayT],
    gradients: Sequence[ArrayT],
    means: Sequence[ArrayT],
    squares: Sequence[ArrayT],
    step: ArrayT | int,
    rate: ArrayT | float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    decoupled: bool,
) -> tuple[list[ArrayT], list[ArrayT], list[ArrayT]]:
    moved, new_means, new_squares = [], [], []
    grown: dict[str, tuple[ArrayT | float, ArrayT | float]] = {}
    for at, parameter in enumerate(parameters):
        wider = WideParameter(parameter)
        if wider.dtype.name not in grown:
            root = wider.root(wider.grown(beta2, step))
            grown[wider.dtype.name] = wider.grown(beta1, step), root
        first, second = grown[wider.dtype.name]
        xp = wider.xp
        gradient = wider.decayed(gradients[at], 0.0 if decoupled else decay)
        mean = wider.blend(wider.of(means[at]), gradient, beta1)
        square = wider.blend(wider.of(squares[at]), xp.multiply(gradient, gradient), beta2)
        spread = xp.add(xp.divide(xp.sqrt(square), second), eps)
        change = xp.divide(xp.divide(mean, first), spread)
        moved.append(wider.moved(change, rate, decay if decoupled else 0.0))
        new_means.append(wider.back(mean, means[at]))
        new_squares.append(wider.back(square, squares[at]))
    return moved, new_means, new_squares


def _update_lion(
    parameters: Sequence[ArrayT],
    gradients: Sequence[ArrayT],
    means: Sequence[ArrayT],
    rate: ArrayT | float,
    beta1: float,
    beta2: float,
    decay: float,
) -> tuple[list[ArrayT], list[ArrayT]]:
    moved, new_means = [], []
    for at, parameter in enumerate(parameters):
        wider = WideParameter(parameter)
        gradient, mean = wider.of(gradients[at]), wider.of(means[at])
        change = wider.xp.sign(wider.blend(mean, gradient, beta1))
        moved.append(wider.moved(change, rate, decay))
        new_means.append(wider.back(wider.blend(mean, gradient, beta2), means[at]))
    return moved, new_means
