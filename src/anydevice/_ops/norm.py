"""Softmax, log-softmax and the norms."""

from __future__ import annotations

from anydevice._core.array import Array, ArrayT
from anydevice._core.primitives import PrimitivesOf
from anydevice._ops.arguments import (
    axis_of,
    in_words,
    python_number,
    require_one_library,
    widened,
    wrong,
    wrong_shapes,
)
from anydevice._ops.dispatch import (
    compiled,
    explain,
    float_primitives,
    float_version,
    primitives,
    run3,
    version_for_dtype,
    version_for_mixed_dtypes,
)


@compiled
def softmax(x: ArrayT, axis: int = -1) -> ArrayT:
    """Return `exp(x)` divided by its sum along an axis, of the same shape and dtype.

    Computed in float32 for 16-bit numbers, and without overflow. A row that is minus infinity
    throughout, or has an infinity in it, gives NaN.

    >>> import numpy
    >>> softmax(numpy.array([[0.0, 0.0], [1000.0, -1000.0]])).tolist()
    [[0.5, 0.5], [1.0, 0.0]]
    """
    own = float_version(x, "softmax", _softmax)
    count = x.ndim
    known = type(axis) is int and -count <= axis < count
    at = axis % count if known else axis_of("softmax", x, axis)
    result = own(x, at)
    return _softmax(x, at) if result is NotImplemented else result


@compiled
def log_softmax(x: ArrayT, axis: int = -1) -> ArrayT:
    """Return the logarithm of `softmax`, exact where softmax itself would be rounded to 0.

    >>> import numpy
    >>> log_softmax(numpy.array([1000.0, 0.0])).tolist()
    [0.0, -1000.0]
    """
    own = float_version(x, "log_softmax", _log_softmax)
    count = x.ndim
    known = type(axis) is int and -count <= axis < count
    at = axis % count if known else axis_of("log_softmax", x, axis)
    result = own(x, at)
    return _log_softmax(x, at) if result is NotImplemented else result


def rmsnorm(x: ArrayT, weight: ArrayT, eps: float = 1e-6) -> ArrayT:
    """Return `x / sqrt(mean(x²) + eps) × weight` along the last axis, of the shape and dtype of x.

    x is (…, size) and weight (size,). Computed in float32 for 16-bit numbers and rounded once.

    >>> import numpy
    >>> rmsnorm(numpy.array([[3.0, 4.0]]), numpy.ones(2), eps=0.0).round(3).tolist()
    [[0.849, 1.131]]
    """
    dtype = getattr(x, "dtype", None)
    own = version_for_dtype(x, dtype, "rmsnorm", _rmsnorm)
    size = x.shape[-1:]
    alike = type(weight) is type(x) and weight.shape == size and weight.dtype == dtype and size
    if not alike:
        _refuse_misfit("rmsnorm", x, "weight", weight)
        own = version_for_mixed_dtypes(own, _rmsnorm)
    if type(eps) is not float:
        eps = _small_number("rmsnorm", eps)
    return run3(own, _rmsnorm, x, weight, eps)


def layernorm(x: ArrayT, weight: ArrayT | None, bias: ArrayT | None, eps: float = 1e-5) -> ArrayT:
    """Return `(x - mean) / sqrt(variance + eps) × weight + bias` along the last axis.

    x is (…, size), weight and bias (size,) or `None`; the result has the shape and dtype of x.
    Computed in float32 for 16-bit numbers and rounded once.

    >>> import numpy
    >>> layernorm(numpy.array([[1.0, 3.0]]), None, None, eps=0.0).tolist()
    [[-1.0, 1.0]]
    """
    dtype = getattr(x, "dtype", None)
    own = version_for_dtype(x, dtype, "layernorm", _layernorm)
    kind, size = type(x), x.shape[-1:]
    if weight is not None:
        alike = type(weight) is kind and weight.shape == size and weight.dtype == dtype and size
        if not alike:
            _refuse_misfit("layernorm", x, "weight", weight)
            own = version_for_mixed_dtypes(own, _layernorm)
    if bias is not None:
        alike = type(bias) is kind and bias.shape == size and bias.dtype == dtype and size
        if not alike:
            _refuse_misfit("layernorm", x, "bias", bias)
            own = version_for_mixed_dtypes(own, _layernorm)
    if type(eps) is not float:
        eps = _small_number("layernorm", eps)
    try:
        result = own(x, weight, bias, eps)
        return _layernorm(x, weight, bias, eps) if result is NotImplemented else result
    except Exception as error:
        explain(error, x=x, weight=weight, bias=bias)
        raise


def _refuse_misfit(op: str, x: Array, name: str, vector: Array) -> None:
    """Refuse a vector that does not go with x; another floating-point dtype is allowed."""
    require_one_library(op, "x", x, name, vector)
    if vector.dtype != x.dtype:
        float_primitives(op, vector)
    size, sizes = vector.shape, x.shape
    if len(size) != 1 or not sizes or size[0] != sizes[-1]:
        rule = f"{name} must be as long as the last axis of x"
        raise wrong_shapes(op, rule, x=x, **{name: vector})


def _small_number(op: str, eps: float) -> float:
    number = python_number(eps)
    if type(number) is not float and type(number) is not int:
        raise wrong(op, f"eps must be a number, not {in_words(number)}")
    return float(number)


def _softmax(x: ArrayT, axis: int) -> ArrayT:
    xp = primitives(x)
    if not x.shape[axis]:
        return x
    raised = xp.exp(_below_zero(xp, widened(xp, x), axis))
    return xp.astype(xp.divide(raised, xp.sum(raised, axis, True)), xp.dtype(x))


def _log_softmax(x: ArrayT, axis: int) -> ArrayT:
    xp = primitives(x)
    if not x.shape[axis]:
        return x
    lowered = _below_zero(xp, widened(xp, x), axis)
    total = xp.log(xp.sum(xp.exp(lowered), axis, True))
    return xp.astype(xp.subtract(lowered, total), xp.dtype(x))


def _below_zero(xp: PrimitivesOf[ArrayT], x: ArrayT, axis: int) -> ArrayT:
    return xp.subtract(x, xp.max(x, axis, True))


def _rmsnorm(x: ArrayT, weight: ArrayT, eps: float) -> ArrayT:
    xp = primitives(x)
    y = widened(xp, x)
    scale = xp.rsqrt(xp.add(_mean_of_last(xp, xp.multiply(y, y)), eps))
    scaled = xp.multiply(xp.multiply(y, scale), xp.astype(weight, xp.dtype(y)))
    return xp.astype(scaled, xp.dtype(x))


def _layernorm(x: ArrayT, weight: ArrayT | None, bias: ArrayT | None, eps: float) -> ArrayT:
    xp = primitives(x)
    y = widened(xp, x)
    y = xp.subtract(y, _mean_of_last(xp, y))
    y = xp.multiply(y, xp.rsqrt(xp.add(_mean_of_last(xp, xp.multiply(y, y)), eps)))
    if weight is not None:
        y = xp.multiply(y, xp.astype(weight, xp.dtype(y)))
    if bias is not None:
        y = xp.add(y, xp.astype(bias, xp.dtype(y)))
    return xp.astype(y, xp.dtype(x))


def _mean_of_last(xp: PrimitivesOf[ArrayT], x: ArrayT) -> ArrayT:
    return xp.divide(xp.sum(x, -1, True), float(x.shape[-1]))
