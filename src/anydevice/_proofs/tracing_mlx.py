"""What a module of MLX computes: the primitives of its graph, as MLX exports it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from anydevice._libraries.base import ModelAdapter, float64_scope, host_array, recording
from anydevice._proofs.graph import LoweredModel, refused
from anydevice._proofs.tracing import Fixed, Moving, Trace, Value, one_call
from anydevice.errors import UnsupportedError

Rule = Callable[..., Any]
Step = dict[str, Any]


def traced(adapter: ModelAdapter, shape: tuple[int, ...], *, classes: bool) -> LoweredModel:
    """The network of a module, for examples of a shape."""
    mx: Any = sys.modules["mlx.core"]
    module: Any = adapter.module  # type: ignore[attr-defined]
    mx.eval(module.parameters(), adapter.arguments)  # else the graph has how they are drawn, too
    with float64_scope("mlx"):
        steps = _exported(one_call(adapter, shape), mx.zeros((1, *shape)))
    try:
        return _lowered(steps, shape, type(module).__name__, classes=classes)
    except UnsupportedError as error:
        raise _placed(error, adapter, shape) from None


def _lowered(
    steps: list[Step], shape: tuple[int, ...], path: str, *, classes: bool
) -> LoweredModel:
    trace = Trace(shape)
    trace.graph.path = path
    return trace.result(_run(trace, steps), classes)


def _placed(
    error: UnsupportedError, adapter: ModelAdapter, shape: tuple[int, ...]
) -> UnsupportedError:
    """The error with the first part whose output cannot be lowered."""
    mx: Any = sys.modules["mlx.core"]
    parts = {path: part for path, part in adapter.module.named_modules() if path}  # type: ignore[attr-defined]
    outputs: list[tuple[str, Any]] = []

    def after(name: str, y: Any) -> Any:
        outputs.append((name, y))
        return y

    def up_to(number: int, x: Any) -> Any:
        outputs.clear()
        with recording(parts, after):
            adapter.call(adapter.arguments, x)
        return outputs[number][1]

    x = mx.zeros((1, *shape))
    up_to(0, x) if parts else None
    for number, (name, y) in enumerate(list(outputs)):
        if not isinstance(y, mx.array):
            return refused(name, "a module with several outputs")
        try:
            _lowered(_exported(partial(up_to, number), x), shape, name, classes=True)
        except UnsupportedError as placed:
            return placed
    return error


def _exported(call: Callable[[Any], Any], x: Any) -> list[Step]:
    """The inputs, constants, primitives and outputs of a function, in order."""
    mx: Any = sys.modules["mlx.core"]
    steps: list[Step] = []
    mx.export_function(lambda step: steps.append(dict(step)), call, x)
    return steps


def _run(trace: Trace, steps: list[Step]) -> Value:
    values: dict[str, Value] = {}
    output = ""
    for step in steps:
        if step["type"] == "inputs":
            values[step["inputs"][0][0]] = trace.input
        elif step["type"] == "outputs":
            if len(step["outputs"]) != 1:
                raise trace.refuse("a module with several outputs")
            output = step["outputs"][0][0]
        elif step["type"] == "constants":
            values |= {name: Fixed(host_array(value)) for name, value in step["constants"]}
        elif step["type"] == "primitive":
            given = [values[name] for name, _, _ in step["inputs"]]
            shapes = [tuple(size) for _, size, _ in step["outputs"]]
            names = [name for name, _, _ in step["outputs"]]
            values |= dict(zip(names, _made(trace, step, given, shapes), strict=True))
    return values[output]


def _made(trace: Trace, step: Step, given: list[Value], shapes: list[Any]) -> list[Value]:
    name = step["name"]
    if name not in _RULES:
        raise trace.refuse(f"MLX's {name}")
    result = _RULES[name](trace, *given, options=step["arguments"], shape=shapes[0])
    made = result if isinstance(result, list) else [result]
    for value, shape in zip(made, shapes, strict=True):
        if _shape(value) != shape:
            raise trace.refuse(f"this use of MLX's {name}")
    return made


def _shape(value: Value) -> tuple[int, ...]:
    return value.cells.shape if isinstance(value, Moving) else np.shape(value.value)


# Primitives: `options` are MLX's, `shape` is that of the first output


def _convolution(trace: Trace, a: Value, weight: Value, *, options: Any, shape: Any) -> Value:
    stride, low, high, dilation, spread, groups, flip = options
    if flip or any(each != 1 for each in spread):
        raise trace.refuse("a transposed convolution")
    image = trace.moved(lambda x: np.moveaxis(x, -1, 1), a)
    kernels = trace.moved(lambda x: np.moveaxis(x, -1, 1), weight)
    around = list(zip(low, high, strict=True))
    made = trace.convolution(image, kernels, None, stride, around, dilation, groups)
    return trace.moved(lambda x: np.moveaxis(x, 1, -1), made)


def _addmm(trace: Trace, a: Value, b: Value, c: Value, *, options: Any, shape: Any) -> Value:
    if list(options) != [1.0, 1.0]:
        raise trace.refuse("addmm with factors")
    return trace.add(trace.matmul(a, b), c)


def _reduced(trace: Trace, a: Value, *, options: Any, shape: Any) -> Value:
    kind, axes = options
    if kind == _SUM:
        return trace.total(a, axes, True)
    if kind == _MAX:
        return trace.largest(a, axes, True)
    raise trace.refuse("this reduction of MLX")


def _slice(trace: Trace, a: Value, *, options: Any, shape: Any) -> Value:
    cuts = tuple(map(slice, *options))
    return trace.moved(lambda x: x[cuts], a)


def _split(trace: Trace, a: Value, *, options: Any, shape: Any) -> list[Value]:
    edges, axis = options
    count = len(edges) + 1
    return [trace.moved(lambda x, at=at: np.split(x, edges, axis)[at], a) for at in range(count)]


def _pad(trace: Trace, a: Value, fill: Value, *, options: Any, shape: Any) -> Value:
    axes, low, high = options
    if not isinstance(fill, Fixed):
        raise trace.refuse("a padding that depends on the input")
    widths = [(0, 0)] * len(shape)
    for axis, before, after in zip(axes, low, high, strict=True):
        widths[axis] = before, after
    return trace.padded(a, widths, float(fill.value))


def _converted(trace: Trace, a: Value, *, options: Any, shape: Any) -> Value:
    (dtype,) = options
    if isinstance(a, Moving) and "float32" not in str(dtype) and "float64" not in str(dtype):
        raise trace.refuse(f"a conversion to {dtype}")
    return a


def _strided(trace: Trace, a: Value, *, options: Any, shape: Any) -> Value:
    """A view by strides, as poolings take it."""
    sizes, strides, offset = options
    places = np.full(tuple(sizes), int(offset))
    for axis, (size, step) in enumerate(zip(sizes, strides, strict=True)):
        along = [1] * len(sizes)
        along[axis] = size
        places = places + (np.arange(size) * int(step)).reshape(along)
    return trace.moved(lambda x: np.ascontiguousarray(x).reshape(-1)[places], a)


def _two(method: Callable[..., Value], **more: Any) -> Rule:
    return lambda trace, a, b, *, options, shape: method(trace, a, b, **more)


def _named(name: str) -> Rule:
    return lambda trace, a, *, options, shape: trace.function(name, a)


def _shaped(change: Callable[[Any, Any, Any], Any]) -> Rule:
    """What moves elements: `change` gets the array, the options and the shape of the output."""
    return lambda trace, a, *, options, shape: trace.moved(lambda x: change(x, options, shape), a)


def _same(trace: Trace, a: Value, *rest: Value, options: Any, shape: Any) -> Value:
    return a


def _roots(trace: Trace, a: Value, *, options: Any, shape: Any) -> Value:
    return trace.function("rsqrt", a) if options[0] else trace.sqrt(a)


def _joined(trace: Trace, *parts: Value, options: Any, shape: Any) -> Value:
    return trace.moved(lambda *xs: np.concatenate(xs, options[0]), *parts)


def _minus(trace: Trace, a: Value, b: Value, *, options: Any, shape: Any) -> Value:
    return trace.add(a, b, -1.0)


def _chosen(
    trace: Trace, where: Value, yes: Value, no: Value, *, options: Any, shape: Any
) -> Value:
    return trace.chosen(where, yes, no)


def _power(trace: Trace, a: Value, b: Value, *, options: Any, shape: Any) -> Value:
    exponent = set(np.asarray(b.value).flat) if isinstance(b, Fixed) else set()
    if exponent not in ({2}, {3}):
        raise trace.refuse("this power")
    return trace.cube(a) if exponent == {3} else trace.function("square", a)


_SUM, _MAX = 2, 5

_RULES: dict[str, Rule] = {
    "Abs": lambda trace, a, *, options, shape: trace.absolute(a),
    "Add": _two(Trace.add),
    "AddMM": _addmm,
    "AsStrided": _strided,
    "AsType": _converted,
    "Broadcast": _shaped(lambda x, options, shape: np.broadcast_to(x, shape)),
    "BroadcastAxes": _shaped(lambda x, options, shape: np.broadcast_to(x, shape)),
    "Concatenate": _joined,
    "Contiguous": _same,
    "Convolution": _convolution,
    "Copy": _same,
    "Divide": _two(Trace.divide),
    "Erf": lambda trace, a, *, options, shape: trace.erf(a),
    "Exp": _named("exp"),
    "ExpandDims": _shaped(lambda x, options, shape: x.reshape(shape)),
    "Flatten": _shaped(lambda x, options, shape: x.reshape(shape)),
    "Full": _same,
    "Greater": _two(Trace.compared, greater=True),
    "GreaterEqual": _two(Trace.compared, greater=True),
    "Less": _two(Trace.compared, greater=False),
    "LessEqual": _two(Trace.compared, greater=False),
    "Matmul": _two(Trace.matmul),
    "Maximum": _two(Trace.maximum),
    "Minimum": _two(Trace.minimum),
    "Multiply": _two(Trace.multiply),
    "Negative": lambda trace, a, *, options, shape: trace.multiply(a, Fixed(np.float64(-1.0))),
    "Pad": _pad,
    "Power": _power,
    "Reduce": _reduced,
    "Reshape": _shaped(lambda x, options, shape: x.reshape(shape)),
    "Select": _chosen,
    "Sigmoid": _named("sigmoid"),
    "Slice": _slice,
    "Softmax": lambda trace, a, *, options, shape: trace.softmax(a, -1),
    "Split": _split,
    "Sqrt": _roots,
    "Square": _named("square"),
    "Squeeze": _shaped(lambda x, options, shape: x.reshape(shape)),
    "StopGradient": _same,
    "Subtract": _minus,
    "Tanh": _named("tanh"),
    "Transpose": _shaped(lambda x, options, shape: x.transpose(options[0])),
    "Unflatten": _shaped(lambda x, options, shape: x.reshape(shape)),
}
"""How each primitive of MLX is lowered."""
