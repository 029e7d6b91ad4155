"""What a module of Flax NNX or Equinox computes: the primitives of its jaxpr."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import numpy as np

from anydevice._libraries.base import ModelAdapter, host_array, recording
from anydevice._proofs.graph import LoweredModel
from anydevice._proofs.tracing import FixedTensor, SymbolicTensor, Trace, Value, one_call

Rule = Callable[..., Any]


def traced(adapter: ModelAdapter, shape: tuple[int, ...], *, classes: bool) -> LoweredModel:
    """The network of a module, for examples of a shape."""
    jax: Any = sys.modules["jax"]
    x = jax.ShapeDtypeStruct((1, *shape), np.float32)
    module: Any = adapter.bound(adapter.arguments)  # type: ignore[attr-defined]
    parts = adapter._parts(module)  # type: ignore[attr-defined]
    call = one_call(adapter, shape, lambda x: adapter.run(module, x))  # type: ignore[attr-defined]
    with recording(parts, lambda name, y: y, lambda name: jax.named_scope(f"module {name}")):
        closed, outputs = jax.make_jaxpr(call, return_shape=True)(x)
    trace = Trace(shape)
    if len(jax.tree_util.tree_leaves(outputs)) != 1:
        raise trace.refuse("a module with several outputs")
    fixed = map(_constant, closed.consts)
    (y,) = _run(trace, closed.jaxpr, [*fixed, trace.input], type(module).__name__)
    return trace.result(y, classes)


def _constant(value: Any) -> Value:
    """A constant of a jaxpr: JAX 0.9 keeps arrays of NumPy in a class of its own."""
    jax: Any = sys.modules["jax"]
    return FixedTensor(host_array(value if isinstance(value, jax.Array) else np.asarray(value)))


def _run(trace: Trace, jaxpr: Any, given: list[Value], path: str) -> list[Value]:
    """The outputs of a jaxpr, whose constants come first."""
    names = dict(zip([*jaxpr.constvars, *jaxpr.invars], given, strict=True))

    def read(variable: Any) -> Value:
        return (
            FixedTensor(np.asarray(variable.val)) if hasattr(variable, "val") else names[variable]
        )

    for equation in jaxpr.eqns:
        taken = [read(each) for each in equation.invars]
        trace.graph.path = _path_of(str(equation.source_info.name_stack)) or path
        made = _step(trace, equation, taken, trace.graph.path)
        names.update(zip(equation.outvars, made, strict=True))
    return [read(each) for each in jaxpr.outvars]


def _path_of(scope: str) -> str:
    """The last module in a stack of names."""
    parts = [part for part in scope.split("/") if part.startswith("module ")]
    return parts[-1].removeprefix("module ") if parts else ""


def _step(trace: Trace, equation: Any, given: list[Value], path: str) -> list[Value]:
    name, options = equation.primitive.name, equation.params
    if all(isinstance(value, FixedTensor) for value in given) and not _is_ours(name, given):
        return _computed(equation, given)
    inner = options.get("jaxpr", options.get("call_jaxpr"))
    if inner is not None and name in _CALLS:
        body = getattr(inner, "jaxpr", inner)
        fixed = map(_constant, getattr(inner, "consts", ()))
        return _run(trace, body, [*fixed, *given], path)
    if name not in _RULES:
        raise trace.refuse(f"JAX's {name}")
    made = _RULES[name](trace, *given, **options)
    return made if isinstance(made, list) else [made]


def _is_ours(name: str, given: list[Value]) -> bool:
    """Whether fixed numbers are computed here, in float64, and not by JAX."""
    floats = all(
        isinstance(x, FixedTensor) and np.asarray(x.value).dtype.kind == "f" for x in given
    )
    return floats and name in _FIXED


def _computed(equation: Any, given: list[Value]) -> list[Value]:
    """What does not depend on the input, computed by JAX; its roundings are counted."""
    off = max([value.off for value in given if isinstance(value, FixedTensor)], default=0.0)
    values = [value.value for value in given if isinstance(value, FixedTensor)]
    jax: Any = sys.modules["jax"]
    arrays = [
        jax.numpy.asarray(value, each.aval.dtype)
        for value, each in zip(values, equation.invars, strict=True)
    ]
    made = equation.primitive.bind(*arrays, **equation.params)
    results = made if equation.primitive.multiple_results else [made]
    grown = off if equation.primitive.name in _EXACT else off * 4 + 2.0**-20
    return [FixedTensor(host_array(each), grown) for each in results]


def _dot(trace: Trace, a: Value, b: Value, *, dimension_numbers: Any, **options: Any) -> Value:
    (a_sums, b_sums), (a_batch, b_batch) = [
        [list(map(int, each)) for each in pair] for pair in dimension_numbers
    ]
    first, a_free = _arranged(trace, a, a_batch, a_sums, True)
    second, b_free = _arranged(trace, b, b_batch, b_sums, False)
    shape = _shape(a)
    batch = [shape[axis] for axis in a_batch]
    made = trace.matmul(first, second)
    return trace.moved(lambda x: x.reshape(*batch, *a_free, *b_free), made)


def _arranged(
    trace: Trace, value: Value, batch: list[int], sums: list[int], sums_last: bool
) -> tuple[Value, list[int]]:
    """As (batch, free, sums) or (batch, sums, free); without a batch axis where there is none."""
    shape = _shape(value)
    free = [axis for axis in range(len(shape)) if axis not in batch and axis not in sums]
    order = [*batch, *free, *sums] if sums_last else [*batch, *sums, *free]
    sizes = [prod([shape[axis] for axis in axes]) for axes in (free, sums)]
    pair = sizes if sums_last else sizes[::-1]
    lead = [prod([shape[axis] for axis in batch])] if batch else []
    made = trace.moved(lambda x: x.transpose(order).reshape(*lead, *pair), value)
    return made, [shape[axis] for axis in free]


def _convolution(
    trace: Trace,
    a: Value,
    weight: Value,
    *,
    window_strides: Any,
    padding: Any,
    lhs_dilation: Any,
    rhs_dilation: Any,
    dimension_numbers: Any,
    feature_group_count: int,
    batch_group_count: int,
    **options: Any,
) -> Value:
    if any(each != 1 for each in lhs_dilation) or batch_group_count != 1:
        raise trace.refuse("a transposed convolution")
    own, kernels, out = dimension_numbers
    image = trace.moved(lambda x: x.transpose(own), a)
    turned = trace.moved(lambda x: x.transpose(kernels), weight)
    around = [(int(low), int(high)) for low, high in padding]
    if any(min(each) < 0 for each in around):
        raise trace.refuse("a padding that cuts")
    made = trace.convolution(
        image, turned, None, window_strides, around, rhs_dilation, feature_group_count
    )
    return trace.moved(lambda x: x.transpose(np.argsort(out)), made)


def _window(
    trace: Trace,
    a: Value,
    *,
    largest: bool,
    window_dimensions: Any,
    window_strides: Any,
    padding: Any,
    base_dilation: Any,
    window_dilation: Any,
) -> Value:
    if any(each != 1 for each in base_dilation):
        raise trace.refuse("a pooling that spreads its input")
    found = trace.windows(a, window_dimensions, window_strides, padding, window_dilation)
    return SymbolicTensor(trace.graph.largest(found) if largest else trace.graph.total(found))


def _pad(trace: Trace, a: Value, fill: Value, *, padding_config: Any, **options: Any) -> Value:
    widths = [(int(low), int(high)) for low, high, _ in padding_config]
    if any(inner for _, _, inner in padding_config) or min(map(min, widths)) < 0:
        raise trace.refuse("a padding that cuts or spreads")
    if not isinstance(fill, FixedTensor):
        raise trace.refuse("a padding that depends on the input")
    return trace.padded(a, widths, float(fill.value))


def _broadcast(
    trace: Trace, a: Value, *, shape: Any, broadcast_dimensions: Any, **more: Any
) -> Value:
    def grown(x: Any) -> Any:
        sizes = [1] * len(shape)
        for axis, size in zip(broadcast_dimensions, x.shape, strict=True):
            sizes[axis] = size
        return np.broadcast_to(x.reshape(sizes), shape)

    return trace.moved(grown, a)


def _slice(
    trace: Trace, a: Value, *, start_indices: Any, limit_indices: Any, strides: Any
) -> Value:
    steps = strides or (1,) * len(start_indices)
    cuts = tuple(map(slice, start_indices, limit_indices, steps))
    return trace.moved(lambda x: x[cuts], a)


def _dynamic_slice(trace: Trace, a: Value, *starts: Value, slice_sizes: Any, **more: Any) -> Value:
    if not all(isinstance(each, FixedTensor) for each in starts):
        raise trace.refuse("an index that depends on the input")
    shape = _shape(a)
    first = [
        min(max(int(each.value), 0), have - size)  # type: ignore[union-attr]
        for each, have, size in zip(starts, shape, slice_sizes, strict=True)
    ]
    cuts = tuple(slice(at, at + size) for at, size in zip(first, slice_sizes, strict=True))
    return trace.moved(lambda x: x[cuts], a)


def _gather(trace: Trace, a: Value, indices: Value, **options: Any) -> Value:
    """Elements at fixed indices: JAX says which, of an array that holds its own positions."""
    if not isinstance(indices, FixedTensor):
        raise trace.refuse("an index that depends on the input")
    jax: Any = sys.modules["jax"]
    shape = _shape(a)
    positions = np.arange(prod(shape), dtype=np.int32).reshape(shape)
    options["fill_value"] = -1
    found = np.asarray(jax.lax.gather_p.bind(positions, np.asarray(indices.value), **options))
    if np.any(found < 0):
        raise trace.refuse("an index outside of its array")
    return trace.moved(lambda x: x.reshape(-1)[found], a)


def _split(trace: Trace, a: Value, *, sizes: Any, axis: int) -> list[Value]:
    edges = np.cumsum(sizes)[:-1]
    return [
        trace.moved(lambda x, at=at: np.split(x, edges, axis)[at], a) for at in range(len(sizes))
    ]


def _power(trace: Trace, a: Value, *, y: int, **options: Any) -> Value:
    if y not in (2, 3):
        raise trace.refuse(f"a power of {y}")
    return trace.function("square", a) if y == 2 else trace.cube(a)


def _select(trace: Trace, where: Value, *cases: Value, **options: Any) -> Value:
    if len(cases) != 2:
        raise trace.refuse("a choice between more than two")
    return trace.chosen(where, cases[1], cases[0])


def _converted(trace: Trace, a: Value, *, new_dtype: Any, **more: Any) -> Value:
    if str(np.dtype(new_dtype)) not in ("float32", "float64"):
        raise trace.refuse(f"a conversion to {np.dtype(new_dtype)}")
    return a


def _shape(value: Value) -> tuple[int, ...]:
    return value.cells.shape if isinstance(value, SymbolicTensor) else np.shape(value.value)


def _reduced(trace: Trace, a: Value, *, axes: Any, largest: bool = False, **more: Any) -> Value:
    chosen = list(map(int, axes))
    return trace.largest(a, chosen, False) if largest else trace.total(a, chosen, False)


def _named(name: str) -> Rule:
    return lambda trace, a, **options: trace.function(name, a)


def _same(trace: Trace, a: Value, **options: Any) -> Value:
    return a


_CALLS = (
    "pjit",
    "jit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "remat",
    "remat2",
    "checkpoint",
)
_FIXED = (
    "add",
    "sub",
    "mul",
    "div",
    "neg",
    "rsqrt",
    "sqrt",
    "square",
    "reshape",
    "transpose",
    "broadcast_in_dim",
    "squeeze",
)
_EXACT = (
    "reshape",
    "transpose",
    "broadcast_in_dim",
    "squeeze",
    "convert_element_type",
    "slice",
    "concatenate",
    "copy",
    "stop_gradient",
    "iota",
    "neg",
    "expand_dims",
    "rev",
)
"""What moves numbers without rounding them."""

_RULES: dict[str, Rule] = {
    "abs": lambda trace, a, **options: trace.absolute(a),
    "add": lambda trace, a, b, **options: trace.add(a, b),
    "add_any": lambda trace, a, b, **options: trace.add(a, b),
    "broadcast_in_dim": _broadcast,
    "clamp": lambda trace, low, a, high, **options: trace.minimum(trace.maximum(a, low), high),
    "concatenate": lambda trace, *parts, dimension, **options: trace.moved(
        lambda *xs: np.concatenate(xs, dimension), *parts
    ),
    "conv_general_dilated": _convolution,
    "convert_element_type": _converted,
    "copy": _same,
    "copy_p": _same,
    "div": lambda trace, a, b, **options: trace.divide(a, b),
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "erf": lambda trace, a, **options: trace.erf(a),
    "erfc": lambda trace, a, **options: trace.erf(a, complement=True),
    "exp": lambda trace, a, **options: trace.function("exp", a),
    "gather": _gather,
    "ge": lambda trace, a, b, **options: trace.compared(a, b, greater=True),
    "gt": lambda trace, a, b, **options: trace.compared(a, b, greater=True),
    "integer_pow": _power,
    "le": lambda trace, a, b, **options: trace.compared(a, b, greater=False),
    "logistic": _named("sigmoid"),
    "log": lambda trace, a, **options: trace.log(a),
    "lt": lambda trace, a, b, **options: trace.compared(a, b, greater=False),
    "max": lambda trace, a, b, **options: trace.maximum(a, b),
    "min": lambda trace, a, b, **options: trace.minimum(a, b),
    "mul": lambda trace, a, b, **options: trace.multiply(a, b),
    "neg": lambda trace, a, **options: trace.multiply(a, FixedTensor(np.float64(-1.0))),
    "pad": _pad,
    "reduce_max": partial(_reduced, largest=True),
    "reduce_sum": _reduced,
    "reduce_window_max": partial(_window, largest=True),
    "reduce_window_sum": partial(_window, largest=False),
    "reshape": lambda trace, a, *, new_sizes, **options: trace.moved(
        lambda x: x.reshape(new_sizes), a
    ),
    "rev": lambda trace, a, *, dimensions, **options: trace.moved(
        lambda x: np.flip(x, dimensions), a
    ),
    "rsqrt": _named("rsqrt"),
    "select_n": _select,
    "slice": _slice,
    "split": _split,
    "sqrt": lambda trace, a, **options: trace.sqrt(a),
    "square": _named("square"),
    "squeeze": lambda trace, a, *, dimensions, **options: trace.moved(
        lambda x: np.squeeze(x, tuple(dimensions)), a
    ),
    "stop_gradient": _same,
    "sub": lambda trace, a, b, **options: trace.add(a, b, -1.0),
    "tanh": _named("tanh"),
    "transpose": lambda trace, a, *, permutation, **options: trace.moved(
        lambda x: x.transpose(permutation), a
    ),
}
"""How each primitive of JAX is lowered."""
