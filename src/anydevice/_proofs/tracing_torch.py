"""What a module of PyTorch computes: its primitives are seen as it runs once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np

from anydevice._libraries.base import ModelAdapter, host_array
from anydevice._proofs.graph import LoweredModel, scale_of_norm
from anydevice._proofs.tracing import FixedTensor, SymbolicTensor, Trace, Value

Op = Callable[..., Any]
_READERS = ("tolist", "numpy", "__array__", "__dlpack__")
"""How a program gets at the numbers of a tensor without a primitive."""


def traced(adapter: ModelAdapter, shape: tuple[int, ...], *, classes: bool) -> LoweredModel:
    """The network of a module, for examples of a shape."""
    torch: Any = sys.modules["torch"]
    module: Any = adapter.module  # type: ignore[attr-defined]
    weights = [x for x in module.parameters() if x.is_floating_point()]
    like = weights[0] if weights else torch.zeros(())
    x = torch.zeros((1, *shape), dtype=like.dtype, device=like.device)
    trace = Trace(shape)
    watcher = _Watcher(trace, x)
    with ExitStack() as blocks:
        for path, part in module.named_modules():
            name = f"{path} {type(part).__name__}".strip()
            blocks.enter_context(_path_in(part, name, trace))
        blocks.enter_context(_plain_attention())
        blocks.enter_context(torch.no_grad())
        blocks.enter_context(watcher.reading())
        blocks.enter_context(watcher.mode())
        y = module(x)
    if not isinstance(y, torch.Tensor):
        raise trace.refuse(f"a module whose output is a {type(y).__name__}")
    return trace.result(watcher.value_of(y), classes)


@contextmanager
def _path_in(part: Any, name: str, trace: Trace) -> Iterator[None]:
    """A block in which the trace knows which module is running."""
    before: list[str] = []

    def enter(*given: Any) -> None:
        before.append(trace.graph.path)
        trace.graph.path = name

    def leave(*given: Any) -> None:
        trace.graph.path = before.pop()

    hooks = part.register_forward_pre_hook(enter), part.register_forward_hook(leave)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _plain_attention() -> Iterator[None]:
    """A block in which attention is computed by products and a softmax."""
    torch: Any = sys.modules["torch"]
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class _Watcher:
    """Sees each primitive and keeps the value of each tensor that depends on the input."""

    def __init__(self, trace: Trace, x: Any) -> None:
        self.trace = trace
        # Tensors are kept, so that no other one gets their identity or their memory.
        self._values: dict[int, tuple[Any, Value | None]] = {id(x): (x, trace.input)}
        self._memory = {_memory_of(x)}

    def mode(self) -> Any:
        from torch.utils._python_dispatch import TorchDispatchMode

        watcher = self

        class Mode(TorchDispatchMode):  # type: ignore[misc]
            def __torch_dispatch__(
                self, op: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                return watcher.seen(op, args, kwargs or {})

        return Mode()

    def reading(self) -> Any:
        """A block in which numbers that depend on the input are not read: they are not seen."""
        from torch.overrides import TorchFunctionMode

        torch: Any = sys.modules["torch"]
        readers = [getattr(torch.Tensor, name) for name in _READERS]
        watcher = self

        class Mode(TorchFunctionMode):  # type: ignore[misc]
            def __torch_function__(
                self, function: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if function in readers and isinstance(watcher.value_of(args[0]), SymbolicTensor):
                    raise watcher.trace.refuse(f"Tensor.{function.__name__}")
                return function(*args, **(kwargs or {}))

        return Mode()

    def seen(self, op: Any, args: Any, named: dict[str, Any]) -> Any:
        result = op(*args, **named)
        tensors = [x for x in _flat([args, named]) if self._is_tensor(x)]
        if not any(id(x) in self._values for x in tensors):
            return result
        name = op.overloadpacket.__name__ if hasattr(op, "overloadpacket") else str(op)
        inplace = name.endswith("_") and not name.endswith("__")
        known = _OPS.get(name.removesuffix("_") if inplace else name)
        if known is None:
            raise self.trace.refuse(f"aten.{name}")
        taken = _mapped(args, self._taken), _mapped(named, self._taken)
        try:
            made = known(self.trace, *taken[0], **taken[1])
        except TypeError as error:  # an argument that the rule does not have
            raise self.trace.refuse(f"this use of aten.{name}") from error
        if inplace:
            self._forget_views(args[0])
        for tensor, value in zip(_flat([result]), _flat([made]), strict=False):
            if self._is_tensor(tensor) and value is not None:
                self._keep(tensor, value, name)
        return result

    def value_of(self, tensor: Any) -> Value:
        if id(tensor) in self._values:
            _, value = self._values[id(tensor)]
            if value is None:
                raise self.trace.refuse("a tensor that was changed in place through another one")
            return value
        if tensor.numel() and _memory_of(tensor) in self._memory:
            raise self.trace.refuse("a tensor that shares its memory with one that was computed")
        return FixedTensor(host_array(tensor.detach()))

    def _taken(self, x: Any) -> Any:
        return self.value_of(x) if self._is_tensor(x) else x

    def _keep(self, tensor: Any, value: Value, name: str) -> None:
        shape = value.cells.shape if isinstance(value, SymbolicTensor) else np.shape(value.value)
        if tuple(tensor.shape) != shape:
            raise self.trace.refuse(f"this use of aten.{name}")
        self._values[id(tensor)] = tensor, value
        self._memory.add(_memory_of(tensor))

    def _forget_views(self, changed: Any) -> None:
        memory = _memory_of(changed)
        for key, (tensor, _) in list(self._values.items()):
            if tensor is not changed and _memory_of(tensor) == memory:
                self._values[key] = tensor, None

    @staticmethod
    def _is_tensor(x: Any) -> bool:
        return isinstance(x, sys.modules["torch"].Tensor)


def _memory_of(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _flat(values: Any) -> list[Any]:
    if isinstance(values, FixedTensor | SymbolicTensor):
        return [values]
    if isinstance(values, dict):
        return [x for value in values.values() for x in _flat(value)]
    if isinstance(values, list | tuple):
        return [x for value in values for x in _flat(value)]
    return [values]


def _mapped(values: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(values, dict):
        return {name: _mapped(value, change) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)([_mapped(value, change) for value in values])
    return change(values)


# Primitives


def _number(x: Any) -> Value:
    return x if isinstance(x, FixedTensor | SymbolicTensor) else FixedTensor(np.float64(x))


def _add(trace: Trace, a: Any, b: Any, alpha: float = 1, sign: float = 1) -> Value:
    first, second = _number(a), _number(b)
    return trace.add(first, second, sign * alpha)


def _addmm(
    trace: Trace, bias: Value, a: Value, b: Value, *, beta: float = 1, alpha: float = 1
) -> Value:
    if beta != 1 or alpha != 1:
        raise trace.refuse("addmm with factors")
    return _linear_of(trace, a, b, bias)


def _linear_of(trace: Trace, a: Value, b: Value, bias: Value | None) -> Value:
    """A product with its bias in one node, where the weights are fixed."""
    if isinstance(a, SymbolicTensor) and isinstance(b, FixedTensor) and np.ndim(b.value) == 2:
        offset = np.asarray(0.0 if bias is None else getattr(bias, "value", None), np.float64)
        if bias is None or (isinstance(bias, FixedTensor) and offset.ndim == 1):
            weight = np.asarray(b.value, np.float64).T
            shift = np.broadcast_to(offset, (len(weight),))
            extra = int((weight.astype(np.float32) != weight).any())
            return SymbolicTensor(trace.graph.dense(a.cells, weight, shift, extra, b.off))
    made = trace.matmul(a, b)
    return made if bias is None else trace.add(made, bias)


def _linear(trace: Trace, a: Value, weight: Value, bias: Value | None = None) -> Value:
    turned = trace.moved(lambda x: np.swapaxes(x, 0, 1), weight)
    return _linear_of(trace, a, turned, bias)


def _convolution(
    trace: Trace,
    a: Value,
    weight: Value,
    bias: Value | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *rest: Any,
) -> Value:
    if transposed:
        raise trace.refuse("a transposed convolution")
    axes = len(np.shape(weight.value)) - 2 if isinstance(weight, FixedTensor) else len(stride)
    steps, around, spread = [_all(each, axes) for each in (stride, padding, dilation)]
    return trace.convolution(
        a, weight, bias, steps, [(each, each) for each in around], spread, groups
    )


def _all(value: Any, axes: int) -> list[int]:
    given = [value] if isinstance(value, int) else list(value)
    return given * axes if len(given) == 1 else given


def _max_pool(
    trace: Trace,
    a: Value,
    size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> list[Any]:
    if ceil_mode:
        raise trace.refuse("ceil_mode")
    axes = 1 if len(size) == 1 and isinstance(a, SymbolicTensor) and a.cells.ndim == 3 else 2
    window, around, spread = _all(size, axes), _all(padding, axes), _all(dilation, axes)
    steps = _all(stride, axes) if len(stride) else window
    found = trace.windows(a, window, steps, [(each, each) for each in around], spread)
    return [SymbolicTensor(trace.graph.largest(found)), None]


def _avg_pool(
    trace: Trace,
    a: Value,
    size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    axes: int = 2,
) -> Value:
    around, window = _all(padding, axes), _all(size, axes)
    if ceil_mode or divisor_override or (any(around) and not count_include_pad):
        raise trace.refuse("this form of average pooling")
    steps = _all(stride, axes) if len(stride) else window
    found = trace.windows(a, window, steps, [(each, each) for each in around])
    return SymbolicTensor(trace.graph.mean(found))


def _adaptive(trace: Trace, a: Value, outputs: Sequence[int]) -> Value:
    axes = len(outputs)
    sizes = a.cells.shape[-axes:] if isinstance(a, SymbolicTensor) else ()
    if any(size % count for size, count in zip(sizes, outputs, strict=True)):
        raise trace.refuse(f"an adaptive pooling of {sizes} to {tuple(outputs)}")
    window = [size // count for size, count in zip(sizes, outputs, strict=True)]
    return SymbolicTensor(trace.graph.mean(trace.windows(a, window, window, [(0, 0)] * axes)))


def _batch_norm(
    trace: Trace,
    a: Value,
    weight: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    *rest: Any,
    **named: Any,
) -> list[Any]:
    eps = float(named.get("eps", rest[-1]))
    if rest[0] is True or mean is None or not isinstance(a, SymbolicTensor):
        raise trace.refuse("a batch norm by the statistics of the batch; call model.eval()")
    size = len(mean.value)
    over = (-1, *[1] * (a.cells.ndim - 2))
    ones, zeros = np.ones(size), np.zeros(size)
    scale = scale_of_norm(ones if weight is None else weight.value, variance.value, eps)
    shift = zeros if bias is None else np.asarray(bias.value, np.float64)
    centre = np.asarray(mean.value, np.float64)
    made = trace.graph.normalized(
        a.cells, scale.reshape(over), centre.reshape(over), shift.reshape(over)
    )
    return [SymbolicTensor(made), None, None]


def _layer_norm(
    trace: Trace, a: Value, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> list[Any]:
    if not isinstance(a, SymbolicTensor):
        raise trace.refuse("a layer norm of fixed numbers")
    cells = a.cells.reshape(*a.cells.shape[: a.cells.ndim - len(shape)], -1)
    scale, shift = [
        None if each is None else np.asarray(each.value, np.float64).reshape(-1)
        for each in (weight, bias)
    ]
    made = trace.graph.layer_norm(cells, scale, shift, eps)
    return [SymbolicTensor(made.reshape(a.cells.shape)), None, None]


def _gelu(trace: Trace, a: Value, approximate: str = "none") -> Value:
    return trace.function("gelu" if approximate == "none" else "gelu_tanh", a)


def _softmax(trace: Trace, a: Value, axis: int, *rest: Any) -> Value:
    return trace.softmax(a, axis)


def _clamp(trace: Trace, a: Value, low: Any = None, high: Any = None) -> Value:
    if isinstance(low, FixedTensor | SymbolicTensor) or isinstance(
        high, FixedTensor | SymbolicTensor
    ):
        raise trace.refuse("a clip by tensors")
    return trace.clip(a, low, high)


def _power(trace: Trace, a: Value, exponent: Any) -> Value:
    if exponent != 2:
        raise trace.refuse(f"a power of {exponent}")
    return trace.function("square", a)


def _reduced(
    trace: Trace,
    a: Value,
    axes: Any = None,
    keep: bool = False,
    *,
    mean: bool = False,
    dtype: Any = None,
) -> Value:
    a = _converted(trace, a, dtype=dtype)
    ndim = a.cells.ndim if isinstance(a, SymbolicTensor) else np.ndim(a.value)
    chosen = range(ndim) if axes is None else _all(axes, 1)
    return trace.total(a, list(chosen), keep, mean)


def _amax(trace: Trace, a: Value, axes: Any = (), keep: bool = False) -> Value:
    ndim = a.cells.ndim if isinstance(a, SymbolicTensor) else np.ndim(a.value)
    return trace.largest(a, list(axes) or list(range(ndim)), keep)


def _slice(
    trace: Trace, a: Value, axis: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Value:
    def cut(x: Any) -> Any:
        return x[(*[slice(None)] * (axis % x.ndim), slice(start, end, step))]

    return trace.moved(cut, a)


def _split(trace: Trace, a: Value, sizes: Any, axis: int = 0) -> list[Value]:
    length = (a.cells if isinstance(a, SymbolicTensor) else a.value).shape[axis]
    if isinstance(sizes, int):
        sizes = [min(sizes, length - at) for at in range(0, length, sizes)]
    ends = np.cumsum(sizes)
    return [
        _slice(trace, a, axis, int(end - size), int(end))
        for size, end in zip(sizes, ends, strict=True)
    ]


def _unbind(trace: Trace, a: Value, axis: int = 0) -> list[Value]:
    length = (a.cells if isinstance(a, SymbolicTensor) else a.value).shape[axis]
    return [trace.moved(partial(np.take, indices=at, axis=axis), a) for at in range(length)]


def _expand(trace: Trace, a: Value, sizes: Sequence[int], **named: Any) -> Value:
    def grown(x: Any) -> Any:
        own = (1,) * (len(sizes) - x.ndim) + x.shape
        full = [have if size == -1 else size for size, have in zip(sizes, own, strict=True)]
        return np.broadcast_to(x, full)

    return trace.moved(grown, a)


def _pad(trace: Trace, a: Value, widths: Sequence[int], value: float = 0.0) -> Value:
    ndim = a.cells.ndim if isinstance(a, SymbolicTensor) else np.ndim(a.value)
    pairs = list(zip(widths[::2], widths[1::2], strict=True))[::-1]
    if min(widths) < 0:
        raise trace.refuse("a padding that cuts")
    return trace.padded(a, [(0, 0)] * (ndim - len(pairs)) + pairs, value)


def _same(trace: Trace, a: Value, *rest: Any, **named: Any) -> Value:
    return a


def _shaped(change: Callable[..., Any]) -> Op:
    """A primitive that moves elements; `change` gets the array and the other arguments."""
    return lambda trace, a, *rest, **named: trace.moved(lambda x: change(x, *rest), a)


def _converted(trace: Trace, a: Value, *rest: Any, **named: Any) -> Value:
    dtype = named.get("dtype")
    if dtype is not None and str(dtype) not in ("torch.float32", "torch.float64"):
        raise trace.refuse(f"a conversion to {dtype}")
    return a


def _named(name: str) -> Op:
    return lambda trace, a: trace.function(name, a)


_OPS: dict[str, Op] = {
    "abs": lambda trace, a: trace.absolute(a),
    "add": _add,
    "addmm": _addmm,
    "_adaptive_avg_pool2d": _adaptive,
    "alias": _same,
    "amax": _amax,
    "avg_pool1d": partial(_avg_pool, axes=1),
    "avg_pool2d": _avg_pool,
    "bmm": lambda trace, a, b: trace.matmul(a, b),
    "cat": lambda trace, parts, axis=0: trace.moved(lambda *xs: np.concatenate(xs, axis), *parts),
    "clamp": _clamp,
    "clamp_max": lambda trace, a, high: _clamp(trace, a, None, high),
    "clamp_min": lambda trace, a, low: _clamp(trace, a, low, None),
    "clone": _same,
    "constant_pad_nd": _pad,
    "convolution": _convolution,
    "detach": _same,
    "div": lambda trace, a, b: trace.divide(_number(a), _number(b)),
    "exp": _named("exp"),
    "expand": _expand,
    "gelu": _gelu,
    "hardtanh": lambda trace, a, low=-1.0, high=1.0: trace.clip(a, low, high),
    "leaky_relu": lambda trace, a, slope=0.01: trace.leaky_relu(a, slope),
    "linear": _linear,
    "max_pool2d_with_indices": _max_pool,
    "maximum": lambda trace, a, b: trace.maximum(a, b),
    "mean": partial(_reduced, mean=True),
    "minimum": lambda trace, a, b: trace.minimum(a, b),
    "mm": lambda trace, a, b: _linear_of(trace, a, b, None),
    "mul": lambda trace, a, b: trace.multiply(_number(a), _number(b)),
    "_native_batch_norm_legit_no_training": _batch_norm,
    "native_batch_norm": _batch_norm,
    "native_layer_norm": _layer_norm,
    "neg": lambda trace, a: trace.multiply(a, FixedTensor(np.float64(-1.0))),
    "permute": _shaped(lambda x, axes: np.transpose(x, axes)),
    "pow": _power,
    "reciprocal": _named("reciprocal"),
    "relu": _named("relu"),
    "rsqrt": _named("rsqrt"),
    "rsub": lambda trace, a, b, alpha=1: _add(trace, b, a, alpha, -1),
    "select": _shaped(lambda x, axis, at: np.take(x, at, axis)),
    "sigmoid": _named("sigmoid"),
    "silu": _named("silu"),
    "slice": _slice,
    "_softmax": _softmax,
    "_log_softmax": lambda trace, a, axis, *rest: trace.log_softmax(a, axis),
    "_safe_softmax": _softmax,
    "split": _split,
    "split_with_sizes": _split,
    "squeeze": _shaped(
        lambda x, axes=None: np.squeeze(
            x, None if axes is None else tuple([a for a in _all(axes, 1) if x.shape[a] == 1])
        )
    ),
    "stack": lambda trace, parts, axis=0: trace.moved(lambda *xs: np.stack(xs, axis), *parts),
    "sub": partial(_add, sign=-1),
    "sum": _reduced,
    "t": _shaped(lambda x: x.T),
    "tanh": _named("tanh"),
    "_to_copy": _converted,
    "transpose": _shaped(lambda x, a, b: np.swapaxes(x, a, b)),
    "unbind": _unbind,
    "unsqueeze": _shaped(lambda x, axis: np.expand_dims(x, axis)),
    "_unsafe_view": _shaped(lambda x, shape: np.reshape(x, shape)),
    "view": _shaped(lambda x, shape: np.reshape(x, shape)),
}
"""How each primitive of ATen is lowered."""
