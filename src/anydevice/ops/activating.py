"""The functions between the layers of a network, element by element."""

from __future__ import annotations

import math

from anydevice.ops.dispatch import Array, floating_version, numeric_version, primitives
from anydevice.ops.shapes import same_type, wrong_shapes
from anydevice.ops.widening import widened


def relu(x: Array) -> Array:
    """The larger of x and 0, of the same shape and type; what is not a number stays so.

    >>> import numpy
    >>> relu(numpy.array([-1.0, 2.0])).tolist()
    [0.0, 2.0]
    """
    result = numeric_version(x, "relu", _relu)(x)
    return _relu(x) if result is NotImplemented else result


def silu(x: Array) -> Array:
    """`x × sigmoid(x)` of floating numbers, of the same shape and type.

    >>> import numpy
    >>> silu(numpy.array([0.0, 100.0])).tolist()
    [0.0, 100.0]
    """
    result = floating_version(x, "silu", _silu)(x)
    return _silu(x) if result is NotImplemented else result


def gelu(x: Array, approximate: bool = False) -> Array:
    """`x` times the share of the normal distribution below x, of the same shape and type.

    `approximate` takes the usual formula with a hyperbolic tangent, which is off by less than
    0.0005; models that were trained with it want it.

    >>> import numpy
    >>> gelu(numpy.array([0.0, 1.0])).round(4).tolist()
    [0.0, 0.8413]
    >>> gelu(numpy.array([0.0, 1.0]), approximate=True).round(4).tolist()
    [0.0, 0.8412]
    """
    result = floating_version(x, "gelu", _gelu)(x, approximate)
    return _gelu(x, approximate) if result is NotImplemented else result


def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) × up for two arrays of one shape; of that shape and their type.

    >>> import numpy
    >>> swiglu(numpy.array([0.0, 100.0]), numpy.array([5.0, 2.0])).tolist()
    [0.0, 200.0]
    """
    own = floating_version(gate, "swiglu", _swiglu)
    if type(up) is not type(gate) or up.dtype != gate.dtype:
        same_type("swiglu", gate, up=up)
    if gate.shape != up.shape:
        raise wrong_shapes("swiglu", "gate and up have one shape", gate=gate, up=up)
    result = own(gate, up)
    return _swiglu(gate, up) if result is NotImplemented else result


def _relu(x: Array) -> Array:
    return primitives(x).maximum(x, 0)


def _silu(x: Array) -> Array:
    xp = primitives(x)
    y = widened(xp, x)
    return xp.astype(xp.multiply(y, xp.sigmoid(y)), xp.dtype(x))


def _gelu(x: Array, approximate: bool) -> Array:
    xp = primitives(x)
    y = widened(xp, x)
    if approximate:
        cube = xp.multiply(xp.multiply(y, y), xp.multiply(y, 0.044715))
        share = xp.tanh(xp.multiply(xp.add(y, cube), math.sqrt(2 / math.pi)))
    else:
        share = xp.erf(xp.multiply(y, math.sqrt(0.5)))
    return xp.astype(xp.multiply(xp.multiply(y, 0.5), xp.add(share, 1.0)), xp.dtype(x))


def _swiglu(gate: Array, up: Array) -> Array:
    xp = primitives(gate)
    y = widened(xp, gate)
    product = xp.multiply(xp.multiply(y, xp.sigmoid(y)), widened(xp, up))
    return xp.astype(product, xp.dtype(gate))
