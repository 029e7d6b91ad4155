"""Modules of PyTorch."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from functools import cache, partial
from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from anydevice._arrays.move import device_of, to_device
from anydevice._core.array import Array
from anydevice._core.device import Device
from anydevice._libraries import base
from anydevice._libraries.precision import Policy, has_coarse_products
from anydevice._machine.engines import registry

if TYPE_CHECKING:
    from anydevice._core.array import HostArray

_FORWARD, _OWN_FORWARD = attrgetter("forward"), methodcaller("get", "forward")
_FOLLOWS = (
    "weights, steps of optimizers, buffers, parts, mode, hooks, forward; not plain attributes, nor "
    "writes through NumPy or .data: call refresh() after these"
)
_SHARED = (
    "everything, for the module itself runs; only writes through NumPy or .data do not end a "
    "verification"
)
_EXACT = re.compile(
    "aten::_?(abs|amax|amin|argsort|cat|clamp|clone|constant|copy|embedding|empty|flip|full|gather|"
    "index|masked|max|min|neg|new|nan_to|ones|pad|relu|repeat|roll|round|scalar|scatter|sort|stack|"
    "to_copy|topk|tri|unsafe_view|where|zero)"
)
"""Operations that select or copy numbers."""
_RANDOM_IN_TRAINING = re.compile("Dropout|BatchNorm|InstanceNorm|RReLU|DropPath")


class TorchAdapter(base.ModelAdapter):
    """A `torch.nn.Module`, moved in place, or copied if its weights need another dtype."""

    kind = "torch.nn.Module"
    library = "torch"

    def __init__(
        self,
        module: nn.Module,
        notes: tuple[str, ...] = (),
        computing: tuple[str, str] | None = None,
    ) -> None:
        self.module = module
        self.notes = notes
        self._computing = computing
        self.follows = _SHARED
        self._copied: Any = None
        self._code: base.ChangeDetector | None = None
        self._changed: AbstractContextManager[Any] | None = None

    def call(self, arguments: base.Arguments, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)

    def with_policy(self, policy: Policy) -> Callable[..., Any]:
        if not policy.casts_parameters:
            return self.call
        module, kind = self.module, self._device_type()
        dtype, wanted = getattr(torch, policy.compute), getattr(torch, policy.output)

        def widened(x: Any) -> Any:
            floating = isinstance(x, torch.Tensor) and x.is_floating_point()
            return x.to(wanted) if floating else x

        def run(arguments: base.Arguments, *inputs: Any, **named: Any) -> Any:
            with torch.autocast(kind, dtype=dtype):
                result = module(*inputs, **named)
            return torch.utils._pytree.tree_map(widened, result)

        return run

    def for_tracing(self, device: Device, policy: Policy) -> base.ModelAdapter:
        if not policy.casts_parameters:
            return self
        return TorchAdapter(self.module, computing=(self._device_type(), policy.compute))

    def input_dtype(self, policy: Policy) -> str:
        return policy.parameters

    def traced(self, after: base.After, *inputs: Any, **named: Any) -> Any:
        def hook(part: Any, given: Any, result: Any, name: str) -> Any:
            return after(name, result)

        with ExitStack() as hooks:
            for path, part in self.module.named_modules():
                if path and not isinstance(part, torch.jit.ScriptModule):  # it runs no hooks
                    own = partial(hook, name=f"{path} {type(part).__name__}")
                    hooks.callback(part.register_forward_hook(own).remove)
            if self._changed is not None:
                hooks.enter_context(self._changed)
            return self.module(*inputs, **named)

    def weights(self) -> Mapping[str, torch.Tensor]:
        return {
            **{name: x.detach() for name, x in self.module.named_parameters()},
            **dict(self.module.named_buffers()),
        }

    def moved(self, device: Device, dtype: str) -> base.ModelAdapter:
        wanted = getattr(torch, dtype)
        types = {x.dtype for x in self.weights().values() if x.is_floating_point()}
        if types <= {wanted}:
            moved = TorchAdapter(to_device(self.module, device), _notes(self.module))
            # The weights are shared with the module. Compiled code does not run the hooks.
            moved.detector = base.ChangeDetector(lambda: _watch_code(moved.module))
            return moved
        copied = _copy_of(self.module).to(wanted)
        others = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in types - {wanted}))
        note = f"a copy of the module is used, with weights of {dtype} instead of {others}"
        moved = TorchAdapter(to_device(copied, device), (*_notes(copied), note))
        moved.follows = _FOLLOWS
        moved._copied = self.module
        moved._code = base.ChangeDetector(lambda: _watch_code(self.module))
        moved.detector = base.ChangeDetector(lambda: _watch_module(self.module))
        return moved

    def update_weights(self, device: Device, dtype: str) -> bool:
        if self._code is None or self._code.has_changed():
            return False
        if _structure(self._copied) != _structure(self.module):
            return False
        with torch.no_grad():
            for source, part in zip(self._copied.modules(), self.module.modules(), strict=True):
                part.training = source.training
                _copy(source._parameters, part._parameters)
                _copy(source._buffers, part._buffers)
        return True

    def verified_detector(self, rewritten: Collection[str]) -> base.ChangeDetector | None:
        given = self.module if self._copied is None else self._copied
        return base.ChangeDetector(lambda: _watch_verdict(given, rewritten))

    def state(self) -> base.State:
        plain = vars(torch.nn.Module()).keys()
        return {
            f"{path}.{name}".lstrip("."): (x, _version_of(x))
            for path, part in self.module.named_modules()
            for name, x in (*part._buffers.items(), *vars(part).items())
            if name not in plain
        }

    def reference(self, change: base.Change, engine: str) -> base.ModelAdapter:
        adapter = TorchAdapter(_copy_of(self.module))
        adapter._changed, adapter.changes_operations = ChangedOperations(change), True
        for part in adapter.module.modules():
            for x in part._parameters.values():
                if x is not None:
                    x.requires_grad_(False)
                    x.data = adapter.reference_input(change(_wide_array(x.detach())))
            for name, x in part._buffers.items():
                if x is not None:
                    part._buffers[name] = adapter.reference_input(change(_wide_array(x)))
        return adapter

    @property
    def device(self) -> Device | None:
        return device_of(self.module)

    def scope(self) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(torch.no_grad())
        if self._computing is not None:
            kind, dtype = self._computing
            stack.enter_context(torch.autocast(kind, dtype=getattr(torch, dtype)))
        return stack

    def reference_input(self, x: HostArray) -> Array:
        return torch.from_numpy(x.copy())  # a part may write to it

    def read(self, x: object) -> HostArray | None:
        if not isinstance(x, torch.Tensor) or x.layout != torch.strided:
            return super().read(x)
        return None if registry.load("torch").is_traced(x) else _wide_array(x)

    def input_names(self) -> frozenset[str]:
        return base.parameter_names(self.module.forward)

    def check_verifiable(self) -> None:
        for name, part in self.module.named_modules():
            script = isinstance(part, torch.jit.ScriptModule)  # it has the name of the original
            kind = str(part.original_name if script else type(part).__name__)
            if part.training and _RANDOM_IN_TRAINING.search(kind):
                raise base.training_mode_error(name)

    def has_coarse_products(self, device: Device) -> bool:
        """Whether TF32 is used, as in the base class; convolution weights have 3 or more axes."""
        convolutions = max([x.ndim for x in self.weights().values()], default=0) > 2
        recurrent = any(isinstance(part, torch.nn.RNNBase) for part in self.module.modules())
        return has_coarse_products(device, convolutions=convolutions or recurrent)

    def _device_type(self) -> str:
        place = self.device or Device("cpu", 0, engine="torch")
        return registry.load("torch").native(place).type


class ChangedOperations(TorchDispatchMode):  # type: ignore[misc]
    """Pass the results of all operations that round through a function."""

    def __init__(self, change: base.Change) -> None:
        super().__init__()
        self._change = change

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not _rounds(func):
            return result
        for x in result if isinstance(result, tuple | list) else (result,):
            if not isinstance(x, torch.Tensor) or x.layout != torch.strided:
                continue
            if x.is_floating_point() or x.is_complex():
                host = x.numpy() if x.dtype == torch.float64 else _wide_array(x)
                x.copy_(torch.from_numpy(self._change(host)))
            if func is torch.ops.aten.gelu.default:  # it rounds 1 + erf(x), which is near 0
                host = _wide_array(args[0])
                x.add_(torch.from_numpy(self._change(host) - host))
        return result


@cache
def _rounds(func: Any) -> bool:
    """Whether an operation computes new numbers; others select, copy or view them."""
    aliases = [returned.alias_info for returned in func._schema.returns]
    return not (_EXACT.match(func.name()) or any(x and not x.is_write for x in aliases))


def without_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of (weights, *arrays) without gradients, unless an input requires them."""

    def run(arguments: base.Arguments, *arrays: torch.Tensor) -> Any:
        for x in arrays:
            if x.requires_grad:
                return function(arguments, *arrays)
        with torch.no_grad():
            return function(arguments, *arrays)

    return run


def no_gradients() -> AbstractContextManager[None]:
    """Return a context in which results carry no gradients."""
    return torch.no_grad()


@contextmanager
def changed_scope(change: base.Change) -> Iterator[None]:
    """Compute without gradients inside the block, and change the results of operations."""
    with torch.no_grad(), ChangedOperations(change):
        yield


def allows_tf32(*, convolutions: bool) -> bool:
    """Whether PyTorch's settings allow TF32 for matrix products, or for `convolutions`."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    parts = (matmul, cudnn.conv, cudnn.rnn) if convolutions else (matmul,)
    return any(part.fp32_precision == "tf32" for part in parts)


def _wide_array(x: torch.Tensor) -> HostArray:
    """Read a tensor as a NumPy array; floats as float64, which represents them exactly."""
    x = x.detach().resolve_conj().resolve_neg()
    return x.to("cpu", torch.float64 if x.is_floating_point() else x.dtype, copy=True).numpy()


def _copy_of(module: nn.Module) -> nn.Module:
    copied = deepcopy(module)
    for x in copied.parameters():
        if not x.is_leaf:  # TorchScript copies it as a value computed from the original
            x.detach_().requires_grad_()
    return copied


def _watch_module(module: nn.Module, *, buffers: bool = True) -> base.Watched:
    """Watch the weights, the mode and the code of a module."""
    code, parts = _watch_code(module), list(module.modules())
    holders = [part._parameters for part in parts]
    if buffers:
        holders += [part._buffers for part in parts]
    dicts, views = _split_holders(holders)
    tensors = [x for holder in holders for x in holder.values() if _has_version(x)]
    # The training mode is read from `vars` if it is there.
    own = [vars(part) for part in parts if "training" in vars(part)]
    others = [part for part in parts if "training" not in vars(part)]
    values: list[base.Read] = [
        *code.values,
        partial(map, itemgetter("training"), own),
        partial(map, attrgetter("training"), others),
        partial(map, attrgetter("_version"), tensors),
        _StepCounter(module.parameters()),
    ]
    return base.Watched(code.views + views, [], values, code.dicts + dicts)


def _watch_code(module: nn.Module) -> base.Watched:
    """Watch everything that decides the computation: parts, hooks, and each `forward`."""
    parts = list(module.modules())
    everywhere = torch.nn.modules.module
    holders = [everywhere._global_forward_pre_hooks, everywhere._global_forward_hooks]
    for part in parts:
        holders += [part._modules, part._forward_pre_hooks, part._forward_hooks]
    dicts, views = _split_holders(holders)
    kinds = [kind for kind in {type(part): None for part in parts} if hasattr(kind, "forward")]
    variables = [vars(part) for part in parts]

    def forwards() -> list[Any]:
        return [*map(_FORWARD, kinds), *map(_OWN_FORWARD, variables)]

    return base.Watched(views, [], [forwards], dicts)


def _split_holders(
    holders: list[Any],
) -> tuple[tuple[dict[Any, Any], ...], list[Collection[Any]]]:
    """Return the plain dicts, and the values of TorchScript's other containers."""
    plain = tuple([x for x in holders if type(x) in (dict, OrderedDict)])
    return plain, [x.values() for x in holders if type(x) not in (dict, OrderedDict)]


def _watch_verdict(module: nn.Module, rewritten: Collection[str]) -> base.Watched:
    """Watch everything visible of a module, except for state that it rewrites itself in a call."""
    watched = _watch_module(module, buffers=False)
    plain = {*vars(torch.nn.Module()), *rewritten}
    places = [
        (holder, name)
        for path, part in module.named_modules()
        for holder in (part._buffers, vars(part))
        for name in list(holder.keys())
        if name not in plain and f"{path}.{name}".lstrip(".") not in plain
    ]

    def values() -> list[Any]:
        return [
            holder[name] if name in holder else None  # noqa: SIM401 - TorchScript's have no get
            for holder, name in places
        ]

    versions = [*watched.values, lambda: map(_version_of, values())]
    return base.Watched(watched.views, [values], versions, watched.dicts)


class _StepCounter:
    """Counts optimizer steps on these weights: `fused=True` does not raise version counters."""

    def __init__(self, weights: Iterator[Any]) -> None:
        self._weights = {id(x) for x in weights}
        self._count = 0
        key, counters = id(self), _step_counters()
        counters[key] = ref(self, lambda _: counters.pop(key, None))

    def __call__(self) -> tuple[int]:
        return (self._count,)

    def see(self, optimizer: torch.optim.Optimizer) -> None:
        groups = [group["params"] for group in optimizer.param_groups]
        self._count += any(id(x) in self._weights for x in chain.from_iterable(groups))


@cache
def _step_counters() -> dict[int, ref[_StepCounter]]:
    """Return all step counters. PyTorch reports each step to them, from the first module on."""
    counters: dict[int, ref[_StepCounter]] = {}

    def after_step(optimizer: torch.optim.Optimizer, given: Any, named: Any) -> None:
        for reference in list(counters.values()):
            counter = reference()
            if counter is not None:
                counter.see(optimizer)

    register_optimizer_step_post_hook(after_step)
    return counters


def _version_of(x: Any) -> int:
    is_tensor = isinstance(x, torch.Tensor)
    return x._version if is_tensor and _has_version(x) else 0


def _has_version(x: torch.Tensor | None) -> bool:
    """Whether PyTorch counts writes to this tensor; inference tensors have no version."""
    return x is not None and not x.is_inference()


def _structure(module: nn.Module) -> list[Any]:
    """Return the parts of a module, and the shapes of its weights."""

    def shapes(tensors: Mapping[str, torch.Tensor | None]) -> list[Any]:
        return [(name, None if x is None else x.shape) for name, x in tensors.items()]

    return [
        (path, type(part), shapes(part._parameters), shapes(part._buffers))
        for path, part in module.named_modules()
    ]


def _copy(source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> None:
    for name, x in target.items():
        if x is not None:
            x.copy_(source[name])


def _notes(module: nn.Module) -> tuple[str, ...]:
    return (base.training_mode_note(),) * bool(module.training)


@contextmanager
def in_inference(model: nn.Module) -> Iterator[nn.Module]:
    """Hold the module in inference mode inside the block."""
    with base.in_mode(model, training=False):
        yield model
