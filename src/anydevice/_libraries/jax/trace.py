"""Traces a module of Flax NNX or Equinox: the primitives of its jaxpr, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from anydevice._core.protocols import FixedTensor, Windows
from anydevice._core.protocols import TracedTensor as Traced
from anydevice._libraries.base import ModelAdapter, host_array, recording
from anydevice._libraries.jax.module import EquinoxAdapter, JaxAdapter

if TYPE_CHECKING:
    from anydevice._proofs.tracing import NetworkTrace as Trace

Rule = Callable[..., Any]
Sizes = Sequence[int]


def trace_output(adapter: ModelAdapter, trace: Trace, shape: tuple[int, ...]) -> Traced:
    """Make the jaxpr of a module for one example of a shape, and return its traced output."""
    assert isinstance(adapter, JaxAdapter)
    module = adapter.bound(adapter.arguments)
    call = _call_one(adapter, shape, lambda x: adapter.run(module, x))
    with recording(
        adapter._parts(module),
        lambda name, y: y,
        lambda name: jax.named_scope(f"module {name}"),
    ):
        x = jax.ShapeDtypeStruct((1, *shape), np.float32)
        closed, outputs = jax.make_jaxpr(call, return_shape=True)(x)
    if len(jax.tree_util.tree_leaves(outputs)) != 1:
        raise trace.refuse("a module with several outputs")
    fixed = map(_constant, closed.consts)
    (y,) = _run(trace, closed.jaxpr, [*fixed, trace.input], adapter.name)
    return y


def batch_call(adapter: ModelAdapter, shape: tuple[int, ...]) -> Callable[..., Any]:
    """Return the module as a compiled function of a batch of one example."""
    call = partial(adapter.call, adapter.arguments)
    return jax.jit(_call_one(adapter, shape, call))


def _call_one(
    adapter: ModelAdapter, shape: tuple[int, ...], call: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function of a batch of one, even if the module takes a single example."""

    def single(x: Any) -> Any:
        return call(x[0])[None]

    if not isinstance(adapter, EquinoxAdapter):
        return call
    dtype = adapter.arguments[0].dtype if adapter.arguments else np.float32
    try:
        jax.eval_shape(single, jax.ShapeDtypeStruct((1, *shape), dtype))
    except Exception:  # a module may raise anything for inputs that it does not accept
        return call
    return single


def _constant(value: Any) -> FixedTensor:
    """Return a constant of a jaxpr; JAX 0.9 wraps NumPy arrays in its own class."""
    return FixedTensor(host_array(value if isinstance(value, jax.Array) else np.asarray(value)))


def _run(trace: Trace, jaxpr: Any, inputs: list[Traced], path: str) -> list[Traced]:
    """Trace the equations of a jaxpr; its constants come first among the inputs."""
    tensors: dict[Any, Traced] = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))

    def read(variable: Any) -> Traced:
        if hasattr(variable, "val"):
            return FixedTensor(np.asarray(variable.val))
        if variable not in tensors:
            raise trace.refuse("random numbers")
        return tensors[variable]

    for equation in jaxpr.eqns:
        if any(_is_key(x) for x in equation.outvars):  # a dropout in inference uses none
            continue
        scopes = str(equation.source_info.name_stack).split("/")
        modules = [scope for scope in scopes if scope.startswith("module ")]
        trace.path = modules[-1].removeprefix("module ") if modules else path
        results = _trace_equation(trace, equation, [read(x) for x in equation.invars], trace.path)
        tensors.update(zip(equation.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _is_key(variable: Any) -> bool:
    return bool(jax.dtypes.issubdtype(variable.aval.dtype, jax.dtypes.prng_key))


def _trace_equation(trace: Trace, equation: Any, inputs: list[Traced], path: str) -> list[Traced]:
    name, options = equation.primitive.name, equation.params
    fixed = [x for x in inputs if isinstance(x, FixedTensor)]
    if len(fixed) == len(inputs):
        floats = all(x.value.dtype.kind == "f" for x in fixed)
        if not (floats and name in _FLOAT64):
            return _compute(equation, fixed)
    inner = options.get("jaxpr", options.get("call_jaxpr"))
    if inner is not None and name in _CALLS:
        body = getattr(inner, "jaxpr", inner)
        constants = map(_constant, getattr(inner, "consts", ()))
        return _run(trace, body, [*constants, *inputs], path)
    if name not in _RULES:
        raise trace.refuse(f"JAX's {name}")
    results = _RULES[name](trace, *inputs, **options)
    return results if isinstance(results, list) else [results]


def _compute(equation: Any, inputs: list[FixedTensor]) -> list[Traced]:
    """Let JAX compute values that do not depend on the input, and count their roundings."""
    off = max([x.off for x in inputs], default=0.0)
    arrays = [
        jax.numpy.asarray(x.value, variable.aval.dtype)
        for x, variable in zip(inputs, equation.invars, strict=True)
    ]
    results = equation.primitive.bind(*arrays, **equation.params)
    if not equation.primitive.multiple_results:
        results = [results]
    off = off if equation.primitive.name in _EXACT else off * 4 + 2.0**-20
    return [FixedTensor(host_array(result), off) for result in results]


def _dot(trace: Trace, a: Traced, b: Traced, *, dimension_numbers: Any, **_: Any) -> Traced:
    (a_sums, b_sums), (a_batch, b_batch) = [
        [list(map(int, axes)) for axes in pair] for pair in dimension_numbers
    ]
    first, a_free = _as_matrices(trace, a, a_batch, a_sums, True)
    second, b_free = _as_matrices(trace, b, b_batch, b_sums, False)
    batch = [a.shape[axis] for axis in a_batch]
    return trace.rearrange(
        lambda x: x.reshape(*batch, *a_free, *b_free), trace.matmul(first, second)
    )


def _as_matrices(
    trace: Trace, a: Traced, batch: list[int], sums: list[int], sums_last: bool
) -> tuple[Traced, list[int]]:
    """Reshape to (batch, free, sums) or (batch, sums, free); no batch axis if `batch` is empty."""
    free = [axis for axis in range(len(a.shape)) if axis not in batch and axis not in sums]
    order = [*batch, *free, *sums] if sums_last else [*batch, *sums, *free]
    sizes = [prod([a.shape[axis] for axis in axes]) for axes in (free, sums)]
    pair = sizes if sums_last else sizes[::-1]
    lead = [prod([a.shape[axis] for axis in batch])] if batch else []
    matrices = trace.rearrange(lambda x: x.transpose(order).reshape(*lead, *pair), a)
    return matrices, [a.shape[axis] for axis in free]


def _convolution(
    trace: Trace,
    a: Traced,
    weight: Traced,
    *,
    window_strides: Sizes,
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sizes,
    rhs_dilation: Sizes,
    dimension_numbers: Any,
    feature_group_count: int,
    batch_group_count: int,
    **_: Any,
) -> Traced:
    if any(step != 1 for step in lhs_dilation) or batch_group_count != 1:
        raise trace.refuse("a transposed convolution")
    image_axes, kernel_axes, output_axes = dimension_numbers
    image = trace.rearrange(lambda x: x.transpose(image_axes), a)
    kernels = trace.rearrange(lambda x: x.transpose(kernel_axes), weight)
    widths = [(int(low), int(high)) for low, high in padding]
    if any(min(pair) < 0 for pair in widths):
        raise trace.refuse("a padding that cuts")
    windows = Windows(window_strides, widths, rhs_dilation)
    y = trace.convolution(image, kernels, None, windows, feature_group_count)
    return trace.rearrange(lambda x: x.transpose(np.argsort(output_axes)), y)


def _window(
    trace: Trace,
    a: Traced,
    *,
    kind: Any,
    window_dimensions: Sizes,
    window_strides: Sizes,
    padding: Sequence[tuple[int, int]],
    base_dilation: Sizes,
    window_dilation: Sizes,
) -> Traced:
    if any(step != 1 for step in base_dilation):
        raise trace.refuse("a pooling that spreads its input")
    windows = Windows(window_strides, padding, window_dilation)
    return trace.pool(kind, a, window_dimensions, windows)


def _pad(trace: Trace, a: Traced, fill: Traced, *, padding_config: Any, **_: Any) -> Traced:
    widths = [(int(low), int(high)) for low, high, _ in padding_config]
    if any(inner for _, _, inner in padding_config) or min(map(min, widths)) < 0:
        raise trace.refuse("a padding that cuts or spreads")
    if not isinstance(fill, FixedTensor):
        raise trace.refuse("a padding that depends on the input")
    return trace.pad(a, widths, float(fill.value))


def _broadcast(
    trace: Trace, a: Traced, *, shape: Sizes, broadcast_dimensions: Sizes, **_: Any
) -> Traced:
    sizes = [1] * len(shape)
    for axis, size in zip(broadcast_dimensions, a.shape, strict=True):
        sizes[axis] = size
    return trace.rearrange(lambda x: np.broadcast_to(x.reshape(sizes), shape), a)


def _slice(
    trace: Trace, a: Traced, *, start_indices: Sizes, limit_indices: Sizes, strides: Sizes | None
) -> Traced:
    steps = strides or (1,) * len(start_indices)
    index = tuple(map(slice, start_indices, limit_indices, steps))
    return trace.rearrange(lambda x: x[index], a)


def _dynamic_slice(
    trace: Trace, a: Traced, *starts: Traced, slice_sizes: Sizes, **_: Any
) -> Traced:
    index = []
    for start, length, size in zip(starts, a.shape, slice_sizes, strict=True):
        if not isinstance(start, FixedTensor):
            raise trace.refuse("an index that depends on the input")
        first = min(max(int(start.value), 0), length - size)
        index.append(slice(first, first + size))
    return trace.rearrange(lambda x: x[tuple(index)], a)


def _gather(trace: Trace, a: Traced, indices: Traced, **options: Any) -> Traced:
    """Trace elements at fixed indices: JAX gathers from an array of positions."""
    if not isinstance(indices, FixedTensor):
        raise trace.refuse("an index that depends on the input")
    positions = np.arange(prod(a.shape), dtype=np.int32).reshape(a.shape)
    options["fill_value"] = -1
    index = np.asarray(jax.lax.gather_p.bind(positions, np.asarray(indices.value), **options))
    if np.any(index < 0):
        raise trace.refuse("an index outside of its array")
    return trace.rearrange(lambda x: x.reshape(-1)[index], a)


def _split_axis(trace: Trace, a: Traced, *, sizes: Sizes, axis: int) -> list[Traced]:
    edges = np.cumsum(sizes)[:-1]
    return [
        trace.rearrange(lambda x, part=part: np.split(x, edges, axis)[part], a)
        for part in range(len(sizes))
    ]


def _power(trace: Trace, a: Traced, *, y: int, **_: Any) -> Traced:
    if y not in (2, 3):
        raise trace.refuse(f"a power of {y}")
    return trace.function("square", a) if y == 2 else trace.cube(a)


def _select(trace: Trace, where: Traced, *cases: Traced, **_: Any) -> Traced:
    if len(cases) != 2:
        raise trace.refuse("a choice between more than two")
    return trace.select(where, cases[1], cases[0])


def _convert(trace: Trace, a: Traced, *, new_dtype: Any, **_: Any) -> Traced:
    if str(np.dtype(new_dtype)) not in ("float32", "float64"):
        raise trace.refuse(f"a conversion to {np.dtype(new_dtype)}")
    return a


def _function(name: str) -> Rule:
    return lambda trace, a, **_: trace.function(name, a)


def _identity(trace: Trace, a: Traced, **_: Any) -> Traced:
    return a


_CALLS = {"pjit", "jit", "closed_call", "core_call", "remat", "remat2", "checkpoint"}
_CALLS |= {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
"""Primitives that run another jaxpr."""
_SHAPES = {"reshape", "transpose", "broadcast_in_dim", "squeeze"}
_FLOAT64 = {"add", "sub", "mul", "div", "neg", "rsqrt", "sqrt", "square"} | _SHAPES
"""Primitives that are computed here in float64, even if all inputs are fixed."""
_EXACT = {"convert_element_type", "slice", "concatenate", "copy", "expand_dims", "rev"} | _SHAPES
_EXACT |= {"stop_gradient", "iota", "neg"}
"""Primitives without rounding."""

_RULES: dict[str, Rule] = {
    "abs": lambda trace, a, **_: trace.absolute(a),
    "add": lambda trace, a, b, **_: trace.add(a, b),
    "add_any": lambda trace, a, b, **_: trace.add(a, b),
    "broadcast_in_dim": _broadcast,
    "clamp": lambda trace, low, a, high, **_: trace.minimum(trace.maximum(a, low), high),
    "concatenate": lambda trace, *parts, dimension, **_: trace.rearrange(
        lambda *xs: np.concatenate(xs, dimension), *parts
    ),
    "conv_general_dilated": _convolution,
    "convert_element_type": _convert,
    "copy": _identity,
    "copy_p": _identity,
    "div": lambda trace, a, b, **_: trace.divide(a, b),
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "erf": lambda trace, a, **_: trace.erf(a),
    "erfc": lambda trace, a, **_: trace.erf(a, complement=True),
    "exp": _function("exp"),
    "gather": _gather,
    "ge": lambda trace, a, b, **_: trace.compare(a, b, greater=True),
    "gt": lambda trace, a, b, **_: trace.compare(a, b, greater=True),
    "integer_pow": _power,
    "le": lambda trace, a, b, **_: trace.compare(a, b, greater=False),
    "logistic": _function("sigmoid"),
    "log": lambda trace, a, **_: trace.log(a),
    "lt": lambda trace, a, b, **_: trace.compare(a, b, greater=False),
    "max": lambda trace, a, b, **_: trace.maximum(a, b),
    "min": lambda trace, a, b, **_: trace.minimum(a, b),
    "mul": lambda trace, a, b, **_: trace.multiply(a, b),
    "neg": lambda trace, a, **_: trace.multiply(a, trace.constant(-1.0)),
    "pad": _pad,
    "reduce_max": lambda trace, a, *, axes, **_: trace.largest(a, axes, False),
    "reduce_sum": lambda trace, a, *, axes, **_: trace.sum(a, axes, False),
    "reduce_window_max": partial(_window, kind="max"),
    "reduce_window_sum": partial(_window, kind="sum"),
    "reshape": lambda trace, a, *, new_sizes, **_: trace.rearrange(
        lambda x: x.reshape(new_sizes), a
    ),
    "rev": lambda trace, a, *, dimensions, **_: trace.rearrange(
        lambda x: np.flip(x, dimensions), a
    ),
    "rsqrt": _function("rsqrt"),
    "select_n": _select,
    "slice": _slice,
    "split": _split_axis,
    "sqrt": lambda trace, a, **_: trace.sqrt(a),
    "square": _function("square"),
    "squeeze": lambda trace, a, *, dimensions, **_: trace.rearrange(
        lambda x: np.squeeze(x, tuple(dimensions)), a
    ),
    "stop_gradient": _identity,
    "sub": lambda trace, a, b, **_: trace.add(a, b, -1.0),
    "tanh": _function("tanh"),
    "transpose": lambda trace, a, *, permutation, **_: trace.rearrange(
        lambda x: x.transpose(permutation), a
    ),
}
"""The rule of each supported primitive of JAX."""
