"""PyTorch's compiler. It keeps what it made across processes, in a folder of its own."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from inspect import signature
from math import inf
from typing import Any

import torch
from torch import Tensor

from anydevice._core.primitives import Compiler
from anydevice._engines.base import CompileOptions, compiled_for_each

with warnings.catch_warnings(), suppress(ImportError):
    # PyTorch's compiler imports this file, which warns of deprecated calls of PyTorch's own.
    warnings.filterwarnings("ignore", ".*torch.jit.script_method", DeprecationWarning)
    import torch.utils.mkldnn

_MOST_VERSIONS = 256
"""Limit of recompilations of a function: the most that PyTorch allows."""

_KEEPING = "TORCHINDUCTOR_FX_GRAPH_CACHE"
_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
_MOST = "max-autotune-no-cudagraphs"
"""CUDA graphs would give out memory that the next call overwrites."""

# By default, PyTorch gives up at the ninth shape. Older releases have no limit for one function, so
# there sizes that change become variables.
_KNOWN = signature(torch.compile).parameters
_OPTIONS: dict[str, Any] = (
    {"dynamic": False, "recompile_limit": _MOST_VERSIONS, "isolate_recompiles": True}
    if "isolate_recompiles" in _KNOWN and "recompile_limit" in _KNOWN
    else {"dynamic": None}
)


_LOOKED_AT = ("TENSOR_MATCH", "SHAPE_ENV", "GRAD_MODE", "GLOBAL_STATE", "DEFAULT_DEVICE")
"""Guards that PyTorch checks before each call if only arrays differ between calls."""


# Releases of PyTorch before 2.7 check all guards.
_FIXED: dict[str, Any] = (
    {"guard_filter_fn": lambda guards: [guard.guard_type in _LOOKED_AT for guard in guards]}
    if hasattr(torch.compiler, "keep_tensor_guards_unsafe")
    else {}
)


class TorchCompiler:
    """Whole functions by `torch.compile`: what it cannot look through is an error, not slow."""

    def compile(self, function: Callable[..., Tensor], **named: Any) -> Callable[..., Any]:
        """See the protocol. Donation has no effect; values of `static` arguments are hashable."""
        chosen = CompileOptions(**named)
        options = _options(chosen.max_effort) | (_FIXED if chosen.fixed else {})
        compile_one = partial(torch.compile, fullgraph=chosen.whole, options=options, **_OPTIONS)
        if chosen.static:
            return compiled_for_each(function, chosen.static, compile_one)
        compiled: Callable[..., Any] = compile_one(function)
        return compiled

    def efforts(self, max_effort: bool) -> str:
        return f"torch.compile, mode {_MOST}" if max_effort else "torch.compile"

    def keep(self, folder: str) -> str | None:
        """See the protocol. PyTorch reads the variable when it compiles, and sets a default."""
        if os.environ.get(_KEEPING) == "0":
            return None
        module = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
        default = os.environ.get(_FOLDER)
        if default and module and default == os.path.abspath(module.default_cache_dir()):
            del os.environ[_FOLDER]
        return os.environ.setdefault(_FOLDER, folder)


# Indices out of range. On the CPU, compiled code raises a C++ exception on a thread of its own,
# which ends the process. So each use of an index gets a check that raises IndexError, as PyTorch
# does without a compiler. On a GPU, both fail alike, and a check would have to wait.

_OPS = torch.library.Library("anydevice", "FRAGMENT")
_OPS.define("zero_in_range(Tensor index, Tensor is_outside, int low, int high) -> Tensor")


def _zero_in_range(index: Any, is_outside: Any, low: int, high: int) -> Any:
    """Return 0 in the dtype of the index; raises `IndexError` if an element is outside."""
    if is_outside:
        first = index[(index < low) | (index >= high)].reshape(-1)[0]
        raise IndexError(
            f"index {int(first)} is out of range; here indices are from {low} to {high - 1}"
        )
    return index.new_zeros(())


_OPS.impl("zero_in_range", _zero_in_range, "CPU")
_OPS.impl("zero_in_range", lambda index, *_: index.new_empty(()), "Meta")

_aten, _prims = torch.ops.aten, torch.ops.prims
_OF_ITEMS = (_aten.index.Tensor, _aten.index_put.default)
_ALONG_AN_AXIS = (
    _aten.gather.default,
    _aten.scatter.src,
    _aten.scatter.value,
    _aten.scatter.reduce,
    _aten.scatter.value_reduce,
    _aten.scatter_add.default,
    _aten.scatter_reduce.two,
)
_CLAMPING = (_aten.clamp_min, _aten.clamp_max)
_SELECTING = (
    _aten.view,
    _aten.expand,
    _aten.unsqueeze,
    _aten.squeeze,
    _aten.permute,
    _aten.slice,
    _aten.select,
    _aten.gather,
    _aten.clone,
    _prims.convert_element_type,
)
"""Their results have no elements but those of the first argument."""


def _options(max_effort: bool) -> dict[str, Any]:
    """Return the options of PyTorch's compiler. It is imported here, because that takes seconds."""
    import torch._inductor as inductor
    import torch._inductor.config as config

    options = dict(inductor.list_mode_options(_MOST)) if max_effort else {}
    if config.joint_custom_post_pass is None:  # else the user has one
        options |= _checks()
    return options


@cache
def _checks() -> dict[str, Any]:
    """Return the option that inserts checks; none before PyTorch 2.6, which would not cache it."""
    try:
        from torch._inductor.custom_graph_pass import CustomGraphPass
    except ImportError:
        return {}

    class Checks(CustomGraphPass):  # type: ignore[misc]
        def __call__(self, graph: torch.fx.GraphModule) -> None:
            _check_indices(graph)

        def uuid(self) -> str:
            return "anydevice: indices 1"

    return {"joint_custom_post_pass": Checks()}


def _check_indices(graph: torch.fx.GraphModule) -> None:
    """Put a check before each use of an index in the CPU's memory that could be out of range."""
    checked: dict[Any, Any] = {}
    for node in list(graph.nodes):
        for index, low, high in _indices_of(node):
            least, most = _range_of(index)
            if (low <= least and most < high) or index.meta["val"].device.type != "cpu":
                continue
            key = index, low, high
            if key not in checked:
                with graph.inserting_before(node):
                    checked[key] = _with_check(graph, *key)
            node.replace_input_with(index, checked[key])


def _indices_of(node: torch.fx.Node) -> Iterator[tuple[Any, int, int]]:
    """Yield the arguments of a node that are indices, each with the range it must be in."""
    uses: list[tuple[Any, Any, Any]] = []
    if any("val" not in x.meta for x in node.all_input_nodes):
        return  # its shapes are not known
    if node.target is _aten.embedding.default:
        table, index = node.args[:2]
        uses = [(index, 0, _shape(table)[0])]
    elif node.target in _ALONG_AN_AXIS:
        x, axis, index = node.args[:3]
        uses = [(index, 0, (_shape(x) or (1,))[axis])]
    elif node.target in _OF_ITEMS:
        x, indices = node.args[:2]
        sizes = zip(indices, _shape(x), strict=False)
        uses = [(index, -size, size) for index, size in sizes if index is not None]
    if not all(_has_integers(index) for index, _, _ in uses):
        return  # a mask, which stands for several axes
    yield from (use for use in uses if isinstance(use[2], int))  # else a size may change


def _range_of(node: torch.fx.Node) -> tuple[float, float]:
    """Return bounds of the node's elements if they are easy to see."""
    if isinstance(node, int):
        return node, node
    if not _has_integers(node):  # those of floating-point numbers may come from NaN
        return -inf, inf
    kind, arguments = getattr(node.target, "overloadpacket", None), node.args
    if kind in _SELECTING:
        return _range_of(arguments[0])
    if kind is _aten.where:
        one, other = _range_of(arguments[1]), _range_of(arguments[2])
        return min(one[0], other[0]), max(one[1], other[1])
    if kind is _prims.iota:
        ends = node.kwargs["start"], node.kwargs["start"] + node.kwargs["step"] * (arguments[0] - 1)
        return min(ends), max(ends)
    if kind is _aten.argmax and len(arguments) > 1:
        return 0, _shape(arguments[0])[arguments[1]] - 1
    if kind in _CLAMPING and isinstance(arguments[1], int):
        (least, most), bound = _range_of(arguments[0]), arguments[1]
        of_two = max if kind is _aten.clamp_min else min
        return of_two(least, bound), of_two(most, bound)
    if kind is _aten.remainder and isinstance(arguments[1], int) and arguments[1] > 0:
        return 0, arguments[1] - 1
    return -inf, inf


def _has_integers(node: torch.fx.Node) -> bool:
    value = getattr(node, "meta", {}).get("val")
    is_mask = getattr(value, "dtype", None) in (torch.bool, torch.uint8)
    return isinstance(value, Tensor) and not value.is_floating_point() and not is_mask


def _shape(node: torch.fx.Node) -> tuple[Tensor, ...]:
    return tuple(node.meta["val"].shape)


def _with_check(graph: torch.fx.GraphModule, index: Any, low: int, high: int) -> Any:
    def call(target: Any, *arguments: Any) -> Any:
        node = graph.call_function(target, arguments)
        values = [x.meta["val"] if isinstance(x, torch.fx.Node) else x for x in arguments]
        node.meta["val"] = target(*values)
        return node

    below = call(_aten.lt.Scalar, index, low)
    above = call(_aten.ge.Scalar, index, high)
    is_outside = call(_aten.any.default, call(_aten.logical_or.default, below, above))
    zero = call(torch.ops.anydevice.zero_in_range.default, index, is_outside, low, high)
    return call(_aten.add.Tensor, index, zero)


COMPILER: Compiler = TorchCompiler()
