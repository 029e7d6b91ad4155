"""Traces a PyTorch module: `TorchDispatchMode` intercepts each ATen primitive as it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from anydevice._core.protocols import FixedTensor, SymbolicTensor, Windows
from anydevice._core.protocols import TracedTensor as Traced
from anydevice._libraries.base import ModelAdapter, host_array

if TYPE_CHECKING:
    from anydevice._proofs.tracing import NetworkTrace as Trace

Rule = Callable[..., Any]
Sizes = Sequence[int]
_READERS = [getattr(torch.Tensor, name) for name in ("tolist", "numpy", "__array__", "__dlpack__")]
"""Methods that read the values of a tensor without a primitive."""


def trace_output(adapter: ModelAdapter, trace: Trace, shape: tuple[int, ...]) -> Traced:
    """Run a module on one example of a shape, and return its traced output."""
    module: Any = adapter.module  # type: ignore[attr-defined]
    weights = [x for x in module.parameters() if x.is_floating_point()]
    like = weights[0] if weights else torch.zeros(())
    x = torch.zeros((1, *shape), dtype=like.dtype, device=like.device)
    watcher = _Watcher(trace, x)
    with ExitStack() as blocks:
        for path, part in module.named_modules():
            name = f"{path} {type(part).__name__}".strip()
            blocks.enter_context(_path_in(part, name, trace))
        blocks.enter_context(_plain_attention())
        blocks.enter_context(torch.no_grad())
        blocks.enter_context(_RefuseReading(watcher))
        blocks.enter_context(_SeePrimitives(watcher))
        y = module(x)
    if not isinstance(y, torch.Tensor):
        raise trace.refuse(f"a module whose output is a {type(y).__name__}, not one tensor of it")
    return watcher.tensor(y)


def batch_call(adapter: ModelAdapter, shape: tuple[int, ...]) -> Callable[..., Any]:
    """Return the module as a function of a batch of one example."""
    return partial(adapter.call, adapter.arguments)


@contextmanager
def _path_in(part: Any, name: str, trace: Trace) -> Iterator[None]:
    """Set the path of the trace while this module runs."""
    before: list[str] = []

    def enter(*_: Any) -> None:
        before.append(trace.path)
        trace.path = name
        if isinstance(part, torch.nn.RNNBase):  # other executions sum all of a gate at once
            trace.graph.more_roundings = part.input_size + 2 * part.hidden_size + 8

    def leave(*_: Any) -> None:
        trace.path, trace.graph.more_roundings = before.pop(), 0

    hooks = part.register_forward_pre_hook(enter), part.register_forward_hook(leave)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Compute attention and LSTM by their primitives inside the block."""
    before, fuses_lstm = torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled
    torch.backends.mha.set_fastpath_enabled(False)
    torch.backends.mkldnn.enabled = False
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
        torch.backends.mkldnn.enabled = fuses_lstm


class _Watcher:
    """Traces each primitive, and stores each tensor that depends on the input."""

    def __init__(self, trace: Trace, x: Any) -> None:
        self.trace = trace
        # Tensors are kept alive, so that no other one gets their identity or memory.
        self._tensors: dict[int, tuple[Any, Traced | None]] = {id(x): (x, trace.input)}
        self._memory = {_memory_of(x)}

    def run(self, op: Any, args: Any, named: dict[str, Any]) -> Any:
        """Run a primitive, and trace it if one of its arguments depends on the input."""
        name = op.overloadpacket.__name__ if hasattr(op, "overloadpacket") else str(op)
        inplace = name.endswith("_") and not name.endswith("__")
        rule = _RULES.get(name.removesuffix("_") if inplace else name)
        is_traced = any(id(x) in self._tensors for x in _leaves([args, named]))
        if is_traced and rule is None:
            raise self.trace.refuse(f"aten.{name}")
        change = self._input if is_traced else lambda x: x
        inputs, options = _map_leaves(args, change), _map_leaves(named, change)
        result = op(*args, **named)
        if name == "unsafe_split":  # its parts may be changed in place, and the whole is lost
            result = [part.clone() for part in result]
            self._tensors[id(args[0])] = args[0], None
        if not is_traced or rule is None:
            return result
        try:
            traced = rule(self.trace, *inputs, **options)
        except TypeError as error:  # an argument that the rule does not support
            raise self.trace.refuse(f"this use of aten.{name}") from error
        if inplace:
            self._forget_views(args[0])
        for tensor, value in zip(_leaves([result]), _leaves([traced]), strict=False):
            if isinstance(tensor, torch.Tensor) and value is not None:
                if tuple(tensor.shape) != value.shape:
                    raise self.trace.refuse(f"this use of aten.{name}")
                self._tensors[id(tensor)] = tensor, value
                self._memory.add(_memory_of(tensor))
        return result

    def tensor(self, x: Any) -> Traced:
        if id(x) in self._tensors:
            _, value = self._tensors[id(x)]
            if value is None:
                raise self.trace.refuse("a tensor that was changed in place through another one")
            return value
        if x.numel() and _memory_of(x) in self._memory:
            raise self.trace.refuse("a tensor that shares its memory with one that was computed")
        return FixedTensor(np.array(host_array(x.detach())))  # it may be changed in place

    def _input(self, x: Any) -> Any:
        return self.tensor(x) if isinstance(x, torch.Tensor) else x

    def _forget_views(self, changed: Any) -> None:
        memory = _memory_of(changed)
        for key, (tensor, _) in list(self._tensors.items()):
            if tensor is not changed and _memory_of(tensor) == memory:
                self._tensors[key] = tensor, None


class _Watched:
    def __init__(self, watcher: _Watcher) -> None:
        super().__init__()
        self.watcher = watcher


class _SeePrimitives(_Watched, TorchDispatchMode):  # type: ignore[misc]
    """A block in which the watcher sees each primitive."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.watcher.run(op, args, kwargs or {})


class _RefuseReading(_Watched, TorchFunctionMode):  # type: ignore[misc]
    """A block that refuses to read values that depend on the input: no primitive shows it."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _READERS and isinstance(self.watcher.tensor(args[0]), SymbolicTensor):
            raise self.watcher.trace.refuse(f"Tensor.{function.__name__}")
        return function(*args, **(kwargs or {}))


def _memory_of(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, FixedTensor | SymbolicTensor) or not isinstance(tree, dict | list | tuple):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree
    return [leaf for part in parts for leaf in _leaves(part)]


def _map_leaves(tree: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(tree, dict):
        return {name: _map_leaves(part, change) for name, part in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([_map_leaves(part, change) for part in tree])
    return change(tree)


# Rules of primitives: their arguments are ATen's, with traced tensors


def _tensor(trace: Trace, x: Traced | float) -> Traced:
    return x if isinstance(x, FixedTensor | SymbolicTensor) else trace.constant(x)


def _add(
    trace: Trace, a: Traced | float, b: Traced | float, alpha: float = 1, sign: float = 1
) -> Traced:
    return trace.add(_tensor(trace, a), _tensor(trace, b), sign * alpha)


def _addmm(
    trace: Trace, bias: Traced, a: Traced, b: Traced, *, beta: float = 1, alpha: float = 1
) -> Traced:
    if beta != 1 or alpha != 1:
        raise trace.refuse("addmm with factors")
    return trace.linear(a, b, bias)


def _convolution(
    trace: Trace,
    a: Traced,
    weight: Traced,
    bias: Traced | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
    *_: Any,
) -> Traced:
    axes = len(weight.shape) - 2 if isinstance(weight, FixedTensor) else len(stride)
    windows = _windows(axes, stride, padding, dilation)
    if transposed:
        windows = windows._replace(more=_per_axis(output_padding, axes))
    return trace.convolution(a, weight, bias, windows, groups)


def _per_axis(value: int | Sizes, axes: int) -> list[int]:
    sizes = [value] if isinstance(value, int) else list(value)
    return sizes * axes if len(sizes) == 1 else sizes


def _windows(axes: int, stride: Sizes, padding: Sizes = (0,), dilation: Sizes = (1,)) -> Windows:
    steps, widths, spread = [_per_axis(x, axes) for x in (stride, padding, dilation)]
    return Windows(steps, [(width, width) for width in widths], spread)


def _max_pool(
    trace: Trace,
    a: Traced,
    size: Sizes,
    stride: Sizes = (),
    padding: Sizes = (0,),
    dilation: Sizes = (1,),
    ceil_mode: bool = False,
) -> list[Traced | None]:
    if ceil_mode:
        raise trace.refuse("ceil_mode")
    axes = 1 if len(size) == 1 and isinstance(a, SymbolicTensor) and len(a.shape) == 3 else 2
    windows = _windows(axes, stride or size, padding, dilation)
    return [trace.pool("max", a, _per_axis(size, axes), windows), None]


def _avg_pool(
    trace: Trace,
    a: Traced,
    size: Sizes,
    stride: Sizes = (),
    padding: Sizes = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    axes: int = 2,
) -> Traced:
    if ceil_mode or divisor_override or (any(padding) and not count_include_pad):
        raise trace.refuse("this form of average pooling")
    windows = _windows(axes, stride or size, padding)
    return trace.pool("mean", a, _per_axis(size, axes), windows)


def _adaptive_pool(trace: Trace, a: Traced, outputs: Sizes) -> Traced:
    axes = len(outputs)
    sizes = a.shape[-axes:]
    if any(size % count for size, count in zip(sizes, outputs, strict=True)):
        raise trace.refuse(f"an adaptive pooling of {sizes} to {tuple(outputs)}")
    window = [size // count for size, count in zip(sizes, outputs, strict=True)]
    return trace.pool("mean", a, window, _windows(axes, window))


def _batch_norm(
    trace: Trace,
    a: Traced,
    weight: Traced | None,
    bias: Traced | None,
    mean: Traced | None,
    variance: Traced,
    *rest: Any,
    **named: Any,
) -> list[Traced | None]:
    eps = float(named.get("eps", rest[-1]))
    if rest[0] is True or mean is None:
        if " InstanceNorm" not in f" {trace.path}":
            raise trace.refuse("a batch norm by the statistics of its input, not running ones")
        return [trace.group_norm(a, weight, bias, a.shape[1], eps), None, None]
    return [trace.batch_norm(a, weight, bias, mean, variance, eps), None, None]


def _softmax(trace: Trace, a: Traced, axis: int, *_: Any) -> Traced:
    return trace.softmax(a, axis)


def _clamp(trace: Trace, a: Traced, low: float | None = None, high: float | None = None) -> Traced:
    if any(isinstance(limit, FixedTensor | SymbolicTensor) for limit in (low, high)):
        raise trace.refuse("a clip by tensors")
    return trace.clip(a, low, high)


def _power(trace: Trace, a: Traced, exponent: Any) -> Traced:
    if exponent != 2:
        raise trace.refuse(f"a power of {exponent}")
    return trace.function("square", a)


def _sum(
    trace: Trace,
    a: Traced,
    axes: int | Sizes | None = None,
    keep: bool = False,
    *,
    mean: bool = False,
    dtype: Any = None,
) -> Traced:
    a = _convert(trace, a, dtype=dtype)
    return trace.sum(a, range(len(a.shape)) if axes is None else _per_axis(axes, 1), keep, mean)


def _slice(
    trace: Trace,
    a: Traced,
    axis: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Traced:
    index = (*[slice(None)] * (axis % len(a.shape)), slice(start, end, step))
    return trace.rearrange(lambda x: x[index], a)


def _split_axis(trace: Trace, a: Traced, sizes: int | Sizes, axis: int = 0) -> list[Traced]:
    if isinstance(sizes, int):
        length = a.shape[axis]
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
    ends = np.cumsum(sizes)
    return [
        _slice(trace, a, axis, int(end - size), int(end))
        for size, end in zip(sizes, ends, strict=True)
    ]


def _expand(trace: Trace, a: Traced, sizes: Sizes, **_: Any) -> Traced:
    shape = (1,) * (len(sizes) - len(a.shape)) + a.shape
    full = [have if size == -1 else size for size, have in zip(sizes, shape, strict=True)]
    return trace.rearrange(lambda x: np.broadcast_to(x, full), a)


def _pad(trace: Trace, a: Traced, widths: Sizes, value: float = 0.0, mode: str = "") -> Traced:
    pairs = list(zip(widths[::2], widths[1::2], strict=True))[::-1]
    if min(widths) < 0:
        raise trace.refuse("a padding that cuts")
    around = [(0, 0)] * (len(a.shape) - len(pairs)) + pairs
    if mode:
        pad: Any = np.pad
        return trace.rearrange(lambda x: pad(x, around, mode), a)
    return trace.pad(a, around, value)


def _upsample(trace: Trace, a: Traced, sizes: Sizes, *scales: float | None) -> Traced:
    """Repeat elements: the nearest one, by an integer for each axis."""
    axes = range(-len(sizes), 0)
    times = [size / a.shape[axis] for axis, size in zip(axes, sizes, strict=True)]
    differ = any(scale not in (None, k) for scale, k in zip(scales, times, strict=False))
    if differ or not all(k.is_integer() for k in times):
        raise trace.refuse("nearest upsampling other than by integers")
    for axis, k in zip(axes, times, strict=True):
        a = trace.rearrange(lambda x, axis=axis, k=k: np.repeat(x, int(k), axis), a)
    return a


def _interpolate(trace: Trace, a: Traced, sizes: Sizes, aligned: bool, *scales: Any) -> Traced:
    way = "align_corners" if aligned else "half_pixel"
    for axis in range(-len(sizes), 0):
        scale = (scales and scales[axis]) or sizes[axis] / a.shape[axis]
        a = trace.layer("interpolate", a, axis, sizes[axis], scale, way)
    return a


def _softplus(trace: Trace, a: Traced, beta: float = 1.0, threshold: float = 20.0) -> Traced:
    if not 20 <= threshold <= 80:  # the identity above it is as good as log(1 + exp(z))
        raise trace.refuse(f"a softplus that is the identity above {threshold:g}")
    scaled = trace.multiply(a, trace.constant(beta))
    return trace.divide(trace.function("softplus", scaled), trace.constant(beta))


def _elu(trace: Trace, a: Traced, alpha: float = 1, scale: float = 1, inner: float = 1) -> Traced:
    if scale != 1 or inner != 1:
        raise trace.refuse("an ELU with scales, such as SELU and CELU")
    return trace.layer("elu", a, alpha)


def _identity(trace: Trace, a: Traced, *_: Any, **__: Any) -> Traced:
    return a


def _rearrange(change: Callable[..., Any]) -> Rule:
    """Return the rule of a primitive that rearranges elements like `change` does."""
    return lambda trace, a, *rest, **_: trace.rearrange(lambda x: change(x, *rest), a)


def _convert(trace: Trace, a: Traced, *_: Any, **named: Any) -> Traced:
    dtype = named.get("dtype")
    if dtype is not None and str(dtype) not in ("torch.float32", "torch.float64"):
        raise trace.refuse(f"a conversion to {dtype}")
    return a


def _squeeze(x: Any, axes: int | Sizes | None = None) -> Any:
    ones = None if axes is None else tuple([a for a in _per_axis(axes, 1) if x.shape[a] == 1])
    return np.squeeze(x, ones)


def _function(name: str) -> Rule:
    return lambda trace, a: trace.function(name, a)


_RULES: dict[str, Rule] = {
    "abs": lambda trace, a: trace.absolute(a),
    "add": _add,
    "addmm": _addmm,
    "_adaptive_avg_pool2d": _adaptive_pool,
    "alias": _identity,
    "amax": lambda trace, a, axes=(), keep=False: trace.largest(
        a, list(axes) or list(range(len(a.shape))), keep
    ),
    "avg_pool1d": partial(_avg_pool, axes=1),
    "avg_pool2d": _avg_pool,
    "bmm": lambda trace, a, b: trace.matmul(a, b),
    "cat": lambda trace, parts, axis=0: trace.rearrange(
        lambda *xs: np.concatenate(xs, axis), *parts
    ),
    "clamp": _clamp,
    "clamp_max": lambda trace, a, high: _clamp(trace, a, None, high),
    "clamp_min": lambda trace, a, low: _clamp(trace, a, low, None),
    "clone": _identity,
    "constant_pad_nd": _pad,
    "convolution": _convolution,
    "detach": _identity,
    "div": lambda trace, a, b: trace.divide(_tensor(trace, a), _tensor(trace, b)),
    "elu": _elu,
    "exp": _function("exp"),
    "expand": _expand,
    "gelu": lambda trace, a, approximate="none": trace.function(
        "gelu" if approximate == "none" else "gelu_tanh", a
    ),
    "hardsigmoid": lambda trace, a: trace.layer("hard_sigmoid", a, 1 / 6, 0.5),
    "hardswish": lambda trace, a: trace.layer("hard_swish", a),
    "hardtanh": lambda trace, a, low=-1.0, high=1.0: trace.clip(a, low, high),
    "leaky_relu": lambda trace, a, slope=0.01: trace.leaky_relu(a, slope),
    "linear": lambda trace, a, weight, bias=None: trace.linear(
        a, trace.rearrange(lambda x: np.swapaxes(x, 0, 1), weight), bias
    ),
    "max_pool2d_with_indices": _max_pool,
    "maximum": lambda trace, a, b: trace.maximum(a, b),
    "mean": partial(_sum, mean=True),
    "minimum": lambda trace, a, b: trace.minimum(a, b),
    "mish": _function("mish"),
    "mm": lambda trace, a, b: trace.linear(a, b, None),
    "mul": lambda trace, a, b: trace.multiply(_tensor(trace, a), _tensor(trace, b)),
    "_native_batch_norm_legit_no_training": _batch_norm,
    "native_batch_norm": _batch_norm,
    "native_layer_norm": lambda trace, a, shape, weight, bias, eps: [
        trace.layer_norm(a, len(shape), weight, bias, eps),
        None,
        None,
    ],
    "native_group_norm": lambda trace, a, w, b, *sizes: trace.group_norm(a, w, b, *sizes[-2:]),
    "neg": lambda trace, a: trace.multiply(a, trace.constant(-1.0)),
    "permute": _rearrange(lambda x, axes: np.transpose(x, axes)),
    "pixel_shuffle": lambda trace, a, size: trace.pixel_shuffle(a, size),
    "pow": _power,
    "_prelu_kernel": lambda trace, a, slope: trace.leaky_relu(a, slope),
    "reciprocal": _function("reciprocal"),
    "relu": _function("relu"),
    "rsqrt": _function("rsqrt"),
    "rsub": lambda trace, a, b, alpha=1: _add(trace, b, a, alpha, -1),
    **{f"reflection_pad{axes}d": partial(_pad, mode="reflect") for axes in (1, 2, 3)},
    **{f"replication_pad{axes}d": partial(_pad, mode="edge") for axes in (1, 2, 3)},
    "select": _rearrange(lambda x, axis, at: np.take(x, at, axis)),
    "sigmoid": _function("sigmoid"),
    "silu": _function("silu"),
    "slice": _slice,
    "_softmax": _softmax,
    "softplus": _softplus,
    "_log_softmax": lambda trace, a, axis, *rest: trace.log_softmax(a, axis),
    "_safe_softmax": _softmax,
    "split": _split_axis,
    "split_with_sizes": _split_axis,
    "squeeze": _rearrange(_squeeze),
    "stack": lambda trace, parts, axis=0: trace.rearrange(lambda *xs: np.stack(xs, axis), *parts),
    "sub": partial(_add, sign=-1),
    "sum": _sum,
    "t": _rearrange(lambda x: x.T),
    "tanh": _function("tanh"),
    "_to_copy": _convert,
    "transpose": _rearrange(lambda x, a, b: np.swapaxes(x, a, b)),
    "unbind": lambda trace, a, axis=0: [
        trace.rearrange(partial(np.take, indices=i, axis=axis), a) for i in range(a.shape[axis])
    ],
    "unsafe_split": _split_axis,
    "unsqueeze": _rearrange(lambda x, axis: np.expand_dims(x, axis)),
    **{f"upsample_nearest{axes}d": _upsample for axes in (1, 2, 3)},
    **{f"upsample_{name}": _interpolate for name in ("linear1d", "bilinear2d", "trilinear3d")},
    **{f"_upsample_nearest_exact{axes}d": _upsample for axes in (1, 2, 3)},
    "_unsafe_view": _rearrange(lambda x, shape: np.reshape(x, shape)),
    "view": _rearrange(lambda x, shape: np.reshape(x, shape)),
}
"""The rule of each supported primitive of ATen."""
