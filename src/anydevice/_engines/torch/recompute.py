"""Gradient checkpointing of one function: its activations are computed again for its gradient.

Autograd gets a handle for each tensor that it would save. When the backward pass asks for the first
of them, the function runs again, and fills all handles (Chen et al., 2016, "Training deep nets with
sublinear memory cost"). Tensors that share memory with an argument or result are kept, since they
exist anyway.

PyTorch's own function imports its compiler at the first call, which takes 150 MiB; it is used only
where that compiler traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from anydevice.errors import VerificationError

_CPU = torch.device("cpu")


def recompute(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a function that saves only its arguments for its gradient.

    Random numbers and autocast are the same in both runs. Raises `VerificationError` in the
    backward pass if an argument, or a weight that autograd saves, was changed in place meanwhile,
    or if the second run computes other tensors than the first. Other changes, such as of a bias
    that is only added, are not noticed.

    >>> x = torch.ones(3, requires_grad=True)
    >>> recompute(torch.sin, x).sum().backward()
    >>> bool((x.grad == torch.cos(torch.ones(3))).all())
    True
    """
    if torch.compiler.is_compiling():
        return checkpoint(function, *arguments, use_reentrant=False, **named)
    if not torch.is_grad_enabled():
        return function(*arguments, **named)
    return _Segment(function, arguments, named).run()


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in dicts, tuples and lists."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict | tuple | list):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(part)


class _Handle:
    """A tensor that autograd would save; if `is_kept`, it need not be recomputed."""

    value: Tensor | None = None
    version: int = 0
    is_kept: bool = False

    def fill(self, x: Tensor, *, keep: bool = False) -> None:
        self.value, self.version, self.is_kept = x.detach(), x._version, keep

    @property
    def is_intact(self) -> bool:
        """Whether its value is there, and was not changed in place."""
        return self.value is not None and self.value._version == self.version


class _Complete(BaseException):
    """Ends a recomputation: all tensors that are needed are there."""


class _Segment:
    """One recomputed call: function, arguments, random states, handles."""

    def __init__(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]
    ) -> None:
        self._function, self._arguments, self._named = function, arguments, named
        self._tensors = list(tensors_in((arguments, dict(named))))
        self._storages = set(map(_storage_of, self._tensors))
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in sorted({"cpu", *[x.device.type for x in self._tensors]})
            if torch.amp.is_autocast_available(kind)
        ]
        self._generators = list(map(_generator, {x.device for x in self._tensors} | {_CPU}))
        self._random = [generator.get_state() for generator in self._generators]
        self._handles: list[tuple[ref[_Handle], Any]] = []
        self._versions: list[int] | None = None
        self._written: list[tuple[int, _Handle, StorageWeakRef, Any]] = []
        """The handles of the first run with their number and memory, until it has ended."""
        self._outer: dict[int, tuple[StorageWeakRef, int]] = {}
        """Memory that outlived the first run, such as weights, with its version, by handle."""

    def run(self) -> Any:
        """Run the function for the first time."""
        with saved_tensors_hooks(self._pack, self._unpack):
            result = self._function(*self._arguments, **self._named)
        self._versions = self._present_versions()
        results = {_storage_of(x): x for x in tensors_in(result)}
        for number, handle, storage, (dtype, version, *layout) in self._written:
            x = results.get(storage.cdata)
            if x is not None and (x.dtype, x._version) == (dtype, version):
                handle.fill(x.detach().as_strided(*layout), keep=True)
            elif x is None and not storage.expired():
                self._outer[number] = storage, version
        self._written.clear()
        return result

    def _present_versions(self) -> list[int]:
        return [x._version for x in self._tensors if not x.is_inference()]

    def _pack(self, x: Tensor) -> _Handle:
        number, handle, storage = len(self._handles), _Handle(), _storage_of(x)
        self._handles.append((ref(handle), (x.shape, x.dtype, x.device)))
        if storage in self._storages and storage is not None:
            handle.fill(x, keep=True)
        elif storage is not None:
            layout = x.dtype, x._version, x.shape, x.stride(), x.storage_offset()
            self._written.append((number, handle, StorageWeakRef(x.untyped_storage()), layout))
        return handle

    def _unpack(self, handle: _Handle) -> Tensor:
        if self._versions not in (None, self._present_versions()):
            raise _restore_error(
                "an argument was changed in place before the gradients were computed"
            )
        if not handle.is_intact:
            handle.value = None
            self._run_again()
        value = handle.value
        if value is None or not handle.is_intact:
            raise _restore_error(
                "an operation modifies in place a tensor that another operation saved"
            )
        if not handle.is_kept:
            handle.value = None
        return value

    def _run_again(self) -> None:
        """Recompute the tensors that autograd still needs."""
        handles = [(handle(), kind) for handle, kind in self._handles]
        empty = [h is not None and h.value is None for h, _ in handles]
        last, number = max(at for at, is_empty in enumerate(empty) if is_empty), 0

        def fill(x: Tensor) -> Tensor:
            nonlocal number
            handle, kind = handles[number]
            if kind != (x.shape, x.dtype, x.device):
                raise _restore_error(
                    f"tensor {number} was {kind}, and is {tuple(x.shape)}, {x.dtype}"
                )
            outer, version = self._outer.get(number, (None, 0))
            if outer and outer.cdata == _storage_of(x) and version != x._version:
                raise _restore_error("a tensor that the function uses was changed in place")
            if empty[number] and handle is not None:
                handle.fill(x)
            number += 1
            if number > last:
                raise _Complete
            return x.detach()  # for a gradient that the function takes itself

        with ExitStack() as stack:
            stack.enter_context(_random_states(self._generators, self._random))
            stack.enter_context(torch.enable_grad())
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled))
            stack.enter_context(saved_tensors_hooks(fill, lambda x: x))
            try:
                self._function(*self._arguments, **self._named)
            except _Complete:
                return
        raise _restore_error(f"it saved {len(handles)} tensors, and now {number}")


def _storage_of(x: Tensor) -> int | None:
    """Return the identity of a tensor's memory; `None` for a sparse tensor."""
    try:
        return int(x.untyped_storage()._cdata)
    except NotImplementedError:
        return None


def _generator(device: torch.device) -> Any:
    """Return the generator of a device's random numbers; the CPU's if it has none."""
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    generators = getattr(getattr(torch, device.type, None), "default_generators", None)
    return generators[device.index] if generators else torch.default_generator


@contextmanager
def _random_states(generators: list[Any], states: list[Tensor]) -> Iterator[None]:
    """Use other random states in the block."""
    before = [generator.get_state() for generator in generators]
    _set_states(generators, states)
    try:
        yield
    finally:
        _set_states(generators, before)


def _set_states(generators: list[Any], states: list[Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def _restore_error(problem: str) -> VerificationError:
    return VerificationError(
        f"the activations of a recomputed layer cannot be restored: {problem}; change nothing "
        "between the forward and the backward pass, or leave this layer out of nn.recompute",
        where="recompute",
    )
