"""Ops: computations with one signature and one meaning on every engine.

>>> import numpy
>>> from anydevice import ops
>>> ops.softmax(numpy.array([[1.0, 1.0]])).tolist()
[[0.5, 0.5]]

An op takes arrays of any engine and returns arrays of the same, on the same device. Importing this
module imports no array library. Wrong shapes and dtypes are a `ConfigurationError` that names them,
and a library that runs out of memory is an `OutOfMemoryError` that says what to try.
"""

from __future__ import annotations

from anydevice.ops._attention import attention
from anydevice.ops._conv import avg_pool2d, conv2d, conv_transpose2d, max_pool2d
from anydevice.ops._elementwise import (
    abs,
    add,
    cos,
    divide,
    equal,
    erf,
    exp,
    floor,
    gelu,
    isnan,
    leaky_relu,
    less,
    less_equal,
    log,
    logical_and,
    logical_not,
    logical_or,
    maximum,
    minimum,
    multiply,
    negative,
    power,
    relu,
    rsqrt,
    sigmoid,
    sign,
    silu,
    sin,
    sqrt,
    subtract,
    swiglu,
    tanh,
    where,
)
from anydevice.ops._losses import cross_entropy, mean_squared_error
from anydevice.ops._manipulation import (
    astype,
    broadcast_to,
    cache_write,
    concat,
    embedding,
    flip,
    part,
    permute,
    reshape,
    take,
)
from anydevice.ops._matmul import linear, matmul
from anydevice.ops._norm import layernorm, log_softmax, rmsnorm, softmax
from anydevice.ops._optimizers import update_adam, update_lion, update_sgd
from anydevice.ops._reduce import argmax, max, mean, min, std, sum, top_k, var
from anydevice.ops._rope import rope

# Element by element
__all__ = ["abs", "add", "cos", "divide", "equal", "erf", "exp", "floor", "gelu", "isnan"]
__all__ += ["leaky_relu", "less", "less_equal", "log", "logical_and", "logical_not", "logical_or"]
__all__ += ["maximum", "minimum", "multiply", "negative", "power", "relu", "rsqrt", "sigmoid"]
__all__ += ["sign", "silu", "sin", "sqrt", "subtract", "swiglu", "tanh", "where"]
# Along axes, and from place to place
__all__ += ["argmax", "log_softmax", "max", "mean", "min", "softmax", "std", "sum", "top_k", "var"]
__all__ += ["astype", "broadcast_to", "cache_write", "concat", "embedding", "flip", "part"]
__all__ += ["permute", "reshape", "take"]
# Layers, losses and the steps of optimizers
__all__ += ["attention", "avg_pool2d", "conv2d", "conv_transpose2d", "layernorm", "linear"]
__all__ += ["matmul", "max_pool2d", "rmsnorm", "rope"]
__all__ += ["cross_entropy", "mean_squared_error", "update_adam", "update_lion", "update_sgd"]

for _name in __all__:
    globals()[_name].__module__ = __name__
