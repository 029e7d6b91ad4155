"""Every op, listed once: `anydevice.ops` shows these names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anydevice._core.array import Array
from anydevice._core.engine import Absent
from anydevice._core.text import warn
from anydevice._ops.dispatch import type_name
from anydevice._ops.elementwise import *
from anydevice._ops.manipulation import *
from anydevice._ops.products import *
from anydevice._ops.reduce import *
from anydevice._ops.training import *
from anydevice._ops.transformer import *

# Element by element
__all__ = ["abs", "add", "clip", "cos", "divide", "equal", "erf", "exp", "floor", "gelu", "greater"]
__all__ += ["greater_equal", "isfinite", "isnan", "leaky_relu", "less", "less_equal", "log"]
__all__ += ["logical_and", "logical_not", "logical_or", "maximum", "minimum", "multiply"]
__all__ += ["negative", "not_equal", "power", "relu", "round", "rsqrt", "sigmoid", "sign", "silu"]
__all__ += ["sin", "sqrt", "subtract", "swiglu", "tanh", "where"]
__all__ += ["acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "bitwise_and"]
__all__ += ["bitwise_invert", "bitwise_left_shift", "bitwise_or", "bitwise_right_shift"]
__all__ += ["bitwise_xor", "ceil", "copysign", "cosh", "expm1", "floor_divide", "hypot", "isinf"]
__all__ += ["log1p", "log2", "log10", "logaddexp", "logical_xor", "positive", "reciprocal"]
__all__ += ["remainder", "signbit", "sinh", "square", "tan", "trunc"]
# Along axes
__all__ += ["all", "any", "argmax", "argmin", "argsort", "cumulative_sum", "diff", "log_softmax"]
__all__ += ["logsumexp", "max", "mean", "min", "prod", "softmax", "sort", "std", "sum", "top_k"]
__all__ += ["var", "vector_norm"]
__all__ += ["count_nonzero", "cumulative_prod", "nonzero", "searchsorted", "unique_values"]
# New arrays, and from place to place
__all__ += ["arange", "eye", "full", "full_like", "one_hot", "ones", "ones_like", "zeros"]
__all__ += ["astype", "broadcast_to", "cache_write", "concat", "embedding", "flip", "zeros_like"]
__all__ += ["pad", "permute", "reshape", "slice_axis", "split", "stack", "take", "take_along_axis"]
__all__ += ["broadcast_arrays", "expand_dims", "linspace", "matrix_transpose", "meshgrid"]
__all__ += ["moveaxis", "repeat", "roll", "squeeze", "tile", "tril", "triu", "unstack"]
# Products, layers, losses and the steps of optimizers
__all__ += ["dequantize", "einsum", "linear", "matmul", "outer", "quantized_linear"]
__all__ += ["tensordot", "vecdot"]
__all__ += ["attention", "avg_pool2d", "conv2d", "conv_transpose2d", "experts", "layernorm"]
__all__ += ["max_pool2d", "rmsnorm", "rope"]
__all__ += ["cross_entropy", "mean_squared_error", "update_adam", "update_lion", "update_sgd"]

for _name in __all__:
    # An op, and not a function of the same name that one of the modules imports.
    assert globals()[_name].__module__.startswith("anydevice._ops."), _name
    globals()[_name].__module__ = "anydevice.ops"


def namespace(x: Array) -> Any:
    """Return the namespace that array_api_compat has for an array, of the standard's functions.

    >>> namespace(numpy.ones(2)).cumulative_sum(numpy.ones(2)).tolist()
    [1.0, 2.0]
    """
    try:
        from array_api_compat import array_namespace

        return array_namespace(x)
    except ImportError:
        absent = Absent("array_api_compat is not installed", "pip install array-api-compat")
    except TypeError:
        absent = Absent(f"array_api_compat knows no {type_name(type(x))}", "use anydevice.ops")
    raise absent.error()


namespace.__module__ = "anydevice.ops"
_PAIRS = """
    absolute=abs amax=max amin=min cat=concat concatenate=concat cumsum=cumulative_sum
    gather=take_along_axis div=divide eq=equal ge=greater_equal gt=greater hstack=concat
    l2_norm=vector_norm le=less_equal lt=less mul=multiply ne=not_equal neg=negative
    norm=vector_norm rms_norm=rmsnorm layer_norm=layernorm scaled_dot_product_attention=attention
    sub=subtract take_along_dim=take_along_axis transpose=permute vstack=concat empty=zeros
    empty_like=zeros_like mod=remainder arccos=acos arcsin=asin arctan=atan unsqueeze=expand_dims
    unique=unique_values cumprod=cumulative_prod
"""
_ELSEWHERE = dict(pair.split("=") for pair in _PAIRS.split())
"""Names of NumPy and PyTorch, and ours for them."""


if not TYPE_CHECKING:  # type checkers would take it for a promise of any name

    def __getattr__(name: str) -> object:
        if name == "part":
            message = "ops.part is now ops.slice_axis; the old name goes in version 0.4"
            warn(DeprecationWarning(message))
            return slice_axis
        meant = _ELSEWHERE.get(name)
        hint = "" if meant is None else f"; did you mean ops.{meant}?"
        raise AttributeError(f"module 'anydevice.ops' has no attribute {name!r}{hint}")
